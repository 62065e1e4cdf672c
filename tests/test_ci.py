""".github/workflows: valid, with the lanes the project promises, naming files and versions that exist."""

import fnmatch
import re
from pathlib import Path

import pytest
from vitrine_tests import nightly

ROOT = Path(__file__).parents[1]
yaml = pytest.importorskip("yaml")
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CI, PUBLISH = (yaml.safe_load((ROOT / ".github" / "workflows" / f"{n}.yml").read_text()) for n in ("ci", "publish"))


PROJECT = (ROOT / "pyproject.toml").read_text()


def commands(job):
    return "\n".join(step.get("run", "") for step in job["steps"])


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_is_a_workflow(path):
    found = yaml.safe_load(path.read_text())
    assert found["name"] and found[True] and found["permissions"] == {"contents": "read"}  # YAML 1.1 reads "on" as true
    for name, job in found["jobs"].items():
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= set(found["jobs"]), name
        if "uses" in job:
            assert (ROOT / job["uses"]).is_file()
            continue
        assert job["runs-on"] and job["timeout-minutes"] and job["steps"]
        assert all(("run" in step) != ("uses" in step) for step in job["steps"])
        assert all("@" in step["uses"] for step in job["steps"] if "uses" in step)


def test_lanes():
    jobs = CI["jobs"]
    assert all(
        command in commands(jobs["lint"])
        for command in ("ruff check", "ruff format --check", "lint-imports", "codespell")
    )
    assert "mypy" in commands(jobs["types"]) and "-p vitrine.engine -p vitrine.nodes" in commands(jobs["types"])
    lanes = {lane["diffusers"]: lane["constraints"] for lane in jobs["engine"]["strategy"]["matrix"]["include"]}
    assert set(lanes) == {"lowest", "newest"} and all((ROOT / file).is_file() for file in lanes.values())
    settings = [lane.get("settings", "") for lane in jobs["engine"]["strategy"]["matrix"]["include"]]
    for name in ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA"):
        assert len({kind for lane in settings for kind in re.findall(rf"{name}=(\w+)", lane)}) == 2, name
    assert "env ${{ matrix.settings }} pytest" in commands(jobs["engine"])
    assert "pytest tests/comfy" in commands(jobs["comfy"]) and ".ci/run readme" in commands(jobs["readme"])


def test_every_piece_of_the_nightly_lane_is_in_the_night():
    nightly_yml = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())
    job = nightly_yml["jobs"]["lane-c"]
    globs = job["strategy"]["matrix"]["pieces"]
    names = [piece.name for piece in nightly.pieces()]
    left = [n for n in names if not any(fnmatch.fnmatch(n, glob) for glob in globs)]
    benchmarks = [n for n in names if n.startswith("benchmarks, ")]
    assert nightly_yml[True]["schedule"] and left == benchmarks, "benchmarks need a machine of their own"
    assert "python tests/nightly.py '${{ matrix.pieces }}'" in commands(job)
    files = [word for piece in nightly.pieces() for word in piece.arguments if word.startswith("tests")]
    assert len(files) > 60 and all((ROOT / file).exists() for file in files)
    release = next(step["with"]["ref"] for step in job["steps"] if "ComfyUI" in str(step.get("with")))
    assert release == "v" + re.search(r'requires-comfyui = ">=([\d.]+)"', PROJECT).group(1)
    marked = [p for p in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.rounding" in p.read_text(encoding="utf-8")]
    assert len(marked) >= 30 and nightly.AVX2.keys() == {"ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA"}


def test_versions_are_those_the_project_names():
    lowest = re.search(r"^diffusers==(.+)$", (ROOT / ".ci" / "lowest.txt").read_text(), re.M).group(1)
    assert lowest.startswith(re.search(r'"diffusers>=([\d.]+)"', PROJECT).group(1))
    assert re.search(r"^diffusers==", (ROOT / "constraints.txt").read_text(), re.M)
    release = re.search(r"--version ([\d.]+)", commands(CI["jobs"]["comfy"])).group(1)
    assert release == re.search(r'requires-comfyui = ">=([\d.]+)"', PROJECT).group(1)


def test_a_tag_is_published_after_all_tests():
    jobs = PUBLISH["jobs"]
    assert PUBLISH[True]["push"] == {"tags": ["v*"]} and jobs["tests"]["uses"] == "./.github/workflows/ci.yml"
    assert "workflow_call" in CI[True] and jobs["build"]["needs"] == "tests"
    assert "GITHUB_REF_NAME" in commands(jobs["build"])
    assert jobs["pypi"]["needs"] == jobs["registry"]["needs"] == "build"
