"""Samples of the portraits UNet at two and three times its size: from noise, and as a second pass, each with dilation.

Prompts and seeds are used nowhere else: convolutions, timesteps and the strength of the second pass were chosen on
others. Trivial baselines are the plain second pass ("hires fix") and the enlarged image of 64 px.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional

from ...engine.diffusion.noise import generators
from ...engine.portraits.captions import caption
from ...engine.portraits.models import Portraits
from ...engine.portraits.scenes import Scenes
from ...engine.resolution import ResolutionTransferConfig, apply

FIRST_SCENE, FIRST_SEED = 8_810_000, 60_000
TRAINED, STEPS, GUIDANCE = 64, 15, 3.0
STRENGTH = 0.3
"""Of the second pass: the share of the noise levels that it goes through again."""
ENLARGED, UNTOUCHED, DILATED = "64 px, enlarged", "untouched", "dilate"
SECOND, SECOND_DILATED = "second pass", "second pass, dilate"
ARMS = (ENLARGED, UNTOUCHED, DILATED, SECOND, SECOND_DILATED)


def draw(model: Portraits, arm: str, side: int, scenes: Scenes, seed: int) -> torch.Tensor:
    """Samples (N, 3, side, side) in [0, 1]: one image per scene under an arm.

    A second pass encodes the image of 64 px, enlarged, and samples the last ``STRENGTH`` of the noise levels again, at
    the same levels with dilation and without. Every pass takes ``STEPS`` steps.

    Args:
        seed: of the first image; consecutive for the others.
    """
    from diffusers import EulerDiscreteScheduler, StableDiffusionImg2ImgPipeline

    pipe, prompts = model.pipeline(), caption(scenes)
    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config, timestep_spacing="trailing")
    again = StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    for pipeline in (pipe, again):
        pipeline.set_progress_bar_config(disable=True)
    settings = {
        "negative_prompt": [""] * len(prompts),
        "guidance_scale": GUIDANCE,
        "num_inference_steps": STEPS,
        "output_type": "pt",
    }
    from_noise = {UNTOUCHED: side, DILATED: side}.get(arm, TRAINED)
    config = ResolutionTransferConfig(
        (side, side),
        (TRAINED, TRAINED),
        schedule="resample" if arm == DILATED else "none",
        receptive_field="dilate" if arm in (DILATED, SECOND_DILATED) else "none",
    )
    first = replace(config, target_size=(TRAINED, TRAINED)) if from_noise == TRAINED else config
    with torch.no_grad():
        with apply(pipe, first):
            size = {"height": from_noise, "width": from_noise}
            noise = generators([seed + k for k in range(len(prompts))])
            images = pipe(prompts, generator=noise, **size, **settings).images.float().clamp(0, 1)
        if from_noise == side:
            return images
        images = functional.interpolate(images, (side, side), mode="bicubic").clamp(0, 1)
        if arm == ENLARGED:
            return images
        settings |= {"num_inference_steps": round(STEPS / STRENGTH), "strength": STRENGTH}
        with apply(again, config):
            noise = generators([seed + k for k in range(len(prompts))])
            return again(prompts, image=images, generator=noise, **settings).images.float().clamp(0, 1)
