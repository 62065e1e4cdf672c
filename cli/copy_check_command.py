"""`vitrine nemo check`: which prompts of a list, or of a LoRA, reproduce training pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ..engine.io.prompt_files import read_prompts
from ..engine.pipelines.loading import LoadConfig
from ..engine.settings.setting_checks import AtLeast, Count, OutFolder, OwnSide
from .options import Load


@dataclass(frozen=True)
class Check:
    """Find prompts that reproduce a training picture: how often, where in the picture, and which one.

    Writes copies.html, copies.csv and the nearest sample of each prompt. The same command resumes.
    """

    prompts: Path
    """CSV, TSV, JSON or JSONL with a column prompt (caption, text) and optionally label; or text, one per line."""
    model: str = "portraits"
    """Pipeline folder, hub id or .safetensors file of any text-to-image model."""
    pictures: Path | None = None
    """Folder with the training pictures; none: samples of a prompt are compared with each other."""
    lora: Path | None = None
    """A LoRA (.safetensors) to check; the model without it gives the usual distance."""
    ordinary: Path | None = None
    """A list of captions unrelated to the pictures; required without a LoRA."""
    out: OutFolder = Path("copy-check")
    """Folder for the results."""
    seeds: Count = 8
    """Samples per prompt."""
    first_seed: int = 2000
    """Seed of the first sample."""
    steps: Count = 30
    """Sampling steps."""
    guidance: float = 7.5
    """Guidance scale."""
    height: OwnSide = 0
    """In pixels; 0: the model's default."""
    width: OwnSide = 0
    """In pixels; 0: the model's default."""
    calibrated: Path | None = None
    """The folder that calibrate wrote for this model: its threshold turns NeMo's score into a verdict."""
    clip: Path | None = None
    """Folder of a CLIP vision model (transformers, safetensors): similarity to the nearest picture."""
    shown: Annotated[int, AtLeast(0)] = 50
    """Prompts shown with pictures on the page."""
    memory: str = "2GB"
    """Memory in addition to the model."""
    load: Load = LoadConfig()

    def run(self) -> int:
        """0 on success."""
        from ..engine.diffusion.denoiser import Denoiser
        from ..engine.nemo import ProbeConfig, fingerprint_of
        from ..engine.nemo.calibrated_threshold import Calibrated
        from ..engine.nemo.check import CheckConfig
        from ..engine.pipelines.copy_checks import copy_check
        from ..engine.pipelines.descriptors import clip_descriptor
        from ..engine.pipelines.loading import load_pipeline
        from ..engine.runtime.progress import TqdmProgress

        prompts, labels = read_prompts(self.prompts)
        ordinary = () if self.ordinary is None else tuple(read_prompts(self.ordinary)[0])
        calibrated = None if self.calibrated is None else Calibrated.load(self.calibrated)
        describe = None if self.clip is None else clip_descriptor(self.clip)
        pipe: Any = load_pipeline(self.model, None, self.load)
        probe, tau = ProbeConfig(), None
        if calibrated is not None:  # the LoRA is loaded later: the threshold belongs to the base model
            calibrated.check(fingerprint_of(Denoiser.from_diffusers(pipe).backbone))
            probe, tau = calibrated.probe, calibrated.tau
        pipe.set_progress_bar_config(disable=True)
        size: dict[str, Any] = {k: v for k, v in (("height", self.height), ("width", self.width)) if v}
        check = copy_check(
            pipe, prompts, self.out, pictures=() if self.pictures is None else self.pictures, lora=self.lora,
            config=CheckConfig(self.seeds, self.first_seed, ordinary=ordinary), probe=probe, tau=tau, labels=labels,
            describe=describe, memory=self.memory, progress=TqdmProgress("samples"), shown=self.shown,
            num_inference_steps=self.steps, guidance_scale=self.guidance, **size,
        )  # fmt: skip
        print(check.text())
        print(f"-> {self.out / 'copies.html'}, {self.out / 'copies.csv'}")
        return 0
