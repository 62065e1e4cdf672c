"""The cheapest claim about activations, measured the quick way."""

import pytest
from vitrine.evidence.registry import pick_claims


@pytest.mark.nightly
def test_a_quick_claim_holds():
    (claim,) = pick_claims(["gdf.properties"])
    assert 0 < claim.quick_minutes <= claim.minutes
    result = claim.measure(quick=True)
    assert result.holds and result.details
