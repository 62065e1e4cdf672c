"""The parts of EMD's longer claims, on a few pictures."""

import pytest
import torch
from vitrine.evidence.emd.judge import Judge
from vitrine.evidence.emd.repair_claims import FIRST, _row, _ways
from vitrine.evidence.emd.student_claims import _recalls, one_step_students


@pytest.fixture(scope="module")
def judge():
    return Judge.open(FIRST, 4)


@pytest.mark.nightly
def test_distances_have_an_interval_over_sets(judge):
    students = one_step_students()
    rows = {name: judge.row(*judge.draw(generate)) for name, generate in students.items()}
    first = {name: row["FID"] for name, row in rows.items()}
    _recalls(rows, students, 2, lambda at: Judge.open(at, 4), lambda *_: None)
    for name in students:
        each = rows[name]["FID on each set"]
        assert len(each) == 2 and each[0] == first[name] and each[0] != each[1]
        assert rows[name]["FID over sets"]["mean"] == pytest.approx(sum(each) / 2, abs=1e-4)
    emd, baseline = (rows[f"{name}, 1 step"]["FID over sets"]["mean"] for name in ("EMD", "Diff-Instruct"))
    assert rows["EMD's FID minus Diff-Instruct's, paired"]["mean"] == pytest.approx(emd - baseline, abs=1e-3)


def test_repairs_begin_at_the_students_sample_and_move_on(judge):
    ways = _ways(judge, (1,))
    assert list(ways) == ["one step", "teacher alone, 10 steps", "1 steps, z frozen", "1 steps, z moving"]
    drawn = {name: sample() for name, sample in ways.items() if "teacher" not in name}
    frozen, moving = (drawn[f"1 steps, z {how}"] for how in ("frozen", "moving"))
    assert not torch.equal(frozen, drawn["one step"]) and not torch.equal(frozen, moving)
    assert all(bool(torch.isfinite(x).all()) for x in drawn.values())
    nearest, row = _row(judge, drawn["one step"])
    assert len(nearest) == 4 and row["nearest real"]["mean"] == pytest.approx(sum(nearest) / 4, abs=1e-3)
