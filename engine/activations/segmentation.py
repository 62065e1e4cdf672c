"""Few-shot segmentation: a linear or small-MLP probe on activations, from a handful of labelled masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ..config import Config
from ..errors import refuse
from ..progress import Progress, silent

IGNORE = 255


@dataclass(frozen=True)
class ProbeSettings(Config):
    """How a pixel probe is fitted.

    Attributes:
        hidden: width of one hidden layer; 0 is a linear probe (multinomial logistic regression).
        weight_decay: L2 penalty on the weights.
        pixels: at most this many labelled pixels of each picture are used.
        steps: L-BFGS iterations (linear) or Adam steps (MLP).
        seed: of the pixel choice and the initial weights.
    """

    hidden: int = 0
    weight_decay: float = 1e-3
    pixels: int = 1024
    steps: int = 60
    seed: int = 0

    def __post_init__(self) -> None:
        if self.hidden < 0 or self.weight_decay < 0 or min(self.pixels, self.steps) < 1:
            raise refuse("probe settings", self, "hidden, weight_decay >= 0; pixels, steps >= 1", "use the defaults")


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


def fit_probe(
    features: torch.Tensor,
    masks: torch.Tensor,
    classes: int | None = None,
    settings: ProbeSettings | None = None,
    progress: Progress = silent,
) -> PixelProbe:
    """Fit a probe on labelled pictures.

    Args:
        features: (B, C, h, w), e.g. :meth:`Activations.concat`.
        masks: (B, H, W) integers: class of each pixel, 255 where nobody knows.
        classes: K; by default one more than the largest label.

    Raises:
        VitrineError: another number of masks than pictures, labels beyond K, only one class labelled, or none of some.
    """
    settings = settings or ProbeSettings()
    count = _check(features, masks, classes)
    cells, labels = _pixels(features.float(), masks.long(), settings)
    mean, std = cells.mean(0), cells.std(0).clamp_min(1e-6)
    cells = (cells - mean) / std
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(settings.seed)
        net = _network(cells.shape[1], count, settings.hidden).to(cells.device)
        _optimise(net, cells.clone(), labels.clone(), settings, progress)
    return PixelProbe(net.eval().requires_grad_(False), mean, std, count)


def _check(features: torch.Tensor, masks: torch.Tensor, classes: int | None) -> int:
    if features.ndim != 4 or masks.ndim != 3 or len(features) != len(masks):
        given = (tuple(features.shape), tuple(masks.shape))
        raise refuse("features, masks", given, "(B, C, h, w) and (B, H, W)", "one mask for each picture")
    known = masks[masks != IGNORE].unique()
    if len(known) < 2:
        raise refuse("labels", known.tolist(), "two classes at least", "label some background, too")
    count = classes or int(known.max()) + 1
    if int(known.max()) >= count or int(known.min()) < 0:
        raise refuse("labels", known.tolist(), f"0 .. {count - 1}, or {IGNORE}", "raise classes or relabel")
    lost = sorted(set(range(count)) - set(known.tolist()))
    if lost:
        remedy = "label some of it in one picture, or number the classes without gaps"
        raise refuse("unlabelled classes", lost, f"pixels of each of the {count} classes", remedy)
    return count


def _pixels(features: torch.Tensor, masks: torch.Tensor, settings: ProbeSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Features under a random choice of labelled pixels of every picture, and their labels."""
    g = torch.Generator().manual_seed(settings.seed)
    cells, labels = [], []
    height, width = masks.shape[-2:]
    for one, mask in zip(features, masks, strict=True):
        known = torch.nonzero(mask.flatten() != IGNORE).flatten()
        chosen = known[torch.randperm(len(known), generator=g)[: settings.pixels].to(known.device)]
        points = torch.stack([(chosen % width + 0.5) / width, (chosen // width + 0.5) / height], 1).to(one)
        grid = (points * 2 - 1).view(1, 1, -1, 2)
        found = F.grid_sample(one[None], grid, mode="bilinear", padding_mode="border", align_corners=False)
        cells.append(found[0, :, 0].T)
        labels.append(mask.flatten()[chosen])
    return torch.cat(cells), torch.cat(labels)


def _network(width: int, classes: int, hidden: int) -> nn.Module:
    if not hidden:
        net = nn.Linear(width, classes)
        nn.init.zeros_(net.weight)
        nn.init.zeros_(net.bias)
        return net
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def _optimise(
    net: nn.Module, cells: torch.Tensor, labels: torch.Tensor, settings: ProbeSettings, progress: Progress
) -> None:
    weights = [p for p in net.parameters() if p.ndim == 2]

    def loss() -> torch.Tensor:
        penalty = sum((w.square().sum() for w in weights), start=cells.new_zeros(()))
        return F.cross_entropy(net(cells), labels) + settings.weight_decay * penalty

    if settings.hidden:
        optimizer: torch.optim.Optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        rounds, each = settings.steps, 1
    else:
        each = 10
        optimizer = torch.optim.LBFGS(net.parameters(), max_iter=each, history_size=10, line_search_fn="strong_wolfe")
        rounds = -(-settings.steps // each)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    for step in range(rounds):
        optimizer.step(closure)  # type: ignore[arg-type]  # torch itself passes the tensor on
        progress(min((step + 1) * each, settings.steps), settings.steps, None)


def mean_iou(predicted: torch.Tensor, true: torch.Tensor, classes: int) -> tuple[float, torch.Tensor]:  # both (B, H, W)
    """(mIoU, (K,) IoU of each class, NaN where neither has it) over a whole set of pictures; label 255 is left out."""
    return iou(confusion(predicted, true, classes).sum(0))


def confusion(predicted: torch.Tensor, true: torch.Tensor, classes: int) -> torch.Tensor:
    """(B, K, K) pixel counts of each picture, rows are the truth."""
    tables = []
    for p, t in zip(predicted, true, strict=True):
        seen = t != IGNORE
        tables.append(torch.bincount(t[seen].long() * classes + p[seen].long(), minlength=classes**2))
    return torch.stack(tables).view(-1, classes, classes)


def iou(table: torch.Tensor) -> tuple[float, torch.Tensor]:
    """(mIoU, (K,) IoU) of one (K, K) confusion table."""
    hit = table.diagonal().double()
    union = table.sum(0) + table.sum(1) - table.diagonal()
    each = torch.where(union > 0, hit / union.clamp_min(1), torch.nan)
    return float(each.nanmean()), each


def bootstrap_iou(tables: torch.Tensor, draws: int = 500, seed: int = 0) -> tuple[float, float]:
    """95 % interval of mIoU when pictures are drawn anew; ``tables`` from :func:`confusion`.

    Raises:
        VitrineError: one picture only, which has no spread.
    """
    return _span([iou(tables[p].sum(0))[0] for p in _draws(len(tables), draws, seed)])


def bootstrap_iou_gain(
    ours: torch.Tensor, theirs: torch.Tensor, draws: int = 500, seed: int = 0
) -> tuple[float, float]:
    """95 % interval of mIoU(ours) - mIoU(theirs) on the same pictures, drawn anew together.

    Raises:
        VitrineError: one picture only, or tables of different pictures.
    """
    if ours.shape != theirs.shape:
        raise refuse("tables", (tuple(ours.shape), tuple(theirs.shape)), "one shape", "predict the same pictures")
    picks = _draws(len(ours), draws, seed)
    return _span([iou(ours[p].sum(0))[0] - iou(theirs[p].sum(0))[0] for p in picks])


def bootstrap_mean(values: Sequence[float] | torch.Tensor, draws: int = 2000, seed: int = 0) -> tuple[float, float]:
    """95 % interval of a mean over pictures or pairs.

    Raises:
        VitrineError: one value only, which has no spread.
    """
    v = torch.as_tensor(values).float()
    return _span(v[_draws(len(v), draws, seed)].nanmean(1))


def _draws(count: int, draws: int, seed: int) -> torch.Tensor:
    if count < 2:
        raise refuse("pictures", count, "two at least", "one picture has no spread: give more, or no interval")
    return torch.randint(count, (draws, count), generator=torch.Generator().manual_seed(seed))


def _span(values: Sequence[float] | torch.Tensor) -> tuple[float, float]:
    low, high = torch.as_tensor(values).float().quantile(torch.tensor([0.025, 0.975])).tolist()
    return low, high
