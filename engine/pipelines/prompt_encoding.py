"""Prompts as a UNet's conditions: Stable Diffusion 1.x, 2.x and SDXL, encoded by their own pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import refuse
from ..network.condition import Condition
from ..runtime.compat_diffusers import execution_device

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin


def reads_sizes(unet: ModelMixin) -> bool:
    """Whether a UNet takes pooled text and picture sizes, as SDXL does."""
    return getattr(unet.config, "addition_embed_type", None) == "text_time"


def encoded(
    pipe: DiffusionPipeline, prompts: Sequence[str] | None, size: tuple[int, int], embeds: torch.Tensor | None = None,
    pooled: torch.Tensor | None = None,
) -> Condition:  # fmt: skip
    """One row for each prompt, for pictures of ``size`` (height, width) in pixels.

    Args:
        embeds, pooled: encoded prompts (B, T, C), (B, D) instead of ``prompts``; ``pooled`` for SDXL only.
    """
    if embeds is not None and (pooled is None) == reads_sizes(pipe.unet):
        shown, accepted = ("none", "a tensor (B, D)") if pooled is None else ("a tensor", "none")
        raise refuse("pooled_prompt_embeds", shown, accepted, "SDXL takes them with prompt_embeds, no other UNet does")
    texts = None if prompts is None else list(prompts)
    if not reads_sizes(pipe.unet):
        return Condition(pipe.encode_prompt(texts, execution_device(pipe), 1, False, prompt_embeds=embeds)[0])
    text, _, pooled, _ = pipe.encode_prompt(
        texts, device=execution_device(pipe), do_classifier_free_guidance=False, prompt_embeds=embeds,
        pooled_prompt_embeds=pooled,
    )  # fmt: skip
    sizes = torch.tensor([*size, 0, 0, *size], dtype=torch.float32, device=text.device)  # original, crop, target
    return Condition(text, pooled, {"time_ids": sizes.expand(len(text), 6)})


def empty_prompt(pipe: DiffusionPipeline, size: tuple[int, int]) -> Condition:
    """What guidance starts from, one row: the empty prompt, or zeros where the pipeline says so (SDXL)."""
    empty = encoded(pipe, [""], size)
    if not getattr(pipe.config, "force_zeros_for_empty_prompt", False) or empty.text is None or empty.pooled is None:
        return empty
    return Condition(torch.zeros_like(empty.text), torch.zeros_like(empty.pooled), empty.extra)
