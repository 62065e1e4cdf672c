"""How well a score tells planted captions from ordinary ones."""

from __future__ import annotations

import torch


def auroc(positive: torch.Tensor, negative: torch.Tensor) -> float:
    """Probability that a positive scores above a negative, ties counting half."""
    difference = positive[:, None] - negative[None]
    return float((difference > 0).float().mean() + 0.5 * (difference == 0).float().mean())


def auroc_interval(positive: torch.Tensor, negative: torch.Tensor, draws: int = 500) -> tuple[float, float]:
    """95 % bootstrap interval of :func:`auroc`."""
    g = torch.Generator().manual_seed(0)
    areas = torch.tensor([auroc(_resample(positive, g), _resample(negative, g)) for _ in range(draws)])
    return _interval(areas)


def _resample(values: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    return values[torch.randint(len(values), (len(values),), generator=g)]


def true_positives(positive: torch.Tensor, negative: torch.Tensor, fpr: float) -> float:
    """Share of positives above the score that a share ``fpr`` of the negatives exceeds."""
    return float((positive > negative.quantile(1 - fpr)).float().mean())


def true_positives_interval(
    positive: torch.Tensor, negative: torch.Tensor, fpr: float, draws: int = 500
) -> tuple[float, float]:
    """95 % bootstrap interval of :func:`true_positives`; the threshold is drawn anew each time."""
    g = torch.Generator().manual_seed(0)
    shares = [true_positives(_resample(positive, g), _resample(negative, g), fpr) for _ in range(draws)]
    return _interval(torch.tensor(shares))


def median_interval(values: torch.Tensor, draws: int = 1000) -> tuple[float, float]:
    """95 % bootstrap interval of the median of (N,) values."""
    return _interval(_draws(values, draws).median(1).values)


def mean_interval(values: torch.Tensor, draws: int = 1000) -> tuple[float, float]:
    """95 % bootstrap interval of the mean of (N,) values."""
    return _interval(_draws(values, draws).mean(1))


def ratio_interval(parts: torch.Tensor, wholes: torch.Tensor, draws: int = 1000) -> tuple[float, float]:
    """95 % bootstrap interval of sum(parts) / sum(wholes); (N,) both, rows drawn together."""
    g = torch.Generator().manual_seed(0)
    rows = torch.randint(len(parts), (draws, len(parts)), generator=g)
    return _interval(parts.float()[rows].sum(1) / wholes.float()[rows].sum(1))


def _draws(values: torch.Tensor, draws: int) -> torch.Tensor:
    """(draws, N) values drawn anew."""
    g = torch.Generator().manual_seed(0)
    return values.float()[torch.randint(len(values), (draws, len(values)), generator=g)]


def _interval(statistics: torch.Tensor) -> tuple[float, float]:
    low, high = statistics.quantile(torch.tensor([0.025, 0.975])).tolist()
    return round(low, 4), round(high, 4)
