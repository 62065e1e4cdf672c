"""Counts heads in portraits by sliding the attribute classifier's convolutions over the image at several scales.

The classifier was not trained to detect heads, so one layer on its convolutions is fitted to renders with one to six
heads pasted at random positions and sizes on a plain background. Its accuracy is measured on held-out renders and on
renders tiled two by two (:func:`validation`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ...engine.portraits.render import PARTS, render
from ...engine.portraits.scenes import sample_scenes
from ..portraits.classifier import AttributeClassifier

Count = Callable[[torch.Tensor], torch.Tensor]
"""(N, 3, H, W) images in [0, 1] -> (N,) heads."""

FRACTIONS = (1.0, 0.8, 0.64, 0.51, 0.41, 0.33)
"""Sides of the windows, relative to the image side."""
_WINDOW, _CELL = 64, 8
_FIRST_SCENE, _HELD_OUT_SCENE = 9_400_000, 9_500_000
_GROUND = ("background", "shirt", "neck")


@dataclass(frozen=True)
class _Windows:
    """Windows of all scales over one image.

    Attributes:
        features: (W, 2048) of the classifier's convolutions.
        places: (W, 3) centre row, centre column and side, relative to the image side.
    """

    features: torch.Tensor
    places: torch.Tensor


@torch.no_grad()
def _windows(net: AttributeClassifier, picture: torch.Tensor, fractions: Sequence[float] = FRACTIONS) -> _Windows:
    """Windows of an image (3, H, W), with a stride of an eighth; they may exceed the edge by an eighth."""
    side, features, places = picture.shape[-2], [], []
    for fraction in fractions:
        scale = _WINDOW / (fraction * side)
        size = [max(_WINDOW, round(scale * n / _CELL) * _CELL) for n in picture.shape[-2:]]
        resized = functional.interpolate(picture[None], size, mode="bilinear", antialias=True)
        cells = net.body[:-3](functional.pad(resized, (_CELL,) * 4, mode="replicate") * 2 - 1)
        patches = functional.unfold(cells, _WINDOW // _CELL)[0].T
        rows, columns = (n - _WINDOW // _CELL + 1 for n in cells.shape[-2:])
        grid = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), -1).flatten(0, 1)
        centres = ((grid - 1) * _CELL + _WINDOW / 2) / size[0]
        features.append(patches)
        places.append(torch.cat([centres, torch.full((len(grid), 1), _WINDOW / size[0])], 1))
    return _Windows(torch.cat(features), torch.cat(places))


# --- images with a known number of heads --------------------------------------------------------------------------
def _pasted(first: int, count: int, side: int = 128) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """[(image (3, side, side), heads (K, 3) as in ``_Windows.places``)]: one head, or 2 .. 6 small ones."""
    g = torch.Generator().manual_seed(first)
    tiles = render(sample_scenes(range(first, first + count)), side)
    parts = torch.tensor([k for k, name in enumerate(PARTS) if name not in _GROUND], dtype=tiles.parts.dtype)
    heads = torch.isin(tiles.parts, parts)[:, None].float()
    made = []
    for k in range(count):
        wanted = (1, 2, 4, 6)[k % 4]
        picture = tiles.images[k, :, :2, :2].mean((1, 2))[:, None, None].repeat(1, side, side)
        placed: list[torch.Tensor] = []
        for _ in range(40):
            low, high = (0.75, 1.0) if wanted == 1 else (0.34, 0.58) if wanted < 6 else (0.33, 0.42)
            size = round(side * (low + (high - low) * float(torch.rand((), generator=g))))
            top, left = (int((side - size) * float(torch.rand((), generator=g))) for _ in range(2))
            place = torch.tensor([(top + size / 2) / side, (left + size / 2) / side, size / side])
            if len(placed) == wanted or any(float((place - p)[:2].abs().max()) < 0.7 * float(p[2]) for p in placed):
                continue
            tile, mask = (
                functional.interpolate(x[k : k + 1], (size, size), mode="area")[0] for x in (tiles.images, heads)
            )
            window = picture[:, top : top + size, left : left + size]
            window.copy_(mask * tile + (1 - mask) * window)
            placed.append(place)
        made.append((picture, torch.stack(placed)))
    return made


def _labels(places: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """(W,) 1 if a window frames a head like a portrait, 0 if it does not, NaN in between."""
    apart = torch.cdist(places[:, :2], heads[:, :2]) / heads[:, 2]
    larger = (places[:, None, 2] / heads[:, 2]).log().abs()
    labels = torch.zeros(len(places))
    labels[((apart < 0.35) & (larger < 0.4)).any(1)] = torch.nan
    labels[((apart < 0.1) & (larger < 0.15)).any(1)] = 1
    return labels


# --- the counter ----------------------------------------------------------------------------------------------------
def head_counter(net: AttributeClassifier, pictures: int = 120, threshold: float = 1.0) -> Count:
    """Fits the layer, deterministically.

    Args:
        pictures: number of renders with pasted heads for the fit.
        threshold: smallest logit of a detection.
    """
    features, labels = [], []
    for picture, heads in _pasted(_FIRST_SCENE, pictures):
        windows = _windows(net, picture)
        marks = _labels(windows.places, heads)
        features.append(windows.features[~marks.isnan()])
        labels.append(marks[~marks.isnan()])
    x, y = torch.cat(features), torch.cat(labels)
    mean, spread = x.mean(0), x.std(0) + 1e-3
    weight, bias = _fitted((x - mean) / spread, y)

    def count(images: torch.Tensor) -> torch.Tensor:
        counts = []
        for picture in images:
            windows = _windows(net, picture)
            logits = ((windows.features - mean) / spread) @ weight + bias
            counts.append(_separate(logits, windows.places, threshold))
        return torch.tensor(counts)

    return count


def _fitted(x: torch.Tensor, y: torch.Tensor, decay: float = 0.03) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight, bias) of a logistic regression with equally weighted classes."""
    weight, bias = torch.zeros(x.shape[1], requires_grad=True), torch.zeros(1, requires_grad=True)
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=60, line_search_fn="strong_wolfe")
    ratio = (1 - y.mean()) / y.mean()

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        error = functional.binary_cross_entropy_with_logits(x @ weight + bias, y, pos_weight=ratio)
        value = error + decay * weight.square().sum()
        value.backward()
        return value

    optimiser.step(loss)
    return weight.detach(), bias.detach()


def _separate(logits: torch.Tensor, places: torch.Tensor, threshold: float) -> int:
    """Non-maximum suppression: a window whose centre is within half a side of a better one is the same head."""
    left = [k for k in logits.argsort(descending=True).tolist() if float(logits[k]) > threshold]
    heads: list[torch.Tensor] = []
    for k in left:
        apart = (float((places[k] - head)[:2].abs().max()) / max(float(places[k, 2]), float(head[2])) for head in heads)
        if all(distance > 0.5 for distance in apart):
            heads.append(places[k])
    return len(heads)


def validation(count: Count, pictures: int = 32, side: int = 128) -> dict[str, float]:
    """Fraction of held-out images counted correctly: renders, one head; renders tiled two by two, four heads."""
    single = render(sample_scenes(range(_HELD_OUT_SCENE, _HELD_OUT_SCENE + pictures)), side).images
    others = range(_HELD_OUT_SCENE + pictures, _HELD_OUT_SCENE + 5 * pictures)
    small = render(sample_scenes(others), side // 2).images
    rows = small.unflatten(0, (pictures, 2, 2))
    tiled = rows.permute(0, 3, 1, 4, 2, 5).reshape(pictures, 3, side, side)
    return {
        "renders, one head": float((count(single) == 1).float().mean()),
        "renders tiled two by two, four heads": float((count(tiled) == 4).float().mean()),
    }
