"""Samples of the portraits UNet at two and three times its size, with and without dilation.

Prompts and seeds are used nowhere else: convolutions and timesteps were chosen on others. The
trivial baseline is the enlarged image of 64 px; *shrink* is Deep Shrink as in ComfyUI's core.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import functional

from ...engine.pipelines import ResolutionTransferPipeline
from ...engine.portraits.captions import caption
from ...engine.portraits.models import Portraits
from ...engine.portraits.scenes import Scenes
from ...engine.resolution import ResolutionTransferConfig

FIRST_SCENE, FIRST_SEED = 8_800_000, 50_000
TRAINED, STEPS, GUIDANCE = 64, 15, 3.0
ENLARGED, UNTOUCHED, RESAMPLED, SHRUNK, DILATED = "64 px, enlarged", "untouched", "resample", "shrink", "dilate"
ARMS = (ENLARGED, UNTOUCHED, RESAMPLED, SHRUNK, DILATED)
_SHRUNK_ABOVE = 650
"""Timestep: core's node shrinks over the first 35 % of the run."""


def draw(model: Portraits, arm: str, side: int, scenes: Scenes, seed: int) -> torch.Tensor:
    """Samples (N, 3, side, side) in [0, 1]: one image per scene under an arm.

    Args:
        seed: of the first image; consecutive for the others.
    """
    from diffusers import EulerDiscreteScheduler

    pipe, prompts = model.pipeline(), caption(scenes)
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config, timestep_spacing="trailing")
    size = TRAINED if arm == ENLARGED else side
    config = ResolutionTransferConfig(
        (size, size),
        (TRAINED, TRAINED),
        schedule="none" if arm in (ENLARGED, UNTOUCHED) else "resample",
        receptive_field="dilate" if arm == DILATED else "none",
    )
    larger = ResolutionTransferPipeline.from_pipe(pipe, config)
    with _shrunk(pipe.unet, side / TRAINED) if arm == SHRUNK else nullcontext(), torch.no_grad():
        images = (
            larger(
                prompts,
                seeds=[seed + k for k in range(len(prompts))],
                negative_prompt=[""] * len(prompts),
                guidance_scale=GUIDANCE,
                num_inference_steps=STEPS,
                output_type="pt",
            )
            .images.float()
            .clamp(0, 1)
        )
    return functional.interpolate(images, (side, side), mode="bicubic").clamp(0, 1) if arm == ENLARGED else images


@contextmanager
def _shrunk(unet: Any, factor: float) -> Iterator[None]:
    """Deep Shrink: the inner levels run at the training size while the noise is high."""
    state: dict[str, Any] = {}

    def clock(net: Any, args: tuple, kwargs: dict) -> None:
        t = args[1] if len(args) > 1 else kwargs["timestep"]
        state["on"] = float(torch.as_tensor(t).flatten()[0]) > _SHRUNK_ABOVE

    def shrink(block: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if not state["on"]:
            return None
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        state["size"] = hidden.shape[-2:]
        smaller = functional.interpolate(hidden, scale_factor=1 / factor, mode="bicubic")
        return (
            ((), kwargs | {"hidden_states": smaller}) if "hidden_states" in kwargs else ((smaller, *args[1:]), kwargs)
        )

    def skips(block: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if not state["on"]:
            return None
        size = kwargs["hidden_states"].shape[-2:]
        resized = tuple(functional.interpolate(x, size, mode="bicubic") for x in kwargs["res_hidden_states_tuple"])
        return args, kwargs | {"res_hidden_states_tuple": resized}

    def grow(block: Any, args: tuple, output: torch.Tensor) -> torch.Tensor | None:
        size = [2 * n for n in state["size"]] if state["on"] else None
        return functional.interpolate(output, size, mode="bicubic") if size else None

    hooks = [
        unet.register_forward_pre_hook(clock, with_kwargs=True),
        unet.down_blocks[1].register_forward_pre_hook(shrink, with_kwargs=True),
        unet.up_blocks[0].register_forward_pre_hook(skips, with_kwargs=True),
        unet.up_blocks[0].register_forward_hook(grow),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
