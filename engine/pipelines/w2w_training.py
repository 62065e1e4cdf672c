"""From folders of pictures to the subjects of the batched LoRA trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ..diffusion.denoiser import Denoiser
from ..errors import refuse
from ..io.folders import folders_in
from ..io.picture_files import PICTURES, open_rgb, pictures_in
from ..jobs.digests import digest
from ..network.condition import Condition
from ..runtime.placement import upcast_vae
from ..settings.sizes import check_sides
from ..w2w import Subject
from ..w2w.train.lora_trainer import SubjectMaker
from .components import components_of
from .loading import LoadConfig, load_pipeline
from .w2w import W2WPipeline


def subjects_in(
    folder: str | Path, model: str, prompt: str, size: int | None = None, load: LoadConfig | None = None
) -> tuple[Denoiser, list[str], list[Callable[[], Subject]]]:
    """A frozen denoiser, the names of the subjects, and functions that make them: one for each folder of pictures.

    Every subject uses the same random numbers, as in the paper; its pictures are encoded when its turn comes.

    Args:
        folder: contains the folders of pictures; their names become the subjects'.
        model: folder, hub id or file of a model whose LoRAs can make a space, or ``portraits``.
        prompt: the caption of every picture.
        size: side in pixels, centre-cropped; default the model's own.
        load: precision, device and version of the model.
    """
    check_sides("size", size)
    root = Path(folder)
    folders = sorted(p for p in folders_in(root) if pictures_in(p))
    if not folders:
        shown = f"{root.name}: no folder with pictures"
        raise refuse("folder", shown, "one folder for each subject", f"put {', '.join(PICTURES)} files into folders")
    pipe = _pipeline(model, load)
    side = size or max(pipe._adapter.trained_size())
    with torch.no_grad():
        cond = pipe._adapter.condition([prompt], (side, side)).cast(torch.float32).to("cpu")

    encoded_by = digest([components_of(pipe, ("unet", "transformer")), prompt, side])

    def maker(pictures: Path) -> Callable[[], Subject]:
        return SubjectMaker(lambda: _subject(pipe, pictures, side, cond), [encoded_by, pictures_in(pictures)])

    return pipe._denoiser(), [p.name for p in folders], [maker(p) for p in folders]


def _pipeline(model: str, load: LoadConfig | None) -> W2WPipeline:
    source = load_pipeline(model, None, load)
    for module in source.components.values():
        if isinstance(module, torch.nn.Module):
            module.requires_grad_(False)
    return W2WPipeline.from_pipe(source)


@torch.no_grad()
def _subject(pipe: W2WPipeline, folder: Path, side: int, cond: Condition) -> Subject:
    latents, deviations, latent, own = [], [], pipe._adapter.latent, pipe.vae
    for path in pictures_in(folder):
        with upcast_vae(own) as vae:
            pixels = _read(path, side).to(vae.device, vae.dtype)
            posterior = vae.encode(pixels[:, :, None] if latent.frames else pixels).latent_dist
        mean, std = posterior.mean.float(), posterior.std.float()
        latents.append(latent.scaled(own, mean).cpu())
        deviations.append((latent.scaled(own, std) - latent.scaled(own, torch.zeros_like(std))).cpu())
    return Subject(folder.name, torch.cat(latents), cond, 0, torch.cat(deviations))


def _read(path: Path, side: int) -> torch.Tensor:
    """(1, 3, side, side) in [-1, 1]: the short side resized to ``side``, then centre-cropped."""
    image = open_rgb(path)
    ratio = side / min(image.size)
    image = image.resize((max(side, round(image.width * ratio)), max(side, round(image.height * ratio))))
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = image.crop((left, top, left + side, top + side))
    return torch.from_numpy(np.asarray(square, dtype=np.float32) / 127.5 - 1).permute(2, 0, 1)[None]
