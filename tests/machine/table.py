"""What is promised of every call in every precision, under every way of offloading, and of its waits for the device.

The tests hold each cell; ``docs/machine.md`` is written from it.
"""

from __future__ import annotations

import os

import torch

from .calls import CALLS
from .modes import MODES, OFFLOADED

FULL = os.environ.get("VITRINE_MACHINE") == "full"
WRITE = bool(os.environ.get("VITRINE_WRITE_DOCS"))

# --- precision: largest error relative to float32, in the Euclidean norm of any result ------------------------------
BOUNDS = {"fp16": 0.01, "bf16": 0.05}
WIDER = {
    # a difference of two activations, of which most cancels
    "tap_steps": {"fp16": 0.05, "bf16": 0.3},
    # labels and scores of fitted probes: some pixels lie on an edge between two classes
    "segmentation": {"fp16": 0.1, "bf16": 0.2},
    "rank": {"fp16": 0.05, "bf16": 0.2},
    # steps of Adam are of one size however small a gradient is
    "w2w.invert_image": {"fp16": 0.05, "bf16": 0.2},
    "w2w.around.invert_image": {"fp16": 0.05, "bf16": 0.2},
    # deviations of three captions' values: what they have in common cancels
    "nemo.around.statistics": {"fp16": 0.01, "bf16": 0.1},
    # Z-Image's tiny stock pipeline has 0.052 by itself
    "nemo.later.call": {"fp16": 0.01, "bf16": 0.1},
    "w2w.later.call": {"fp16": 0.01, "bf16": 0.1},
}
EQUAL = 1e-4
"""The largest error of float32 on the device or offloaded, against the CPU; other kernels round otherwise."""
# L-BFGS magnifies rounding; of the labelled pixels two may lie on an edge between two classes, and one counts 0.013
EQUAL_WIDER = {"rank": 0.005, "segmentation": 0.02}


def bound(name: str, dtype: str) -> float:
    """The largest error of a call in half precision."""
    return WIDER.get(name, BOUNDS)[dtype]


def equal(name: str) -> float:
    """The largest error of a call in float32 elsewhere than on the CPU."""
    return EQUAL_WIDER.get(name, EQUAL)


# --- placing --------------------------------------------------------------------------------------------------------
LOADED_WHOLE = (
    "refused: a training needs its whole network on the device, since weights stay for their gradients; "
    "offloading would save nothing"
)

LEFT_OUT: dict[tuple[str, str], str] = {
    (name, mode): LOADED_WHOLE for name, call in CALLS.items() if call.trains for mode in OFFLOADED
}
"""(call, mode) -> why it is refused."""

STOCK: dict[tuple[str, str, str], str] = {
    ("tap.later", "klein", "groups, blocks"): "its VAE fails so in the stock pipeline as well",
    **{
        (name, family, "bf16"): "the tiny random network magnifies bfloat16's rounding as much in the stock pipeline"
        for name in ("nemo.later.call", "w2w.later.call")
        for family in ("chroma", "qwen_image")
    },
}
"""(call, family, mode or precision) -> what keeps it from working that is not ours."""


def promised(name: str, family: str, column: str) -> bool:
    """Whether a call works in a mode or precision; else it is refused, or fails in diffusers."""
    return (name, column) not in LEFT_OUT and (name, family, column) not in STOCK


def modes_of(name: str, family: str) -> list[str]:
    """The modes a call is promised to work under."""
    return [mode for mode in MODES if promised(name, family, mode)]


# --- waits and uploads ------------------------------------------------------------------------------------------------
STEP, CALL, FORWARD = "step", "call", "forward"

BUDGETS: dict[str, tuple[str, float, float]] = {
    # what the scheduler does itself is not counted in a sampling step
    "tap_steps": (STEP, 0, 0),
    "edit": (STEP, 0, 0),
    "nemo.call": (STEP, 0, 0),
    "w2w.call": (STEP, 0, 0),
    "nemo.around.call": (STEP, 0, 0),
    "w2w.around.call": (STEP, 0, 0),
    "control": (STEP, 0, 2),
    "control.checkpoint": (STEP, 0, 1),
    "resolution": (STEP, 0, 3),  # Flux: the stretched rotary positions
    "w2w.invert_image": (STEP, 1, 8),
    "w2w.around.invert_image": (STEP, 1, 8),
    "w2w.train": (STEP, 1, 8),
    "emd.train": (STEP, 4, 32),
    "control.train": (STEP, 3, 12),
    # outputs not counted: each place is fetched once
    "tap": (CALL, 2, 12),
    "tap.transformer": (CALL, 2, 12),
    "tap.pictures": (CALL, 2, 8),
    "tap.latents": (CALL, 2, 6),
    # PixArt's own encode_prompt compares tokens on the host: a wait for each prompt
    "correspondence": (CALL, 6, 20),
    "segmentation": (CALL, 3, 10),
    # whether the student's latents are finite
    "emd.one_step": (CALL, 1, 7),
    "emd.transformer": (CALL, 1, 9),
    "nemo.around.statistics": (CALL, 2, 12),
    "nemo.around.score": (FORWARD, 1, 18),
    "nemo.around.find": (FORWARD, 1, 15),
    # the prompts' tokens, and a noise: statistics see none of zeros
    "nemo.statistics": (CALL, 2, 2),
    "nemo.score": (FORWARD, 1, 10),
    "nemo.calibrate": (FORWARD, 1, 14),
    "nemo.verify": (FORWARD, 1, 6),
    "nemo.find": (FORWARD, 1, 8),
    "w2w.sample_models": (CALL, 0, 0),
}
"""Call -> (unit, most syncs, most uploads) on the device, beyond the scheduler's own."""

OUTPUTS = {
    "tap": 3, "tap.transformer": 1, "tap.pictures": 1, "tap.latents": 1, "correspondence": 2, "segmentation": 1,
    "nemo.verify": 1, "nemo.calibrate": 1, "nemo.find": 7, "tap.transformer pixart-1024": 2,
    "emd.transformer pixart": 1, "nemo.around.statistics pixart": 1, "nemo.around.score pixart": 1,
    "nemo.around.find": 4, "nemo.around.find pixart": 8,
}  # fmt: skip
"""Waits a call makes once: for each place it hands over; for NEMO, the model's fingerprint (1) and what a search begins
and ends with (6, around another pipeline 4); the T5 of transformers looks at its mask."""

DTYPES_OF_FORWARDS = {"fp16": (torch.float16, 0.02), "bf16": (torch.bfloat16, 0.15)}
"""Of a bare forward of tiny random networks, with the largest relative error."""
