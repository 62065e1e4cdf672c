"""EMD's claims: those that take seconds, and parts of the longer ones on a few pictures."""

from inspect import signature

import pytest
from vitrine.evidence.emd.judge import Judge
from vitrine.evidence.emd.student_claims import _recalls, one_step_students
from vitrine.evidence.registry import all_claims, pick_claims
from vitrine.evidence.reproduce import MATERIAL


@pytest.mark.nightly
def test_distances_have_an_interval_over_sets():
    judge, students = Judge.open(5_400_000, 4), one_step_students()
    rows = {name: judge.row(*judge.draw(generate)) for name, generate in students.items()}
    first = {name: row["FID"] for name, row in rows.items()}
    _recalls(rows, students, 2, lambda at: Judge.open(at, 4), lambda *_: None)
    for name in students:
        each = rows[name]["FID on each set"]
        assert len(each) == 2 and each[0] == first[name] and each[0] != each[1]
        assert rows[name]["FID over sets"]["mean"] == pytest.approx(sum(each) / 2, abs=1e-4)
    emd, baseline = (rows[f"{name}, 1 step"]["FID over sets"]["mean"] for name in ("EMD", "Diff-Instruct"))
    assert rows["EMD's FID minus Diff-Instruct's, paired"]["mean"] == pytest.approx(emd - baseline, abs=1e-3)


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
    assert {"emd.mixture", "emd.cancellation", "emd.chains", "emd.rare_modes", "emd.variety_flow"} <= set(claims)
    alone = [claim for claim in claims.values() if not MATERIAL.keys() & signature(claim.measure).parameters.keys()]
    assert sum(claim.quick_minutes for claim in alone) <= 5
