"""The cheap claims of EM Distillation, measured quickly."""

from inspect import signature

import pytest
from vitrine.evidence.registry import all_claims, pick_claims
from vitrine.evidence.reproduce import MATERIAL


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["emd.mixture", "emd.likelihood"])
def test_quick_claim_holds(name):
    (claim,) = pick_claims([name])
    steps = []
    result = claim.measure(progress=lambda step, total, preview=None: steps.append((step, total)), quick=True)
    assert result.holds, result
    assert steps[-1][0] == steps[-1][1] == len(steps)


def test_quick_claims_stay_within_five_minutes():
    claims = {name: claim for name, claim in all_claims().items() if name.startswith("emd.")}
    assert {"emd.mixture", "emd.levels", "emd.cancellation", "emd.chains", "emd.rare_modes", "emd.variety"} <= set(
        claims
    )
    alone = [claim for claim in claims.values() if not MATERIAL.keys() & signature(claim.measure).parameters.keys()]
    assert sum(claim.quick_minutes for claim in alone) <= 5
