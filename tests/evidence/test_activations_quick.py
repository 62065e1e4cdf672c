"""The cheapest claims of the tap room, measured the quick way."""

import pytest
from vitrine.evidence.registry import pick_claims


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["activations.noise", "gdf.properties"])
def test_a_quick_claim_holds(name):
    (claim,) = pick_claims([name])
    assert 0 < claim.quick_minutes <= claim.minutes
    result = claim.measure(quick=True)
    assert result.holds and result.details
