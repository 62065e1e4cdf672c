"""Training helpers: moving average of weights, learning rate, gradients of several processes.

State on disk is a :class:`~vitrine.engine.jobs.run.Run`. The learning rate is a function of the step number, and random
numbers are sampled from the step number or saved with the state, so a resumed run equals an uninterrupted one bit for
bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch

Tensors = Mapping[str, torch.Tensor]


class MovingAverage:
    """Exponential moving average of named tensors, by ``torch.optim.swa_utils``.

    Attributes:
        values: name -> average, in the tensors' own dtype unless ``dtype`` says otherwise.
    """

    def __init__(self, tensors: Tensors, dtype: torch.dtype | None = None) -> None:
        self.values = {k: v.detach().clone().to(dtype or v.dtype) for k, v in tensors.items()}

    @torch.no_grad()
    def update(self, tensors: Tensors, decay: float) -> None:
        """average <- decay average + (1 - decay) tensor, for every floating-point tensor."""
        from torch.optim.swa_utils import get_ema_multi_avg_fn

        names = [k for k, v in tensors.items() if v.is_floating_point()]
        get_ema_multi_avg_fn(decay)([self.values[k] for k in names], [tensors[k].detach() for k in names], None)


def learning_rate(
    base: float, schedule: str, step: int, steps: int, *, warmup: int = 0, falling: float | None = None
) -> float:
    """The rate of step 0 .. ``steps`` - 1.

    Args:
        base: the highest rate.
        schedule: ``constant``; ``cosine``, from ``base`` to 0; or ``linear`` to 0 over the last ``falling`` steps.
        warmup: steps of linear warm-up.
        falling: steps over which ``linear`` falls; None is all.
    """
    if warmup:
        base = base * min(1.0, (step + 1) / warmup)
    if schedule == "cosine":
        return base * 0.5 * (1 + math.cos(math.pi * min(step, steps) / steps))
    if schedule == "linear":
        falling = steps if falling is None else falling
        return base * min(1.0, max(0, steps - step) / falling) if falling else base
    return base


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate of the next step in every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def finite(gradients: Iterable[torch.Tensor | None]) -> bool:
    """True if every gradient present is finite; synchronises with the device once."""
    sums = [g.detach().sum(dtype=torch.promote_types(g.dtype, torch.float32)) for g in gradients if g is not None]
    return not sums or bool(torch.isfinite(torch.stack(sums)).all())  # NaN and infinity propagate through a sum


def mean_gradients(
    parameters: Iterable[torch.Tensor], reduce: Callable[[torch.Tensor], torch.Tensor], pieces: int = 2**25
) -> None:
    """All-reduces the gradients of many parameters in a few calls, since a LoRA has hundreds of small ones.

    A parameter without a gradient counts as zeros.

    Args:
        reduce: the mean of a vector over all processes.
        pieces: most numbers exchanged at once (unless a single parameter has more), which bounds the extra memory.
    """
    batch: list[torch.Tensor] = []

    def exchange() -> None:
        flat = torch.cat([p.grad.flatten() for p in batch])  # type: ignore[union-attr]
        for p, mean in zip(batch, reduce(flat).split([p.numel() for p in batch]), strict=True):
            p.grad = mean.view_as(p)
        batch.clear()

    for p in parameters:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        other = bool(batch) and batch[0].grad.dtype != p.grad.dtype  # type: ignore[union-attr]
        if batch and (other or sum(q.numel() for q in batch) + p.numel() > pieces):
            exchange()
        batch.append(p)
    if batch:
        exchange()
