"""The arguments of a controlled call, made what sampling takes: sizes and guidance."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..control import GuidanceConfig, SizeCondition
from ..errors import refuse
from ..network.condition import Condition

Sizes = SizeCondition | Sequence[SizeCondition]

INSTEAD = {
    "cross_attention_kwargs": "set the strength of an adapter with set_adapters()",
    "guidance_rescale": "sample with the stock pipeline",
    "timesteps": "pass sigmas, or num_inference_steps",
    "clip_skip": "pass prompt_embeds",
    "ip_adapter_image": "sample with the stock pipeline",
    "ip_adapter_image_embeds": "sample with the stock pipeline",
    "use_resolution_binning": "pictures are made at the size asked for",
    "clean_caption": "clean the prompt before the call",
    "callback": "use callback_on_step_end",
    "callback_on_step_end_tensor_inputs": "the callback gets latents alone",
    "original_size": "use size_condition",
    "target_size": "use size_condition",
    "crops_coords_top_left": "use size_condition",
    "negative_original_size": "use size_condition",
    "negative_target_size": "use size_condition",
    "negative_crops_coords_top_left": "use size_condition",
    "denoising_end": "sample with the stock pipeline",
}
"""What the stock pipelines take and these do not, and what to do instead."""


def one_each(sizes: Sizes, count: int) -> list[SizeCondition]:
    """One size condition for each picture."""
    conditions = [sizes] * count if isinstance(sizes, SizeCondition) else list(sizes)
    if len(conditions) != count:
        raise refuse("size_condition", len(conditions), f"1 or {count}", "one for each picture")
    return conditions


def guidance_of(guidance: GuidanceConfig | None, scale: float | None) -> GuidanceConfig:
    """The guidance of a call; ``guidance_scale`` is diffusers' name for its scale, 5 by default."""
    if guidance is not None and scale is not None:
        raise refuse("guidance, guidance_scale", "both", "one of them", "the scale is a part of GuidanceConfig")
    return guidance or GuidanceConfig(scale=5.0 if scale is None else scale)


def rows_of(cond: Condition) -> int:
    """Rows of a condition's text, 0 where it has none."""
    return 0 if cond.text is None else len(cond.text)


def repeated(cond: Condition, each: int) -> Condition:
    """Every row ``each`` times, the pictures of one prompt after each other, as diffusers orders them."""
    return cond.take(torch.arange(rows_of(cond)).repeat_interleave(each)) if each > 1 else cond
