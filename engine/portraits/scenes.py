"""Scenes of the toy dataset: attributes, identities and contexts, sampled from integer seeds.

A *scene* is the renderer's input. It has two parts with independent random numbers:

* identity: face geometry, skin, hair, beard, glasses, mole. The same identity seed is always the same person;
* context: background, expression, hat, shirt, pose. It differs between two images of one person.

Left and right are the viewer's. A dataset is a list of seeds, so it is exact, unlimited and needs no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "background": ("blue", "green", "yellow", "pink", "purple", "gray"),
    "skin": ("pale", "tan", "olive", "dark"),
    "hair": ("bald", "short", "long", "curly"),
    "hair_color": ("black", "brown", "blond", "red", "white"),
    "hat": ("none", "cap-left", "cap-right", "tophat"),
    "glasses": ("none", "glasses"),
    "beard": ("none", "beard"),
    "mouth": ("smiling", "neutral", "frowning", "surprised"),
    "mole": ("none", "left", "right"),
    "shirt": ("crimson", "navy", "teal", "cream"),
}
"""Every discrete attribute and its values, in the order of the columns of :attr:`Scenes.attributes`."""

ATTRIBUTE_NAMES = tuple(ATTRIBUTES)
IDENTITY_ATTRIBUTES = ("skin", "hair", "hair_color", "glasses", "beard", "mole")

# name -> (low, high) in face units: the image spans [-1, 1], y points down.
GEOMETRY: dict[str, tuple[float, float]] = {
    "head_width": (0.38, 0.47),
    "head_height": (0.46, 0.54),
    "jaw": (2.0, 2.7),
    "eye_distance": (0.155, 0.205),
    "eye_height": (-0.06, 0.01),
    "eye_size": (0.085, 0.115),
    "brow_lift": (0.0, 0.05),
    "brow_tilt": (-0.25, 0.25),
    "nose_width": (0.045, 0.085),
    "nose_length": (0.07, 0.14),
    "mouth_width": (0.17, 0.25),
    "mouth_height": (0.30, 0.34),
    "ear_size": (0.07, 0.11),
    "hair_volume": (0.05, 0.09),
}
POSE: dict[str, tuple[float, float]] = {
    "shift_x": (-0.08, 0.08),
    "shift_y": (0.0, 0.09),
    "scale": (0.96, 1.10),
    "tilt": (-0.11, 0.11),
    "light": (-0.10, 0.10),
}
GEOMETRY_NAMES, POSE_NAMES = tuple(GEOMETRY), tuple(POSE)

_SHARES = {  # the default is uniform; accessories are more often absent
    "hat": (0.46, 0.18, 0.18, 0.18),
    "glasses": (0.62, 0.38),
    "beard": (0.65, 0.35),
    "mole": (0.5, 0.25, 0.25),
}
_IDENTITY_STREAM, _CONTEXT_STREAM, _DRAWS = 7919, 104729, 32


@dataclass(frozen=True)
class Scenes:
    """A batch of B scenes.

    Attributes:
        attributes: (B, 10) int64, one column per name of ``ATTRIBUTES``.
        geometry: (B, 14) float32 in face units, columns ``GEOMETRY``.
        pose: (B, 5) float32, columns ``POSE`` (tilt in radians, light is a left-right shading slope).
        jitter: (B, 6, 3) float32 in [-1, 1], colour jitter of background, skin, hair, shirt, iris, lips.
        identity, context: (B,) int64, the two seeds.
        values: attribute -> its values in words, in the order of the columns of ``attributes``.

    The scenes of another dataset have its own numbers of columns.
    """

    attributes: np.ndarray
    geometry: np.ndarray
    pose: np.ndarray
    jitter: np.ndarray
    identity: np.ndarray
    context: np.ndarray
    values: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: ATTRIBUTES)

    def __len__(self) -> int:
        return len(self.attributes)

    def __getitem__(self, index: Any) -> Scenes:
        rows = np.atleast_1d(np.arange(len(self))[index])
        return replace(self, **{f: getattr(self, f)[rows] for f in self.__dataclass_fields__ if f != "values"})

    def column(self, name: str) -> np.ndarray:
        """(B,) integer values of one attribute."""
        return self.attributes[:, list(self.values).index(name)]

    def words(self, row: int) -> dict[str, str]:
        """Attribute name -> value of one scene, in words."""
        return {n: words[v] for (n, words), v in zip(self.values.items(), self.attributes[row], strict=True)}

    def with_attributes(self, **values: str | np.ndarray) -> Scenes:
        """The same scenes with some attributes replaced, by word (for all) or by an integer column."""
        table = self.attributes.copy()
        for name, value in values.items():
            code = self.values[name].index(value) if isinstance(value, str) else value
            table[:, list(self.values).index(name)] = code
        return replace(self, attributes=table)

    def with_pose(self, **values: float) -> Scenes:
        """The same scenes with some pose entries replaced."""
        pose = self.pose.copy()
        for name, value in values.items():
            pose[:, POSE_NAMES.index(name)] = value
        return replace(self, pose=pose)


def sample_scenes(identities: np.ndarray | Sequence[int], contexts: np.ndarray | Sequence[int] | None = None) -> Scenes:
    """Scenes from (B,) identity seeds and (B,) context seeds (default: the same numbers).

    Each scene depends on its two seeds only, not on the batch.
    """
    identity = np.asarray(identities, dtype=np.int64)
    context = identity if contexts is None else np.asarray(contexts, dtype=np.int64)
    who, where = uniforms(identity, context)
    columns = []
    for k, (name, values) in enumerate(ATTRIBUTES.items()):
        draws = (who if name in IDENTITY_ATTRIBUTES else where)[:, k]
        columns.append(choose(draws, len(values), _SHARES.get(name)))
    first = len(ATTRIBUTES)
    geometry = spread(GEOMETRY, who[:, first:])
    pose = spread(POSE, where[:, first:])
    jitter = np.empty((len(identity), 6, 3), dtype=np.float32)
    person = who[:, first + len(GEOMETRY) :][:, :6]  # skin and hair shades belong to the identity
    surroundings = where[:, first + len(POSE) :][:, :12]
    jitter[:, (1, 2)] = 2 * person.reshape(-1, 2, 3) - 1
    jitter[:, (0, 3, 4, 5)] = 2 * surroundings.reshape(-1, 4, 3) - 1
    return Scenes(np.stack(columns, 1), geometry, pose, jitter, identity, context)


def uniforms(identity: np.ndarray, context: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(B, 32) numbers in [0, 1) of the identities, and of the contexts; the two streams are independent."""

    def stream(number: int, seeds: np.ndarray) -> np.ndarray:
        return np.stack([np.random.default_rng([number, int(s)]).random(_DRAWS) for s in seeds])

    return stream(_IDENTITY_STREAM, identity), stream(_CONTEXT_STREAM, context)


def choose(draws: np.ndarray, count: int, shares: Sequence[float] | None = None) -> np.ndarray:
    """(B,) of ``count`` values by (B,) numbers in [0, 1), with these shares or equally often."""
    shares = shares or (1 / count,) * count
    return np.searchsorted(np.cumsum(shares)[:-1], draws, side="right").astype(np.int64)


def spread(ranges: dict[str, tuple[float, float]], draws: np.ndarray) -> np.ndarray:
    """(B, R) float32 within the ranges, by (B, >= R) numbers in [0, 1)."""
    low, high = np.array(list(ranges.values())).T
    return (low + (high - low) * draws[:, : len(ranges)]).astype(np.float32)
