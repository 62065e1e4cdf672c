"""Few-shot segmentation: a linear or small-MLP probe on activations, from a handful of labelled masks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import refuse
from ..runtime.progress import Progress, silent
from ..settings.option import Option, Options
from .correspondence import sample_points, similarity

IGNORE = 255
"""The label of unknown pixels."""

CLICK_TEMPERATURE = 0.05
"""Cosine difference at which a mask from clicks rises from 0.5 to 0.75."""


@dataclass(frozen=True)
class ProbeSettings(Options):
    """How a pixel probe is fitted."""

    hidden: Annotated[
        int,
        Option(
            "0: linear probe; else a layer this wide.",
            ge=0,
            top=512,
            details="A linear probe is multinomial logistic regression.",
        ),
    ] = 0
    weight_decay: Annotated[float, Option("L2 penalty on the weights.", ge=0)] = 1e-3
    pixels: Annotated[int, Option("Most labelled pixels per image.", ge=1)] = 1024
    steps: Annotated[int, Option("L-BFGS iterations (linear) or Adam steps (MLP).", ge=1)] = 60
    seed: Annotated[int, Option("For the pixel choice and the initial weights.")] = 0


@dataclass(frozen=True)
class PixelProbe:
    """A fitted probe: (B, C, h, w) features -> (B, K, H, W) class scores."""

    net: nn.Module
    mean: torch.Tensor
    std: torch.Tensor
    classes: int

    @torch.no_grad()
    def scores(self, features: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """(B, K, H, W) scores, resized bilinearly from the features' grid to ``size``."""
        cells = ((features.float().movedim(1, -1) - self.mean) / self.std).to(self.mean)
        return F.interpolate(self.net(cells).movedim(-1, 1), size=size, mode="bilinear", align_corners=False)

    def predict(self, features: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """(B, H, W) int64 class of every pixel."""
        return self.scores(features, size).argmax(1)


def fit_masks(
    masks: torch.Tensor | Sequence[torch.Tensor], sizes: Sequence[tuple[int, int]], size: int | None = None
) -> torch.Tensor:
    """Masks of images of these sizes as one (B, H, W); ``size`` resizes them to squares, nearest.

    Args:
        masks: (B, H, W), or one (H, W) per image.
        sizes: (height, width) of each image.
    """
    each = list(masks)
    shapes = [tuple(m.shape) for m in each]
    if shapes != [tuple(s) for s in sizes] or size is None and len(set(shapes)) > 1:
        raise refuse("masks", shapes, f"masks of {list(sizes)}, of one size or with size=...", "one per picture")
    return torch.stack(each if size is None else [square_mask(m, size) for m in each])


def square_mask(mask: torch.Tensor, size: int) -> torch.Tensor:
    """(size, size) int64 of a mask (H, W), nearest."""
    # class indices below 2**24 are exact in float32
    return F.interpolate(mask[None, None].float(), (size, size), mode="nearest-exact")[0, 0].long()


def fit_probe(
    features: torch.Tensor,
    masks: torch.Tensor,
    classes: int | None = None,
    settings: ProbeSettings | None = None,
    progress: Progress = silent,
) -> PixelProbe:
    """Fits a probe on labelled images.

    Args:
        features: (B, C, h, w), e.g. :meth:`.container.Activations.concat`.
        masks: (B, H, W) integers: class of each pixel, 255 for unknown ones.
        classes: K; by default one more than the largest label.
    """
    count = _check(features, masks, classes)
    return fit_probe_on([(features, masks)], count, settings, progress)


def fit_probe_on(
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    classes: int,
    settings: ProbeSettings | None = None,
    progress: Progress = silent,
) -> PixelProbe:
    """:func:`fit_probe` on batches of images; only the labelled pixels that are used are kept in memory.

    Args:
        batches: pairs of features (b, C, h, w) and masks (b, H, W).
    """
    settings = settings or ProbeSettings()
    cells, labels = _pixels(batches, settings)
    mean, std = cells.mean(0), cells.std(0).clamp_min(1e-6)
    cells = (cells - mean) / std
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(settings.seed)
        net = _network(cells.shape[1], classes, settings.hidden).to(cells.device)
        x, y = cells.clone(), labels.clone()
        weights = [p for p in net.parameters() if p.ndim == 2]
        if settings.hidden:
            optimizer: torch.optim.Optimizer = torch.optim.Adam(net.parameters(), 1e-2)
            steps_a_round = 1
        else:
            steps_a_round = 10
            optimizer = torch.optim.LBFGS(
                net.parameters(), max_iter=steps_a_round, history_size=10, line_search_fn="strong_wolfe"
            )

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            penalty = sum((w.square().sum() for w in weights), start=x.new_zeros(()))
            loss = F.cross_entropy(net(x), y) + settings.weight_decay * penalty
            loss.backward()
            return loss

        for step in range(-(-settings.steps // steps_a_round)):
            optimizer.step(closure)  # type: ignore[arg-type]  # torch itself passes the tensor on
            progress(min((step + 1) * steps_a_round, settings.steps), settings.steps, None)
    return PixelProbe(net.eval().requires_grad_(False), mean, std, classes)


_MOST_CLASSES = 1 << 16


def _check(features: torch.Tensor, masks: torch.Tensor, classes: int | None) -> int:
    if features.ndim != 4 or masks.ndim != 3 or len(features) != len(masks):
        shapes = (tuple(features.shape), tuple(masks.shape))
        raise refuse("features, masks", shapes, "(B, C, h, w) and (B, H, W)", "one mask per picture")
    known = masks[masks != IGNORE].unique()
    numbers = known.double()
    if not bool(((numbers == numbers.round()) & (numbers < _MOST_CLASSES)).all()):  # NaN equals nothing
        shown = [round(n, 3) for n in known.tolist()[:5]]
        raise refuse("labels", shown, f"whole numbers below {_MOST_CLASSES}", "round soft masks, or number the classes")
    if len(known) < 2:
        raise refuse("labels", known.tolist(), "two classes at least", "label some background, too")
    count = classes or int(known.max()) + 1
    if int(known.max()) >= count or int(known.min()) < 0:
        raise refuse("labels", known.tolist(), f"0 .. {count - 1}, or {IGNORE}", "raise classes or relabel")
    missing = sorted(set(range(count)) - set(known.tolist()))
    if missing:
        remedy = "label some of it in one picture, or number the classes without gaps"
        raise refuse("unlabelled classes", missing, f"pixels of each of the {count} classes", remedy)
    return count


def _pixels(
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]], settings: ProbeSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and labels at a random choice of labelled pixels of every image."""
    g = torch.Generator().manual_seed(settings.seed)
    cells, labels = [], []
    for maps, mask in ((f, m) for features, masks in batches for f, m in zip(features, masks, strict=True)):
        maps, mask, (height, width) = maps.float(), mask.long(), mask.shape
        known = torch.nonzero(mask.flatten() != IGNORE).flatten()
        chosen = known[torch.randperm(len(known), generator=g)[: settings.pixels].to(known.device)]
        points = torch.stack([(chosen % width + 0.5) / width, (chosen // width + 0.5) / height], 1)
        cells.append(sample_points(maps, points))
        labels.append(mask.flatten()[chosen])
    return torch.cat(cells), torch.cat(labels)


def _network(width: int, classes: int, hidden: int) -> nn.Module:
    if not hidden:
        net = nn.Linear(width, classes)
        nn.init.zeros_(net.weight)
        nn.init.zeros_(net.bias)
        return net
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def mask_like_clicks(
    example: torch.Tensor, points: torch.Tensor, positive: torch.Tensor, features: torch.Tensor, size: tuple[int, int]
) -> torch.Tensor:
    """(B, H, W) in [0, 1]: how much closer each pixel is to the positive than to the negative clicks.

    A softmax over the nearest positive and negative feature; a probe would overfit so few pixels.

    Args:
        example: (C, h, w) features of the clicked image.
        points: (N, 2) x, y in [0, 1] of the clicks.
        positive: (N,) bool, True for positive clicks.
        features: (B, C, h, w) of the images to segment.
        size: (H, W) of the masks.
    """
    if bool(positive.all()) or not bool(positive.any()):
        shown = f"{int(positive.sum())} positive, {int((~positive).sum())} negative"
        raise refuse("points", shown, "one of each at least", "click what you want, shift-click what you do not")
    clicked = sample_points(example.float(), points)
    positive = positive.to(clicked.device)
    near = torch.stack([similarity(features.float(), clicked[kind]) for kind in (~positive, positive)], 1)
    near = F.interpolate(near, size=size, mode="bilinear", align_corners=False)
    return F.softmax(near / CLICK_TEMPERATURE, 1)[:, 1]


def mean_iou(predicted: torch.Tensor, true: torch.Tensor, classes: int) -> tuple[float, torch.Tensor]:
    """(mIoU, (K,) IoU of each class, NaN where neither has it) over (B, H, W) class indices; label 255 is ignored."""
    return iou(confusion(predicted, true, classes).sum(0))


def confusion(predicted: torch.Tensor, true: torch.Tensor, classes: int) -> torch.Tensor:
    """(B, K, K) pixel counts of each of B images (B, H, W), rows are the truth; label 255 is ignored."""
    tables = []
    for ours, truth in zip(predicted, true, strict=True):
        labelled = truth != IGNORE
        pairs = truth[labelled].long() * classes + ours[labelled].long()
        tables.append(torch.bincount(pairs, minlength=classes**2))
    return torch.stack(tables).view(-1, classes, classes)


def iou(table: torch.Tensor) -> tuple[float, torch.Tensor]:
    """(mIoU, (K,) IoU) of one (K, K) confusion table."""
    hit = table.diagonal().double()
    union = table.sum(0) + table.sum(1) - table.diagonal()
    by_class = torch.where(union > 0, hit / union.clamp_min(1), torch.nan)
    return float(by_class.nanmean()), by_class
