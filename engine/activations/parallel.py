"""Taps shared between the processes of ``accelerate launch``: each takes some pictures, all get the whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from ..condition import Condition
from ..denoiser import Denoiser
from ..hooks import Activation
from ..processes import processes
from ..progress import Progress, silent
from .config import TapConfig
from .container import Activations
from .tap import tap_latents


def first_process() -> bool:
    """True in the process that writes files: the only one without a launcher."""
    return os.environ.get("RANK", "0") == "0"


def shared_taps(
    denoiser: Denoiser, latents: torch.Tensor, cond: Condition, config: TapConfig, progress: Progress = silent
) -> Activations:
    """:func:`tap_latents`, with the pictures split over processes where there are several.

    Noise depends on the seed alone, so the result is the same as in one process.
    """
    state, gather = _processes()
    if state is None or state.num_processes == 1 or len(latents) < state.num_processes:
        return tap_latents(denoiser, latents, cond, config, progress)
    share = torch.arange(len(latents))[state.process_index :: state.num_processes]
    taps = tap_latents(denoiser, latents[share.to(latents.device)], cond.take(share), config, progress)
    shares = gather([(share, {a: v.tensor for a, v in taps.items()})])
    order = torch.cat([pictures for pictures, _ in shares]).argsort()
    joined = {a: torch.cat([tensors[a] for _, tensors in shares])[order] for a in taps}
    return Activations({a: Activation(a, joined[a], v.grid) for a, v in taps.items()}, taps.info)


def own_share(count: int) -> tuple[range | None, Callable[[], None]]:
    """The numbers of the pictures that this process taps, None where it is alone; and what waits for the others."""
    state, _ = _processes()
    if state is None or state.num_processes == 1:
        return None, lambda: None
    return range(state.process_index, count, state.num_processes), state.wait_for_everyone


def _processes() -> tuple[Any, Callable]:
    """accelerate's state if a launcher started this process; without one nothing is imported."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None, lambda shares: shares
    from accelerate.utils import gather_object

    return processes(), gather_object
