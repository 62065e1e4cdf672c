"""From folders of pictures to what the batched LoRA trainer wants."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..condition import Condition
from ..denoiser import Denoiser
from ..errors import refuse
from ..processes import processes
from ..w2w import Subject

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def subjects_in(
    folder: str | Path, model: str, prompt: str, size: int | None = None
) -> tuple[Denoiser, list[str], list[Callable[[], Subject]]]:
    """(frozen denoiser, names, makers): one subject for each folder of pictures below ``folder``, by name.

    Every subject draws with the same numbers, as the paper's do; a maker encodes its pictures when its turn comes.

    Args:
        model: a Stable Diffusion folder or hub id, or ``portraits``.
        prompt: what every picture is called.
        size: side in pixels, centre-cropped; default the model's own.

    Raises:
        VitrineError: no folder, no folder with pictures in it.
    """
    root = Path(folder)
    found = sorted(p for p in root.iterdir() if p.is_dir() and _pictures(p)) if root.is_dir() else []
    if not found:
        given = f"{root.name}: no folder with pictures"
        raise refuse("folder", given, "one folder for each subject", f"put {', '.join(ENDINGS)} files into folders")
    pipe = _pipeline(model)
    side = size or _side(pipe)
    text = pipe.encode_prompt([prompt], pipe.device, 1, False)[0].float().cpu()

    def maker(place: Path) -> Callable[[], Subject]:
        return lambda: _subject(pipe, place, side, Condition(text))

    return Denoiser.from_diffusers(pipe), [p.name for p in found], [maker(p) for p in found]


def _pipeline(model: str) -> Any:
    from diffusers import StableDiffusionPipeline

    if model == "portraits":
        from ..portraits import load_portraits

        pipe = load_portraits().pipeline()
    else:
        pipe = StableDiffusionPipeline.from_pretrained(model)
    for module in (pipe.unet, pipe.vae, pipe.text_encoder):
        module.requires_grad_(False)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(processes().device)


def _side(pipe: Any) -> int:
    side = pipe.unet.config.sample_size
    return (side if isinstance(side, int) else max(side)) * pipe.vae_scale_factor


def _pictures(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in ENDINGS)


@torch.no_grad()
def _subject(pipe: Any, folder: Path, side: int, cond: Condition) -> Subject:
    latents, deviations = [], []
    scale = pipe.vae.config.scaling_factor
    for path in _pictures(folder):
        posterior = pipe.vae.encode(_read(path, side).to(pipe.vae.device, pipe.vae.dtype)).latent_dist
        latents.append(posterior.mean.float().cpu() * scale)
        deviations.append(posterior.std.float().cpu() * scale)
    return Subject(folder.name, torch.cat(latents), cond, 0, torch.cat(deviations))


def _read(path: Path, side: int) -> torch.Tensor:
    """(1, 3, side, side) in [-1, 1]: the short side scaled to ``side``, the middle cut out."""
    from PIL import Image

    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
    except OSError as error:
        given = f"{path.parent.name}/{path.name}: {error}"
        raise refuse("picture", given, "a readable picture", "remove it") from error
    ratio = side / min(image.size)
    image = image.resize((max(side, round(image.width * ratio)), max(side, round(image.height * ratio))))
    left, top = (image.width - side) // 2, (image.height - side) // 2
    cut = image.crop((left, top, left + side, top + side))
    return torch.from_numpy(np.asarray(cut, dtype=np.float32) / 127.5 - 1).permute(2, 0, 1)[None]
