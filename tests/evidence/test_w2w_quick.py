"""Claims about W2W in their quick form: the two that take seconds."""

import pytest
from vitrine.evidence.registry import pick_claims


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["w2w.directions", "w2w.delayed"])
def test_quick(name):
    steps = []
    (claim,) = pick_claims([name])
    result = claim.measure(quick=True, progress=lambda step, total, preview=None: steps.append((step, total)))
    assert result.holds and result.details
    assert name == "w2w.directions" or steps[-1] == (4, 4)
