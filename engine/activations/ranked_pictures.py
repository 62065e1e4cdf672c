"""Pictures of a ranking, their masks and known points: at hand as tensors, or read when their turn comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from typing_extensions import Self

from ..errors import refuse
from ..jobs.digests import digest
from ..network.condition import Condition
from .segmentation import IGNORE

_CHECKED = 16
"""Masks that are looked at together."""

Source = Callable[[Sequence[int]], tuple[torch.Tensor, Condition]]
"""Numbers of pictures -> their latents (n, C, h, w) and a condition of n rows or one."""
Masks = Callable[[Sequence[int]], torch.Tensor]
"""Numbers of pictures -> their masks (n, H, W) of class numbers, 255 where nobody knows."""


class MadeOf(NamedTuple):
    """What taps are made of beside network and settings, as a :class:`~vitrine.engine.jobs.run.Run` takes it.

    Attributes:
        shared: name -> input that all pictures have in common, such as the autoencoder.
        picture: number -> its file or pixels, and its prompt.
    """

    shared: Mapping[str, object]
    picture: Callable[[int], object]


class Pair(NamedTuple):
    """Two pictures by number, (N, 2) points x, y in [0, 1] of the source, and where they lie in the target."""

    source: int
    target: int
    points: torch.Tensor
    truth: torch.Tensor


def known_pairs(points: Any, count: int) -> tuple[Pair, ...]:
    """Pairs of ``count`` pictures: as they are, or from keypoints, each picture with the one half of them away.

    Args:
        points: a list of :class:`Pair`, or (B, K, 2) x, y in [0, 1] of the same K points in each, NaN where hidden.

    Raises:
        VitrineError: If there are not so many pictures with keypoints.
    """
    if isinstance(points, (list, tuple)) and points and all(isinstance(p, Pair) for p in points):
        return tuple(points)
    places = torch.as_tensor(points, dtype=torch.float32)
    if places.ndim != 3 or tuple(places.shape[::2]) != (count, 2) or count < 2:
        accepted = f"({count}, K, 2), two pictures or more"
        raise refuse("keypoints", tuple(places.shape), accepted, "the same K points in each, NaN where hidden")
    pairs = []
    for n in range(count):
        other = (n + count // 2) % count
        visible = ~(places[n].isnan().any(1) | places[other].isnan().any(1))
        if bool(visible.any()):
            pairs.append(Pair(n, other, places[n][visible], places[other][visible]))
    return tuple(pairs)


@dataclass(frozen=True)
class Pictures:
    """Pictures by number.

    Attributes:
        count: how many.
        source: gives latents and conditions.
        masks: gives masks; None where there are none.
        pairs: pictures whose points are known in each other; None where there are none.
        made_of: what latents and conditions are made of, where that is quicker to tell than by reading them.

    Raises:
        VitrineError: If there are masks and pairs, or a pair has no points, points outside [0, 1] or no such picture.
    """

    count: int
    source: Source
    masks: Masks | None = None
    pairs: tuple[Pair, ...] | None = None
    made_of: MadeOf | None = None

    @property
    def inputs(self) -> dict[str, object]:
        """Pictures and what is known of them, for a :class:`~vitrine.engine.jobs.run.Run`; reads them one by one."""
        made_of = self.made_of or MadeOf({}, lambda n: self.source([n]))
        masks = None if self.masks is None else [digest(self.masks([n])) for n in range(self.count)]
        pictures = [digest(made_of.picture(n)) for n in range(self.count)]
        return {**made_of.shared, "pictures": pictures, "masks": masks, "keypoints": self.pairs}

    def __post_init__(self) -> None:
        if self.pairs is None:
            return
        if self.masks is not None:
            raise refuse("labels", "masks and keypoints", "one of them", "rank by each, and compare")
        if not self.pairs:
            raise refuse("keypoints", "none that two pictures share", "one or more", "hidden ones do not count")
        for pair in self.pairs:
            _check_pair(pair, self.count)

    @classmethod
    def of(
        cls, latents: torch.Tensor, cond: Condition, masks: torch.Tensor | None = None,
        pairs: Sequence[Pair] | None = None,
    ) -> Self:  # fmt: skip
        """From clean latents (B, C, h, w), a condition of B rows or one, and masks (B, H, W) or known points.

        Raises:
            VitrineError: If there is not one mask for each picture.
        """
        if masks is not None and len(masks) != len(latents):
            raise wrong_number(len(masks), len(latents))

        def source(numbers: Sequence[int]) -> tuple[torch.Tensor, Condition]:
            rows = torch.tensor(numbers)
            return latents[rows.to(latents.device)], cond.take(rows)

        read_masks = None if masks is None else lambda numbers: masks[list(numbers)]
        return cls(len(latents), source, read_masks, None if pairs is None else tuple(pairs))

    def classes(self) -> tuple[list[set[int]], tuple[int, int]]:
        """Classes of each picture and size (H, W) of the masks, all of which are read before any work.

        Raises:
            VitrineError: If there are fewer than four.
        """
        assert self.masks is not None
        if self.count < 4:
            raise wrong_number(self.count, self.count)
        present, size = [], (0, 0)
        for run in in_chunks(self.count, _CHECKED):
            masks = self.masks(run)
            size = (int(masks.shape[-2]), int(masks.shape[-1]))
            present += [set(mask.unique().tolist()) - {IGNORE} for mask in masks]
        return present, size


def _check_pair(pair: Pair, count: int) -> None:
    for number, points in ((pair.source, pair.points), (pair.target, pair.truth)):
        if not 0 <= number < count:
            raise refuse("pairs", f"picture {number}", f"0 .. {count - 1}", "pictures count from 0")
        if points.shape != (len(pair.points), 2) or not len(points):
            shapes = (tuple(pair.points.shape), tuple(pair.truth.shape))
            raise refuse("pairs", shapes, "(N, 2) and (N, 2), N >= 1", "each point and where it went")
        if not bool(((points >= 0) & (points <= 1)).all()):
            raise refuse("keypoints", points.tolist(), "x, y in [0, 1]", "divide pixels by width and height")


def in_chunks(count: int, most: int) -> Iterator[range]:
    """Numbers 0 .. ``count`` - 1 in runs of at most ``most``."""
    for start in range(0, count, most):
        yield range(start, min(start + most, count))


def wrong_number(masks: int, pictures: int) -> Exception:
    """The refusal of so many masks for so many pictures."""
    counts = (masks, pictures)
    return refuse("masks, pictures", counts, "one mask a picture, four or more", "half of them judges the probes")
