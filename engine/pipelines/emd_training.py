"""From the name of a model and a list of prompts to what the EMD trainer wants."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..condition import Condition
from ..denoiser import Denoiser
from ..emd import StudentContract
from ..errors import refuse
from ..files import named


class TrainingParts(NamedTuple):
    """Teacher, encoded prompts, encoded empty prompt, latent shape, contract, and the pipeline they come from."""

    teacher: Denoiser
    conditions: Condition
    null: Condition
    shape: tuple[int, ...]
    contract: StudentContract
    pipeline: Any

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """(B, 3, H, W) pictures in [0, 1] of (B, C, h, w) latents."""
        vae = self.pipeline.vae
        pixels = vae.decode(latents.to(vae.device, vae.dtype) / vae.config.scaling_factor).sample
        return (pixels / 2 + 0.5).clamp(0, 1)


def training_parts(told: dict[str, Any]) -> TrainingParts:
    """From {"model": folder or hub id, "prompts": text file or list, "base": name}; the default is portraits.

    Raises:
        VitrineError: another model than portraits without prompts.
    """
    pipe, prompts = _pipeline(told)
    with torch.no_grad():
        texts = [pipe.encode_prompt(prompts[i : i + 64], "cpu", 1, False)[0] for i in range(0, len(prompts), 64)]
        null = pipe.encode_prompt([""], "cpu", 1, False)[0]
    side = pipe.unet.config.sample_size
    shape = (pipe.unet.config.in_channels, *((side, side) if isinstance(side, int) else side))
    base = str(told.get("base") or told.get("model") or "portraits")
    contract = StudentContract(base, latent_scale=float(pipe.vae.config.scaling_factor))
    return TrainingParts(
        Denoiser.from_diffusers(pipe), Condition(torch.cat(texts)), Condition(null), shape, contract, pipe
    )


def _pipeline(told: dict[str, Any]) -> tuple[Any, list[str]]:
    prompts = told.get("prompts") or []
    if isinstance(prompts, str):
        with named(prompts, "prompt file", "a text file in UTF-8, one prompt a line", "check the path"):
            prompts = Path(prompts).read_text(encoding="utf-8").splitlines()
    prompts = [p.strip() for p in prompts if p.strip()]
    if told.get("model", "portraits") == "portraits":
        from ..portraits import caption, load_portraits, sample_scenes

        return load_portraits().pipeline(), prompts or caption(sample_scenes(range(200_000, 202_000)))
    if not prompts:
        raise refuse("prompts", "none", "one prompt a line", "the student learns the prompts it is trained on")
    from diffusers import StableDiffusionPipeline

    return StableDiffusionPipeline.from_pretrained(told["model"]), prompts
