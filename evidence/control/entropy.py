"""Pictures of the portraits under entropy rectifying guidance (Berrada et al. 2025), and what they are judged by."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...engine.control import EntropyConfig
from ...engine.pipelines import EntropyGuidedPipeline
from ...engine.portraits import load_portraits

STEPS, BATCH, TAU = 20, 32, 0.01


class Arm(NamedTuple):
    """What is guided away from: ``scale`` 1 is nothing; the empty prompt, the weakened network, or both at once."""

    scale: float
    tau: float
    empty: bool


ARMS = {
    "no guidance": Arm(1.0, 1.0, False),
    "CFG 1.5": Arm(1.5, 1.0, True),
    "CFG 3": Arm(3.0, 1.0, True),
    "ERG 1.5": Arm(1.5, TAU, False),
    "ERG 3": Arm(3.0, TAU, False),
    "ERG and CFG 1.5": Arm(1.5, TAU, True),
}
"""Nothing is tuned: tau is ACE-Step's, all of self-attention, the whole run; the scales are what people use."""


def draw_entropy(arm: Arm, prompts: list[str], seeds: list[int]) -> torch.Tensor:
    """(N, 3, 64, 64) in [0, 1]."""
    pipe = load_portraits().pipeline()
    pipe.set_progress_bar_config(disable=True)
    guided = EntropyGuidedPipeline.from_pipe(pipe, EntropyConfig(arm.scale, arm.tau))
    images = []
    for start in range(0, len(prompts), BATCH):
        rows = slice(start, start + BATCH)
        told = {"negative_prompt": [""] * len(prompts[rows])} if arm.empty else {}
        drawn = guided(prompts[rows], seeds=seeds[rows], num_inference_steps=STEPS, output_type="pt", **told).images
        images.append(drawn.float().clamp(0, 1))
    return torch.cat(images)
