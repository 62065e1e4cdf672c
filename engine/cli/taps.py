"""``vitrine taps rank``: which places of a model to tap, from a folder of pictures and their masks, if any."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from ..errors import refuse
from ..pipelines.loading import LoadConfig
from .options import Load


@dataclass(frozen=True)
class Rank:
    """Filter a model's places by noise, granularity and locality, compare the rest on masks, write a preset file.

    Under ``accelerate launch -m vitrine.engine.cli.main taps rank ...`` each process taps its part of the pictures.
    """

    pictures: Positional[Path]
    """Folder of pictures; four or more."""
    masks: Path | None = None
    """Folder of masks with the same file names (grey values are class numbers, 255 unknown). Without it, only the
    filter runs."""
    classes: int = 2
    """Number of classes in the masks."""
    model: str = "portraits"
    """Pipeline folder or hub id of an SD1.x or SD2.x model."""
    prompt: str = ""
    """One plain prompt that fits all pictures."""
    size: int | None = None
    """Side the pictures are squeezed to; 512 for SD1.5. None takes the model's own."""
    timestep: float = 50.0
    """The network's own timestep."""
    budget: int | None = None
    """Most channels of the chosen places together."""
    most: int = 4
    """Most places."""
    out: Path = Path("feature-preset.json")
    """The preset file."""
    state: Path | None = None
    """Folder for finished scores; the same command resumes from it."""
    load: Load = LoadConfig()

    def run(self) -> int:
        """0 on success."""
        from ..pipelines import SegmentationPipeline
        from ..pipelines.loading import load_pipeline
        from ..processes import processes
        from ..progress import TqdmProgress

        if not self.pictures.is_dir():
            raise refuse("pictures", str(self.pictures), "a folder of pictures", "check the path")
        process = processes()
        pipe = load_pipeline(self.model, SegmentationPipeline, self.load)
        side = self.size or pipe.unet.config.sample_size * pipe.vae_scale_factor
        pixels, labels = self._read(side)
        ranking = pipe.rank(
            pixels, labels, self.prompt, timestep=self.timestep, budget=self.budget, most=self.most, state=self.state,
            progress=TqdmProgress("ranking"),
        )  # fmt: skip
        if process.is_main_process:
            ranking.preset(self.out.stem, pipe.unet, self.timestep).save(self.out)
            print(ranking.summary())
            print(f"preset -> {self.out}")
        return 0

    def _read(self, side: int) -> tuple[Any, Any]:
        import torch

        from ..activations.images import open_picture, to_pixels
        from ..activations.labelled import read_masks

        if self.masks is not None:
            folder = read_masks(self.pictures, self.masks, self.classes)
            return folder.read(range(len(folder)), side)
        endings = (".png", ".jpg", ".jpeg", ".webp")
        files = sorted(p for p in self.pictures.glob("*") if p.suffix.lower() in endings)
        if len(files) < 2:
            raise refuse("pictures", f"{len(files)} in {self.pictures.name}", "two or more", "choose another folder")
        return torch.cat([to_pixels(open_picture(p), side) for p in files]), None


COMMANDS: dict[str, type] = {"rank": Rank}
