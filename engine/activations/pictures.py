"""Pictures of a ranking, and their masks: at hand as tensors, or read and encoded when their turn comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import Self

from ..condition import Condition
from ..errors import refuse
from .segmentation import IGNORE

_CHECKED = 16
"""Masks that are looked at together."""

Source = Callable[[Sequence[int]], tuple[torch.Tensor, Condition]]
"""Numbers of pictures -> their latents (n, C, h, w) and a condition of n rows or one."""
Masks = Callable[[Sequence[int]], torch.Tensor]
"""Numbers of pictures -> their masks (n, H, W) of class numbers, 255 where nobody knows."""


@dataclass(frozen=True)
class Pictures:
    """Pictures by number.

    Attributes:
        count: how many.
        source: gives latents and conditions.
        masks: gives masks; None where there are none.
    """

    count: int
    source: Source
    masks: Masks | None = None

    @classmethod
    def of(cls, latents: torch.Tensor, cond: Condition, masks: torch.Tensor | None = None) -> Self:
        """From clean latents (B, C, h, w), a condition of B rows or one, and masks (B, H, W).

        Raises:
            VitrineError: If there is not one mask for each picture.
        """
        if masks is not None and len(masks) != len(latents):
            raise wrong_number(len(masks), len(latents))

        def source(numbers: Sequence[int]) -> tuple[torch.Tensor, Condition]:
            rows = torch.tensor(numbers)
            return latents[rows.to(latents.device)], cond.take(rows)

        return cls(len(latents), source, None if masks is None else lambda numbers: masks[list(numbers)])

    def classes(self) -> tuple[int, tuple[int, int]]:
        """Number of classes and size (H, W) of the masks, all of which are read: bad ones are refused before any work.

        Raises:
            VitrineError: If there are fewer than four, or the first or the second half shows only one class.
        """
        assert self.masks is not None
        if self.count < 4:
            raise wrong_number(self.count, self.count)
        half, classes, size = self.count // 2, [set[int](), set[int]()], (0, 0)
        for name, rows, seen in (("first", range(half), classes[0]), ("second", range(half, self.count), classes[1])):
            for run in in_chunks(len(rows), _CHECKED):
                masks = self.masks([rows[i] for i in run])
                size = (int(masks.shape[-2]), int(masks.shape[-1]))
                seen |= set(masks.unique().tolist()) - {IGNORE}
            if len(seen) < 2:
                raise refuse(f"masks of the {name} half", f"classes {sorted(seen)}", "two or more", "mix the pictures")
        return max(classes[0] | classes[1]) + 1, size


def in_chunks(count: int, most: int) -> Iterator[range]:
    """Numbers 0 .. ``count`` - 1 in runs of at most ``most``."""
    for start in range(0, count, most):
        yield range(start, min(start + most, count))


def wrong_number(masks: int, pictures: int) -> Exception:
    """The refusal of so many masks for so many pictures."""
    counts = (masks, pictures)
    return refuse("masks, pictures", counts, "one mask a picture, four or more", "half of them judges the probes")
