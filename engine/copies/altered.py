"""Copies that were mirrored, cropped, shifted or recoloured: the rule of :mod:`.nearest`, after the picture is aligned.

Each kind of alteration has its own usual distance: ordinary samples are aligned to a picture in the same way, so that
the choice among many alignments favours neither. A sample is a copy below a fraction of that distance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..nemo.blocked_copies import SIDE, THIRD

UNALTERED, MIRRORED, MOVED, RECOLOURED = "unaltered", "mirrored", "cropped or shifted", "recoloured"
KINDS = (UNALTERED, MIRRORED, MOVED, RECOLOURED)
LOOKED_FOR = "unaltered, mirrored, cropped to 80 % or more, shifted by up to an eighth, and recoloured"
LIMITS = {MIRRORED: THIRD, MOVED: 0.3, RECOLOURED: 0.3}
"""Fraction of the usual distance below which a sample is a copy of that kind; chosen on pictures that are measured
nowhere."""
SCALES = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Part of a picture's side that a sample may show."""
_COARSE, _FINE = 16, 32
"""Sides at which alignments are searched: of all pictures, then of the ``_CANDIDATES`` nearest ones."""
_WINDOW = 0.75
"""Side of the sample's middle that is looked for in the picture."""
_CANDIDATES = 4
_PLAIN = 0.03
"""Deviation of the window's colours below which it shows nothing that could be found elsewhere."""


def altered_words(kinds: torch.Tensor) -> str:
    """How often copies were altered, by their indices into ``KINDS``; empty where none was.

    Example:
        >>> altered_words(torch.tensor([0, 1, 1, 3]))
        '2 mirrored, 1 recoloured'
    """
    counts = {kind: int((kinds == number).sum()) for number, kind in enumerate(KINDS) if kind != UNALTERED}
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)


class Altered(NamedTuple):
    """Of S samples, the picture that each is nearest to after alignment.

    Attributes:
        ratios: (S,) distance over the usual one of the kind, scaled so that below a third is a copy.
        numbers: (S,) which picture.
        kinds: (S,) index into ``KINDS``.
        aligned: (S, 3, 64, 64) the picture as the sample shows it; its own colours.
    """

    ratios: torch.Tensor
    numbers: torch.Tensor
    kinds: torch.Tensor
    aligned: torch.Tensor


Aligned = Callable[[int, int], torch.Tensor]
"""(sample, picture of a part) -> (3, 64, 64) the picture as the sample shows it."""


class Alignment(NamedTuple):
    """Of each pair of a sample and a picture (S, P): distance, flipped or not, index of the scale, and offset."""

    distance: torch.Tensor
    flipped: torch.Tensor
    scale: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor


class AlteredIndex:
    """Pictures that may come back altered, and how far ordinary samples are from each once aligned to it.

    Args:
        parts: gives (number of the first, thumbnails (P, 3, 64, 64)) of some of the pictures after each other.
        usual: (R, 3, 64, 64) thumbnails of samples that have nothing to do with the pictures.
    """

    def __init__(self, parts: Callable[[], Iterable[tuple[int, torch.Tensor]]], usual: torch.Tensor) -> None:
        self._parts, self._usual = parts, usual
        self._levels: dict[tuple[str, int], torch.Tensor] = {}
        self._fine: dict[int, float] = {}

    def nearest(self, samples: torch.Tensor) -> Altered:
        """The nearest altered picture of each thumbnail (S, 3, 64, 64)."""
        count = len(samples)
        best = Altered(
            torch.full((count,), torch.inf),
            torch.zeros(count, dtype=torch.long),
            torch.ones(count, dtype=torch.long),
            samples.clone(),
        )
        for start, pictures in self._parts():
            for kind, compare in ((MIRRORED, self._mirrored), (MOVED, self._moved), (RECOLOURED, self._recoloured)):
                ratios, aligned = compare(samples, pictures, start)
                least, number = (ratios * (THIRD / LIMITS[kind])).min(1)
                # of two ways to align a copy the simpler one counts
                simpler = (best.ratios >= THIRD) | (KINDS.index(kind) <= best.kinds)
                nearer = (least < best.ratios) & simpler
                for i in nearer.nonzero()[:, 0].tolist():
                    best.aligned[i] = aligned(i, int(number[i]))
                best = Altered(
                    torch.where(nearer, least, best.ratios),
                    torch.where(nearer, number + start, best.numbers),
                    torch.where(nearer, KINDS.index(kind), best.kinds),
                    best.aligned,
                )
        return best

    def _level(self, kind: str, start: int, distances: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """(P,) the usual distance of a part's pictures, computed once."""
        if (kind, start) not in self._levels:
            self._levels[kind, start] = distances(self._usual).median(0).values.clamp_min(1e-6)
        return self._levels[kind, start]

    def _mirrored(self, samples: torch.Tensor, pictures: torch.Tensor, start: int) -> tuple[torch.Tensor, Aligned]:
        def distances(rows: torch.Tensor) -> torch.Tensor:
            return _plain_distances(rows.flip(-1), pictures)

        ratios = distances(samples) / self._level(MIRRORED, start, distances)
        return ratios, lambda i, number: pictures[number].flip(-1)

    def _recoloured(self, samples: torch.Tensor, pictures: torch.Tensor, start: int) -> tuple[torch.Tensor, Aligned]:
        basis = _colour_basis(pictures)

        def distances(rows: torch.Tensor) -> torch.Tensor:
            return torch.stack([_left_over(basis, turned) for turned in (rows, rows.flip(-1))]).amin(0)

        def aligned(i: int, number: int) -> torch.Tensor:
            fits = [_in_colours_of(samples[i], each) for each in (pictures[number], pictures[number].flip(-1))]
            return min(fits, key=lambda fit: float((fit - samples[i]).square().mean()))

        return distances(samples) / self._level(RECOLOURED, start, distances).clamp(max=1.0), aligned

    def _moved(self, samples: torch.Tensor, pictures: torch.Tensor, start: int) -> tuple[torch.Tensor, Aligned]:
        """The sample's middle in the most similar window of a picture or of its mirror image."""

        def distances(rows: torch.Tensor) -> torch.Tensor:
            return _alignments(rows, pictures, _COARSE).distance

        coarse = distances(samples) / self._level(MOVED, start, distances)
        chosen = coarse.topk(min(_CANDIDATES, len(pictures)), dim=1, largest=False).indices
        ratios = torch.full_like(coarse, torch.inf)
        candidates = chosen.unique().tolist()
        own = _alignments(samples, pictures[candidates], _FINE)
        new = [number for number in candidates if start + number not in self._fine]
        if new:
            levels = _alignments(self._usual, pictures[new], _FINE).distance.median(0).values.clamp_min(1e-6)
            self._fine |= {start + number: float(level) for number, level in zip(new, levels, strict=True)}
        column = {number: at for at, number in enumerate(candidates)}
        for i, numbers in enumerate(chosen.tolist()):
            for number in numbers:
                ratios[i, number] = own.distance[i, column[number]] / self._fine[start + number]

        def aligned(i: int, number: int) -> torch.Tensor:
            _, flipped, scale, row, left = (float(values[i, column[number]]) for values in own)
            window = _window(pictures[number], SCALES[int(scale)], row, left)
            return window.flip(-1) if flipped else window

        return ratios, aligned


def _plain_distances(samples: torch.Tensor, pictures: torch.Tensor) -> torch.Tensor:
    exact = "donot_use_mm_for_euclid_dist"
    return torch.cdist(samples.flatten(1), pictures.flatten(1), compute_mode=exact) / samples[0].numel() ** 0.5


def _resized(pictures: torch.Tensor, side: int) -> torch.Tensor:
    return F.interpolate(pictures, (side, side), mode="area" if side <= SIDE else "bilinear")


def _colour_basis(pictures: torch.Tensor) -> torch.Tensor:
    """(P, 4, n) orthonormal rows that span a picture's colours and white; those that a grey one lacks are zero."""
    small = _resized(pictures, _FINE).flatten(2)
    base = torch.cat([torch.ones_like(small[:, :1]), small], 1)
    values, vectors = torch.linalg.eigh((base @ base.transpose(1, 2)).double())
    inverse = torch.where(values > 1e-5 * values[:, -1:], values.clamp_min(1e-12).rsqrt(), 0.0)
    return (inverse[:, :, None] * vectors.transpose(1, 2)).float() @ base


def _left_over(basis: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    """(S, P) what an affine map of a picture's colours leaves of a sample, over the sample's deviation."""
    flat = _resized(samples, _FINE).flatten(2)
    fitted = torch.einsum("pkn,scn->spkc", basis, flat).square().sum((2, 3))
    left = (flat.square().sum((1, 2))[:, None] - fitted).clamp_min(0)
    spread = (flat - flat.mean(2, keepdim=True)).square().sum((1, 2))[:, None]
    plain = spread < flat[0].numel() * _PLAIN**2
    return torch.where(plain, torch.inf, (left / spread.clamp_min(1e-9)).sqrt())


def _in_colours_of(sample: torch.Tensor, picture: torch.Tensor) -> torch.Tensor:
    """A picture whose colours are mapped to a sample's."""
    base = torch.cat([torch.ones_like(picture[:1]), picture]).flatten(1).T
    weights = torch.linalg.lstsq(base, sample.flatten(1).T, driver="gelsd").solution
    return (base @ weights).T.reshape_as(sample)


def _alignments(samples: torch.Tensor, pictures: torch.Tensor, side: int) -> Alignment:
    """The best alignment of each pair, at one side; an offset is the sample's corner in the picture, over its side."""
    window = round(_WINDOW * side)
    margin = (side - window) // 2
    shown = _resized(samples, side)[..., margin : margin + window, margin : margin + window]
    spread = (shown - shown.mean((2, 3), keepdim=True)).square().mean((1, 2, 3)).sqrt()
    count, pairs = shown[0].numel(), (len(samples), len(pictures))
    best = Alignment(torch.full(pairs, torch.inf), *(torch.zeros(pairs) for _ in range(4)))
    for flipped in (False, True):
        templates = shown.flip(-1) if flipped else shown
        for index, scale in enumerate(SCALES):
            large = _resized(pictures, round(side / scale))
            matches = F.conv2d(large, templates)
            squares = F.conv2d(large.square().sum(1, keepdim=True), torch.ones(1, 1, window, window))
            away = (templates.square().sum((1, 2, 3))[None, :, None, None] + squares - 2 * matches).clamp_min(0)
            least, at = (away.flatten(2).transpose(0, 1) / count).sqrt().min(2)  # (S, P)
            wide = matches.shape[-1]
            now = Alignment(
                least,
                torch.full(pairs, float(flipped)),
                torch.full(pairs, float(index)),
                (at // wide - margin) / large.shape[-1],
                (at % wide - margin) / large.shape[-1],
            )
            nearer = least < best.distance
            best = Alignment(*(torch.where(nearer, a, b) for a, b in zip(now, best, strict=True)))
    plain = (spread < _PLAIN)[:, None]
    return best._replace(distance=torch.where(plain, torch.inf, best.distance))


def _window(picture: torch.Tensor, scale: float, row: float, column: float) -> torch.Tensor:
    """(3, 64, 64) a window of a picture by its corner and side, as fractions; beyond the border its last pixels."""
    centres = (torch.arange(SIDE) + 0.5) / SIDE * scale
    rows, columns = (2 * (centres + corner) - 1 for corner in (row, column))
    grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1)[None]
    return F.grid_sample(picture[None], grid, padding_mode="border", align_corners=False)[0]
