"""``vitrine verify --dry`` on full-size files: the plan names its data and says what a row takes, within minutes."""

import json

import pytest
from vitrine.cli.main import main
from vitrine_tests.full_size.checkpoint import ensure
from vitrine_tests.full_size.conftest import families
from vitrine_tests.full_size.material import configuration
from vitrine_tests.full_size.measure import measuring

DTYPES = {"sd15": "float32", "sdxl": "bfloat16"}
"""Half of float32's memory for the larger one; processors compute bfloat16, and float16 hardly."""
WEIGHTS = {"sd15": 4 * 1_066_235_307, "sdxl": 2 * 3_468_837_868}
"""Bytes in these."""
OWN = {"sd15": {"nemo.detection", "nemo.blocking", "gdf.spair"}, "sdxl": {"nemo.detection", "gdf.spair"}}


@pytest.mark.parametrize("family", families())
def test_the_plan_of_a_full_size_file(comfy, family, tmp_path, capsys):
    """Of a single file with its configuration beside it, at the model's own picture size and without any data."""
    out = tmp_path / "verify"
    words = ["--model", str(ensure(family)), "--config", str(configuration(family)), "--dtype", DTYPES[family]]
    with measuring("command", "vitrine verify --dry", family):
        assert main(["verify", *words, "--device", "cpu", "--out", str(out), "--dry"]) == 0
    plan, told = (json.loads((out / f"{name}.json").read_text()) for name in ("plan", "verify"))
    assert abs(plan["bytes of the weights"] / WEIGHTS[family] - 1) < 0.01
    assert plan["seconds of a row"] > 0 and plan["bytes of a row"] > 2**20
    estimated = {c["claim"]: c["estimate"] for c in plan["claims"] if c["estimate"] is not None}
    assert set(estimated) >= OWN[family]
    assert all(e["seconds"] > 60 and 0 < e["bytes"] < 16 * 2**30 for e in estimated.values())
    assert all("needs" in c["status"] or "not for this model" in c["status"] for c in told["claims"])
    assert "memorized_laion_prompts.csv" in capsys.readouterr().out
    assert list(told["model"]["sha256"]) == [ensure(family).name]
