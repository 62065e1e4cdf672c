"""Claims about W2W in their quick form: the one that takes seconds."""

import pytest
from vitrine.evidence.registry import pick_claims


@pytest.mark.nightly
def test_quick():
    (claim,) = pick_claims(["w2w.directions"])
    result = claim.measure(quick=True)
    assert result.holds and result.details
