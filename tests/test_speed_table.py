"""tests/benchmarks/table.py: the page, and the check that compares ratios with a baseline."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "benchmarks" / "table.py"


@pytest.fixture(scope="module")
def table():
    spec = importlib.util.spec_from_file_location("speed_table", TABLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(method="tap", ratio=0.5, low=None, high=None, **other):
    spread = {"low": ratio if low is None else low, "high": ratio if high is None else high}
    names = {"method": method, "against": "bare forward", "model": "portraits", "unit": "time", "device": "cpu"}
    rest = {"rounds": 3, "peak_mib": 2048, "against_mib": 1024, "threads": 2, "dtype": "float32", "torch": "2"}
    return names | {"ratio": ratio} | spread | rest | other


def write(path, rows):
    entries = [{"extra_info": {"rows": rows[:1]}}, {"extra_info": {}}, {"extra_info": {"rows": rows[1:]}}]
    path.write_text(json.dumps({"machine_info": {}, "benchmarks": entries}))
    return str(path)


def test_the_page_says_ratio_spread_memory_and_that_there_was_no_gpu(table):
    page = table.render([row(low=0.48, high=0.53), row("plan", 0.00034, rounds=1, peak_mib=0)])
    assert "| tap | bare forward | portraits | time | **0.500** (0.480 to 0.530) | 3 | 2.0 / 1.0 GiB |  |" in page
    assert "| plan | bare forward | portraits | time | **0.000340** | 1 |  |  |" in page
    assert "no GPU was at hand" in page and "CPU: 2 threads, float32, torch 2." in page
    head, line, *body = [text.count("|") for text in page.splitlines() if text.startswith("|")]
    assert head == line and set(body) == {head}


def test_a_gpus_rows_fill_the_last_column(table):
    page = table.render([row(), row(ratio=0.25, device="H200"), row("only there", 2.0, device="H200")])
    assert "no GPU" not in page and "GPU: H200" in page
    assert "| 2.0 / 1.0 GiB | **0.250** (0.250 to 0.250) |" in page
    assert "| only there | bare forward | portraits | time |  | 3 |" in page


def test_what_a_hand_waits_for_stands_in_seconds(table):
    page = table.render([row(), row("panel: a drag", ours=0.25, theirs=0.02, promised=0.5)])
    assert page.endswith(
        "\n- panel: a drag: **0.250** s, at most 0.5 promised; a bare forward meanwhile took 0.020 s\n"
    )
    assert "in seconds" not in table.render([row()])


def test_without_rows_the_page_says_so(table):
    assert "Not measured yet" in table.render([])


def test_good_results_pass(table, tmp_path, capsys):
    old = [row(), row("plan", 0.001), row("train", 30.0, 25.0, 36.0)]
    new = [row(ratio=0.57), row("plan", 0.009), row("train", 40.0), row("a new one", 9.0)]
    base, results = write(tmp_path / "base.json", old), write(tmp_path / "new.json", new)
    assert table.main(["--check", base, results]) == 0, "14 %, one percent of a forward, and the spread are let through"
    assert "4 rows, none worse" in capsys.readouterr().out
    assert table.main(["--check", base, write(tmp_path / "better.json", [row(ratio=0.1), *new[1:]])]) == 0


def test_worse_and_missing_rows_fail(table, tmp_path, capsys):
    base = write(tmp_path / "base.json", [row(), row("train", 30.0, 29.0, 31.0), row("gone", 1.0)])
    results = write(tmp_path / "new.json", [row(ratio=0.58), row("train", 36.0)])
    assert table.main(["--check", base, results]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("worse: tap, bare forward, portraits: 0.500 -> 0.580")
    assert said[1].startswith("worse: train") and said[2] == "missing: gone, bare forward, portraits"
    assert table.check([row()], []) == ["missing: no rows at all"]


def test_what_was_not_run_is_not_asked_for(table):
    old = [row(), row(device="H200"), row("tap", 0.5, model="SDXL size, 64 x 64")]
    assert table.check(old, [row()], "portraits") == []
    assert table.check(old, [row()]) == ["missing: tap, bare forward, SDXL size, 64 x 64"]


def test_a_baseline_is_the_rows_alone(table, tmp_path, capsys):
    results = write(tmp_path / "new.json", [row(), row("plan", 0.1)])
    assert table.main(["--rows", results]) == 0
    base = tmp_path / "base.json"
    base.write_text(capsys.readouterr().out)
    assert table.load(base) == table.load(results) and "machine" not in base.read_text()
    assert table.main(["--check", str(base), results]) == 0


@pytest.mark.nightly
def test_a_real_benchmark_writes_rows(table, tmp_path):
    """One benchmark on a narrow network, from pytest-benchmark's own file to the page and the check."""
    pytest.importorskip("pytest_benchmark")
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "SD1.5"]
    more = {"VITRINE_BENCH": "1", "VITRINE_BENCH_TINY": "1", "OMP_NUM_THREADS": "1", "VITRINE_BENCH_ROUNDS": "2"}
    benchmark = ROOT / "tests" / "benchmarks" / "test_resolution_cost.py"
    command += [f"--benchmark-json={results}", str(benchmark)]
    alone = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}  # beside others nothing is timed
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=alone | more)
    assert done.returncode == 0, done.stdout[-3000:]
    (found,) = table.load(results)
    assert found["method"] == "resolution, plan and apply" and found["rounds"] == 2 and found["device"] == "cpu"
    assert 0 < found["low"] <= found["ratio"] <= found["high"] and found["theirs"] > 0
    assert "tiny SD1.5 size, 8 x 8" in table.render([found]) and table.check([found], [found]) == []
