"""What conditions a network in addition to the noisy latent and the timestep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import refuse

MASK = "encoder_attention_mask"
"""Key of a Condition's ``extra`` for the text mask (B, T): 1 for tokens, 0 for padding."""


@dataclass(frozen=True)
class Condition:
    """The inputs of a network other than x_t and t. The first axis of every tensor is the batch.

    Attributes:
        text: (B, T, C) text states, or None.
        pooled: (B, D) pooled text embedding, or None.
        extra: further tensors, by the backbone's own argument names (``time_ids``, ``encoder_attention_mask`` ...).
        fixed: further arguments that are equal for every batch row, such as numbers.
    """

    text: torch.Tensor | None = None
    pooled: torch.Tensor | None = None
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)

    def _map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Condition:
        text, pooled = (None if v is None else fn(v) for v in (self.text, self.pooled))
        return Condition(text, pooled, {k: fn(v) for k, v in self.extra.items()}, self.fixed)

    @property
    def _first(self) -> torch.Tensor | None:
        """The text, else the first other tensor, such as a class; None where there is none."""
        return next((v for v in (self.text, self.pooled, *self.extra.values()) if v is not None), None)

    @property
    def count(self) -> int:
        """B, the batch rows; 1 without a tensor."""
        return 1 if self._first is None else len(self._first)

    @property
    def device(self) -> torch.device:
        """Of its tensors; the CPU where there is none."""
        return torch.device("cpu") if self._first is None else self._first.device

    def take(self, rows: torch.Tensor) -> Condition:
        """Batch rows by index, with repetition. A condition with one row is expanded."""
        return self._map(lambda v: v[rows.to(v.device)] if len(v) > 1 else v.expand(len(rows), *v.shape[1:]))

    def repeat(self, times: int) -> Condition:
        """The whole batch, repeated ``times`` times."""
        return self._map(lambda v: v.repeat(times, *[1] * (v.ndim - 1)))

    def to(self, *where: Any, **how: Any) -> Condition:
        """``Tensor.to`` on every part."""
        return self._map(lambda v: v.to(*where, **how))

    def cast(self, dtype: torch.dtype) -> Condition:
        """Casts the text. ``extra`` keeps its dtype, since half precision would round sizes."""
        text, pooled = (None if v is None else v.to(dtype) for v in (self.text, self.pooled))
        return Condition(text, pooled, self.extra, self.fixed)

    def alike(self, other: Condition) -> bool:
        """Whether both can be concatenated into one batch: the same parts, of the same sizes."""

        def sizes(cond: Condition) -> dict[str, torch.Size | None]:
            parts = {"text": cond.text, "pooled": cond.pooled} | cond.extra
            return {name: None if part is None else part.shape[1:] for name, part in parts.items()}

        return sizes(self) == sizes(other) and self.fixed == other.fixed

    def padded(self, length: int) -> Condition:
        """The condition padded to ``length`` text tokens, with zeros that the mask hides."""
        assert self.text is not None
        short = length - self.text.shape[1]
        mask = self.extra.get(MASK, torch.ones(self.text.shape[:2], dtype=torch.long, device=self.text.device))
        text = torch.nn.functional.pad(self.text, (0,) * 2 * (self.text.ndim - 2) + (0, short))
        extra = self.extra | {MASK: torch.nn.functional.pad(mask, (0, short))}
        return Condition(text, self.pooled, extra, self.fixed)

    @staticmethod
    def batch(conditions: Sequence[Condition]) -> Condition:
        """Concatenates conditions of the same kind along the batch."""
        fixed = conditions[0].fixed
        same = all(p.fixed == fixed for p in conditions)
        if not same or len({(p.text is None, p.pooled is None, tuple(p.extra)) for p in conditions}) != 1:
            kinds = [(p.text is not None, p.pooled is not None, sorted(p.extra)) for p in conditions]
            raise refuse("conditions", kinds, "the same parts in each", "encode all prompts with the same pipeline")

        def cat(values: list[torch.Tensor | None]) -> torch.Tensor | None:
            present = [v for v in values if v is not None]
            return torch.cat(present) if present else None

        extra = {k: torch.cat([p.extra[k] for p in conditions]) for k in conditions[0].extra}
        return Condition(cat([p.text for p in conditions]), cat([p.pooled for p in conditions]), extra, fixed)


def batched_rows(conditions: Sequence[Condition], owner: Sequence[int], most: int) -> Iterator[tuple[slice, Condition]]:
    """Splits rows into batches of at most ``most``, each with its conditions; those of unlike sizes never meet in one.

    Families without a mask encode each prompt at its own length.

    Args:
        conditions: one row each.
        owner: ascending; for each row which condition it has.
    """
    start = 0
    for row in range(1, len(owner) + 1):
        if row < len(owner) and row - start < most:
            here, last = owner[row], owner[row - 1]
            if here == last or conditions[here].alike(conditions[last]):
                continue
        used = sorted(set(owner[start:row]))
        rows = torch.tensor([i - used[0] for i in owner[start:row]])
        yield slice(start, row), Condition.batch([conditions[i] for i in used]).take(rows)
        start = row
