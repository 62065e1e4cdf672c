"""Claims about W2W in their quick form: the two that take seconds."""

from inspect import signature

import pytest
from vitrine.evidence.registry import pick_claims
from vitrine.evidence.reproduce import MATERIAL


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["w2w.directions", "w2w.delayed"])
def test_quick(name):
    steps = []
    (claim,) = pick_claims([name])
    result = claim.measure(quick=True, progress=lambda step, total, preview=None: steps.append((step, total)))
    assert result.holds and result.details
    assert name == "w2w.directions" or steps[-1] == (4, 4)


def test_quick_claims_stay_within_their_budget():
    """Minutes on two cores, all together, but for those that need outside material."""
    ours = [c for c in pick_claims(["w2w.*"]) if not set(MATERIAL) & set(signature(c.measure).parameters)]
    assert sum(claim.quick_minutes for claim in ours) <= 6
