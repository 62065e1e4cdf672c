"""The claims' statistics: intervals that cover, paired ones that are narrow, areas and ranks by hand."""

import math

import pytest
import torch
from vitrine.engine.activations.segmentation import confusion, iou
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo.blocked_copies import share_interval
from vitrine.evidence.intervals import (
    auroc,
    auroc_interval,
    bootstrap,
    iou_gain_interval,
    iou_interval,
    mean_interval,
    ratio_interval,
    spearman,
    true_positives,
)


def g(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.nightly
def test_the_interval_of_a_mean_covers_it_in_95_of_100_samples():
    samples = torch.randn(200, 40, generator=g())
    inside = sum(low < 0 < high for low, high in (mean_interval(s, 300) for s in samples))
    assert 180 <= inside <= 198
    low, high = mean_interval([*samples[0].tolist(), math.nan])
    assert low < samples[0].mean() < high


def test_wilsons_interval_of_a_share():
    """By hand for 3 of 10; of none, nothing is known."""
    assert share_interval(3, 10) == (0.108, 0.603) and share_interval(0, 10) == (0.0, 0.278)
    assert share_interval(10, 10) == (0.722, 1.0) and share_interval(0, 0) == (0.0, 1.0)


def test_the_gain_is_resampled_on_the_same_pictures():
    """Pictures differ far more than the two methods do: the paired interval is narrow, the separate ones overlap."""
    true = torch.randint(2, (30, 8, 8), generator=g(8))
    wrong = torch.rand(30, 8, 8, generator=g(9)) < torch.rand(30, 1, 1, generator=g(10)) * 0.6
    theirs = torch.where(wrong, 1 - true, true)
    ours = torch.where(wrong & (torch.rand(30, 8, 8, generator=g(11)) < 0.9), 1 - true, true)
    a, b = confusion(ours, true, 2), confusion(theirs, true, 2)
    low, high = iou_gain_interval(a, b)
    assert 0 < low < iou(a.sum(0))[0] - iou(b.sum(0))[0] < high
    assert iou_interval(a)[0] < iou_interval(b)[1]
    assert iou_gain_interval(a, a) == (0, 0)
    hits, counts = torch.tensor([1.0, 2, 3]), torch.tensor([2.0, 4, 6])
    assert ratio_interval(hits, counts) == (0.5, 0.5)


def test_areas_and_ranks_by_hand():
    positive, negative = torch.tensor([1.0, 2, 2]), torch.tensor([0.0, 2])
    assert auroc(positive, negative) == pytest.approx((1 + 1.5 + 1.5) / 6)
    low, high = auroc_interval(torch.randn(30, generator=g(1)) + 1, torch.randn(30, generator=g(2)))
    assert 0.5 < low < 0.76 < high < 1
    assert true_positives(torch.tensor([1.0, 3]), torch.linspace(0, 2, 101), 0.01) == 0.5
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1) and spearman([1, 1, 1], [1, 2, 3]) == 0
    assert spearman([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486833)


def test_what_has_no_spread_is_refused():
    with pytest.raises(VitrineError, match="no spread"):
        mean_interval([0.5])
    with pytest.raises(VitrineError, match="same pictures"):
        bootstrap(lambda a, b: a.mean(), torch.zeros(3), torch.zeros(2), paired=True)
