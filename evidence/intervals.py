"""Statistics of the claims, by scipy: percentile bootstrap intervals (Efron 1979), AUROC, rank correlation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy import stats

from ..engine.activations.segmentation import iou
from ..engine.errors import refuse

Interval = tuple[float, float]
Values = torch.Tensor | Sequence[float]


def bootstrap(
    statistic: Callable[..., float | torch.Tensor], *samples: Values, paired: bool = False, draws: int = 1000
) -> Interval:
    """95 % percentile interval of ``statistic(*samples)``, resampled along the first dimension with a fixed seed.

    Args:
        statistic: function of resampled tensors (N, ...).
        paired: whether row i of all samples belongs together, so that they are resampled together.
    """
    tensors = [torch.as_tensor(sample) for sample in samples]
    lengths = [len(tensor) for tensor in tensors]
    if min(lengths) < 2:
        raise refuse("sample", f"{min(lengths)} values", "two or more", "one value has no spread: report no interval")
    if paired and len(set(lengths)) > 1:
        raise refuse("samples", f"{lengths} values", "as many in each", "measure the same pictures with both")

    def of_rows(*rows: np.ndarray) -> float:
        taken = rows * len(tensors) if paired else rows
        return float(statistic(*(tensor[torch.from_numpy(r)] for tensor, r in zip(tensors, taken, strict=True))))

    rows = [np.arange(length) for length in (lengths[:1] if paired else lengths)]
    result = stats.bootstrap(rows, of_rows, vectorized=False, n_resamples=draws, method="percentile", rng=0)
    return round(float(result.confidence_interval.low), 4), round(float(result.confidence_interval.high), 4)


def mean_interval(values: Values, draws: int = 2000) -> Interval:
    """95 % of the mean of (N,) values; NaN is ignored."""
    return bootstrap(torch.Tensor.nanmean, torch.as_tensor(values).float(), draws=draws)


def median_interval(values: torch.Tensor) -> Interval:
    """95 % of the median of (N,) values."""
    return bootstrap(torch.median, values.float())


def ratio_interval(parts: torch.Tensor, wholes: torch.Tensor) -> Interval:
    """95 % of sum(parts) / sum(wholes), (N,) both, resampled together."""
    return bootstrap(lambda a, b: a.sum() / b.sum(), parts.float(), wholes.float(), paired=True)


def iou_interval(tables: torch.Tensor) -> Interval:
    """95 % of the mean IoU over pictures, of (N, classes, classes) confusion tables."""
    return bootstrap(lambda t: iou(t.sum(0))[0], tables, draws=500)


def iou_gain_interval(ours: torch.Tensor, theirs: torch.Tensor) -> Interval:
    """95 % of mIoU(ours) - mIoU(theirs) on the same pictures."""
    return bootstrap(lambda a, b: iou(a.sum(0))[0] - iou(b.sum(0))[0], ours, theirs, paired=True, draws=500)


def auroc(positive: torch.Tensor, negative: torch.Tensor) -> float:
    """Probability that a positive scores above a negative, ties counting half: Mann and Whitney's U / (N M)."""
    u = stats.mannwhitneyu(positive.numpy(), negative.numpy(), method="asymptotic").statistic
    return float(u / (len(positive) * len(negative)))


def auroc_interval(positive: torch.Tensor, negative: torch.Tensor) -> Interval:
    """95 % of :func:`auroc`."""
    return bootstrap(auroc, positive, negative, draws=500)


def true_positives(positive: torch.Tensor, negative: torch.Tensor, fpr: float) -> float:
    """Fraction of positives above the score that a fraction ``fpr`` of the negatives exceeds."""
    return float((positive > negative.quantile(1 - fpr)).float().mean())


def true_positives_interval(positive: torch.Tensor, negative: torch.Tensor, fpr: float) -> Interval:
    """95 % of :func:`true_positives`; the threshold is resampled, too."""
    return bootstrap(lambda p, n: true_positives(p, n, fpr), positive, negative, draws=500)


def spearman(a: Values, b: Values) -> float:
    """Rank correlation, with averaged ties; 0 if one is constant."""
    x, y = (torch.as_tensor(values, dtype=torch.float64).numpy() for values in (a, b))
    return float(stats.spearmanr(x, y).statistic) if np.ptp(x) and np.ptp(y) else 0.0


def spearman_interval(a: Values, b: Values) -> Interval:
    """95 % of :func:`spearman` over the pairs."""
    return bootstrap(spearman, a, b, paired=True)
