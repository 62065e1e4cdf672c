"""The figure of the copy check's claim."""

import pytest
import torch
from vitrine.evidence.nemo.copy_claims import MEASURED, TUNING, spearman


def test_rank_correlation_with_ties():
    from scipy.stats import spearmanr

    g = torch.Generator().manual_seed(0)
    a, b = torch.randint(4, (30,), generator=g).double(), torch.randn(30, generator=g).double()
    assert spearman(a.tolist(), b.tolist()) == pytest.approx(spearmanr(a, b).statistic, abs=1e-12)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1) and spearman([1, 1, 1], [1, 2, 3]) == 0


def test_people_that_were_tuned_on_are_never_measured():
    assert not set(range(TUNING, TUNING + 100)) & set(range(MEASURED, MEASURED + 100))
