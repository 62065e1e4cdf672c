"""The cheap claims of EM Distillation, measured quickly."""

import pytest
from vitrine.evidence.registry import all_claims, pick_claims


@pytest.mark.parametrize("name", ["emd.mixture", "emd.likelihood"])
def test_quick_claim_holds(name):
    (claim,) = pick_claims([name])
    steps = []
    result = claim.measure(progress=lambda step, total, preview=None: steps.append((step, total)), quick=True)
    assert result.holds, result
    assert steps[-1][0] == steps[-1][1] == len(steps)


def test_quick_claims_stay_within_two_minutes():
    claims = [claim for name, claim in all_claims().items() if name.startswith("emd.")]
    assert len(claims) == 4 and sum(claim.quick_minutes for claim in claims) <= 2
