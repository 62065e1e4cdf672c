"""`vitrine verify`: the papers' claims on a published checkpoint from local files."""

from __future__ import annotations

from dataclasses import dataclass
from os import environ
from pathlib import Path

from ..engine.pipelines.loading import LoadConfig
from ..engine.settings.setting_checks import Count, OutFolder
from .options import Load


@dataclass(frozen=True)
class Verify:
    """Measure published figures on your own checkpoint, from local files only; nothing is downloaded.

    It first prints the required files, time and memory; the same command resumes.
    Writes plan.json, verify.json and verify.html: published, measured with intervals, and what differs.
    """

    model: str
    """Pipeline folder or .safetensors file on this machine; 'portraits', 'flow' and 'sized' are the shipped models
    instead, with their own data."""
    claim: tuple[str, ...] = ()
    """Names or globs, e.g. nemo.detection or 'nemo.*'; none: all that the model and the data allow."""
    data: Path | None = None
    """Folder with the authors' files; the plan (--dry) lists them."""
    sscd: Path | None = None
    """SSCD's TorchScript file. It is code, which this option runs; without it copies are judged by pixels."""
    clip: Path | None = None
    """Folder of a CLIPModel with its processor (transformers): prompt alignment."""
    face: Path | None = None
    """A face recogniser's TorchScript file (made with torch.jit.trace). It is executable code, which this option
    runs; without it identities are not compared."""
    lpips: Path | None = None
    """LPIPS as a TorchScript file, likewise."""
    subset: Count | None = None
    """Most prompts or pairs of each kind, always the same ones."""
    memory: str = "4GB"
    """Memory in addition to the weights."""
    out: OutFolder = Path("verify")
    """Folder for the results."""
    dry: bool = False
    """Stop after the plan."""
    load: Load = LoadConfig()

    def run(self) -> int:
        """0 if the named claims were measured, or any without names; 1 if data is missing."""
        environ["HF_HUB_OFFLINE"] = "1"  # before any library reads it
        from ..evidence.verify.context import Asked
        from ..evidence.verify.run import verify

        asked = Asked(
            self.model, self.data, self.sscd, self.clip, self.subset, self.memory, self.out, self.load,
            face=self.face, lpips=self.lpips,
        )  # fmt: skip
        return verify(asked, self.claim, self.dry)
