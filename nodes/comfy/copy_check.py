"""The copy check on a MODEL: core's own sampler behind the engine's function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.sample
import comfy.utils
import folder_paths
import torch

from ...engine.io.file_names import safe_name
from ...engine.io.picture_files import open_picture, pixels_of
from ...engine.nemo import make_probe, score_prompts
from ...engine.nemo.check import CheckConfig, CopyCheck, Instruments, Pictures, check_copies
from ...engine.nemo.check_page import write_check
from ...engine.nemo.search_config import ProbeConfig
from ...engine.runtime.progress import Progress
from .conditioning import literal, prompt_conditions
from .contents import clip_contents, model_contents, vae_contents
from .model import blank_latents, loading_denoiser_of

KIND = "vitrine_copy_check"


@dataclass(frozen=True)
class Sampling:
    """What core's KSampler would take.

    Attributes:
        latent: LATENT, gives the size.
        steps, cfg, sampler, scheduler: of each sample.
    """

    latent: dict
    steps: int
    cfg: float
    sampler: str
    scheduler: str


@dataclass(frozen=True)
class Models:
    """MODEL, CLIP, VAE, and the MODEL without its LoRA, if that is what is checked."""

    model: Any
    clip: Any
    vae: Any
    bare: Any = None


def checked(
    models: Models, prompts: list[str], name: str, sampling: Sampling, images: torch.Tensor | None,
    config: CheckConfig, probe: tuple[ProbeConfig, float | None], progress: Progress,
) -> tuple[CopyCheck, Path]:  # fmt: skip
    """The check in output/vitrine_copy_check/<name>, and that folder.

    Args:
        images: IMAGE (P, H, W, 3), the training pictures; None compares samples of a prompt with each other.
        probe: of NeMo's score, and the threshold measured with it.
    """
    folder = Path(folder_paths.get_output_directory()) / KIND / safe_name(name)
    pictures = Pictures()
    if images is not None:
        names = [f"picture {i + 1}" for i in range(len(images))]
        images = _fitting(models, sampling, images)
        pictures = Pictures(names, lambda i: images[i], images)
    settings = [sampling.steps, sampling.cfg, sampling.sampler, sampling.scheduler]
    identity = {
        "model": model_contents(models.model), "CLIP": clip_contents(models.clip), "VAE": vae_contents(models.vae),
        "model without the LoRA": None if models.bare is None else model_contents(models.bare), "sampling": settings,
        "size": list(_size(models, sampling)), "probe": probe[0],
    }  # fmt: skip
    instruments = Instruments(
        _sampler(models, sampling), sampling.steps, len(sampling.latent["samples"]), models.bare is not None,
        _scores(models, sampling, probe[0]), None, identity,
    )  # fmt: skip
    check = check_copies(prompts, folder, instruments, pictures, config, tau=probe[1], progress=progress)
    write_check(folder, check, pictures)
    return check, folder


def _size(models: Models, sampling: Sampling) -> tuple[int, ...]:
    """(C, [T,] h, w) of the samples' latents: the model's own, whatever factor Empty Latent Image assumes."""
    return tuple(blank_latents(models.model, sampling.latent).shape[1:])


def _fitting(models: Models, sampling: Sampling, images: torch.Tensor) -> torch.Tensor:
    """(P, 3, H, W) of the samples' size, cropped around the middle, as trainers do."""
    factor, (height, width) = models.vae.spacial_compression_encode(), _size(models, sampling)[-2:]
    pictures = images[..., :3].movedim(-1, 1).float().cpu()
    fitting: torch.Tensor = comfy.utils.common_upscale(pictures, width * factor, height * factor, "area", "center")
    return fitting


def _sampler(models: Models, sampling: Sampling) -> Callable[..., torch.Tensor]:
    def sample(prompt: str, seeds: Sequence[int], bare: bool, after: Callable[[int], None]) -> torch.Tensor:
        model = models.bare if bare and models.bare is not None else models.model
        positive, negative = (literal(models.clip, text) for text in (prompt, ""))
        blank = blank_latents(model, sampling.latent)[:1].cpu()
        noise = torch.cat([comfy.sample.prepare_noise(blank, seed) for seed in seeds])
        samples = comfy.sample.sample(
            model, noise, sampling.steps, sampling.cfg, sampling.sampler, sampling.scheduler, positive, negative,
            blank.repeat(len(seeds), *[1] * (blank.ndim - 1)), disable_pbar=True, seed=seeds[0],
            callback=lambda step, x0, x, total: after(step + 1),
        )  # fmt: skip
        images: torch.Tensor = models.vae.decode(samples)
        return images.reshape(-1, *images.shape[-3:]).movedim(-1, 1)

    return sample


def _scores(
    models: Models, sampling: Sampling, config: ProbeConfig
) -> Callable[[str], Mapping[str, float | None]] | None:
    """Scores of a prompt; none for models whose latents are not pictures."""
    blank = blank_latents(models.model, sampling.latent)[:1]
    if blank.ndim != 4:
        return None
    channels, height, width = blank.shape[1:]

    @torch.no_grad()
    def scores(prompt: str) -> Mapping[str, float | None]:
        probe = make_probe(loading_denoiser_of(models.model), config=config)
        conds = prompt_conditions(models.model, models.clip, [prompt], blank)
        ((score,), _) = score_prompts(probe, conds, (channels, height, width), None)
        return {"nemo": score.value}

    return scores


def side_by_side(check: CopyCheck, images: torch.Tensor | None, count: int) -> torch.Tensor:
    """IMAGE (n, H, 2 W or 3 W, 3): sample, what of it is copied, and the training picture, most copied first."""
    rows = []
    for prompt in check.ranked[:count]:
        parts = []
        for file in (prompt.file, prompt.overlay_file):
            parts.append(torch.from_numpy(pixels_of(open_picture(file))) / 255)
        if images is not None:
            picture = images[int(prompt.numbers[prompt.closest])][None, ..., :3].movedim(-1, 1).float().cpu()
            height, width = parts[0].shape[:2]
            parts.append(comfy.utils.common_upscale(picture, width, height, "area", "center")[0].movedim(0, -1))
        rows.append(torch.cat(parts, 1))
    return torch.stack(rows)
