"""Students of the flow portraits by EMD and by Diff-Instruct, trained for as long, judged beside their teacher."""

import json

import pytest
import torch
from safetensors.torch import load_file
from vitrine.evidence.emd import flow_one_step as compared


@pytest.mark.nightly
def test_runs_are_kept_and_paired(tmp_path):
    files = compared.trained(tmp_path, seeds=(0,), updates=1)
    updates = json.loads((tmp_path / "updates_in_the_same_time.json").read_text())
    assert updates >= 1, "an update of Diff-Instruct takes no more time than one of EMD"
    assert len(set(files.values())) == 3
    weights = {name: load_file(file) for name, file in files.items()}
    assert compared.trained(tmp_path, seeds=(0,), updates=1) == files
    for name, file in files.items():
        again = load_file(file)
        assert again and all(torch.equal(again[key], value) for key, value in weights[name].items()), name
    rows = compared.judged(files, count=20, steps=())
    assert rows.keys() == {"teacher, 1 step", "renders of other scenes", *files}
    untrained = rows["teacher, 1 step"]["Frechet"]
    assert all(abs(rows[name]["Frechet"] - untrained) < 1 for name in files), "one update changes little"


def test_differences_are_paired_by_seed():
    rows = {f"{compared.EMD} {s}": {"recall": 0.9 + s / 10} for s in range(3)}
    rows |= {f"{compared.SAME_TIME} {s}": {"recall": 0.8 + s / 10} for s in range(3)}
    found = compared.apart(rows, compared.SAME_TIME, "recall")
    assert found["mean"] == pytest.approx(0.1) and found["+-"] == pytest.approx(0)
