""".github/workflows: valid, with the lanes the project promises, naming files and versions that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
yaml = pytest.importorskip("yaml")
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CI, PUBLISH = (yaml.safe_load((ROOT / ".github" / "workflows" / f"{n}.yml").read_text()) for n in ("ci", "publish"))


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
    assert all(f"ruff {part}" in commands(jobs["lint"]) for part in ("check", "format --check"))
    assert "mypy" in commands(jobs["types"]) and "-p vitrine.engine -p vitrine.nodes" in commands(jobs["types"])
    lanes = {lane["diffusers"]: lane["constraints"] for lane in jobs["engine"]["strategy"]["matrix"]["include"]}
    assert set(lanes) == {"lowest", "newest"} and all((ROOT / file).is_file() for file in lanes.values())
    settings = [lane.get("settings", "") for lane in jobs["engine"]["strategy"]["matrix"]["include"]]
    for name in ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA"):
        assert len({kind for lane in settings for kind in re.findall(rf"{name}=(\w+)", lane)}) == 2, name
    assert "env ${{ matrix.settings }} pytest" in commands(jobs["engine"])
    assert "pytest --ignore=tests/comfy" in commands(jobs["engine"]) and "pytest tests/comfy" in commands(jobs["comfy"])


def test_the_site_is_built_with_every_change():
    steps = commands(CI["jobs"]["docs"])
    assert "pip install -c constraints.txt '.[docs]'" in steps and "mkdocs build --strict" in steps
    assert "mkdocs build --strict" in (ROOT / ".ci" / "run").read_text()
    pinned = (ROOT / "constraints.txt").read_text()
    assert all(re.search(rf"^{n}==", pinned, re.M) for n in ("mkdocs", "mkdocs-material", "markdown"))


def test_full_size_checkpoints_run_every_night():
    nightly = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())
    job = nightly["jobs"]["full-size"]
    assert nightly[True]["schedule"] and job["strategy"]["matrix"]["family"] == ["sd15", "sdxl"]
    assert "VITRINE_FULL_SIZE=${{ matrix.family }} pytest tests/full_size" in commands(job)
    release = next(step["with"]["ref"] for step in job["steps"] if "ComfyUI" in str(step.get("with")))
    project = (ROOT / "pyproject.toml").read_text()
    assert release == "v" + re.search(r'requires-comfyui = ">=([\d.]+)"', project).group(1)


def test_the_local_run_rounds_as_another_processor_too():
    second = next(line for line in (ROOT / ".ci" / "run").read_text().splitlines() if "-m rounding" in line)
    assert all(name in second for name in ("ATEN_CPU_CAPABILITY=", "MKL_CBWR=", "ONEDNN_MAX_CPU_ISA="))
    assert "rounding:" in (ROOT / "pyproject.toml").read_text()
    marked = [p for p in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.rounding" in p.read_text(encoding="utf-8")]
    assert len(marked) >= 30


def test_versions_are_those_the_project_names():
    project = (ROOT / "pyproject.toml").read_text()
    lowest = re.search(r"^diffusers==(.+)$", (ROOT / ".ci" / "lowest.txt").read_text(), re.M).group(1)
    assert lowest.startswith(re.search(r'"diffusers>=([\d.]+)"', project).group(1))
    assert re.search(r"^diffusers==", (ROOT / "constraints.txt").read_text(), re.M)
    release = re.search(r"--version ([\d.]+)", commands(CI["jobs"]["comfy"])).group(1)
    assert release == re.search(r'requires-comfyui = ">=([\d.]+)"', project).group(1)


def test_a_tag_is_published_after_all_tests():
    jobs = PUBLISH["jobs"]
    assert PUBLISH[True]["push"] == {"tags": ["v*"]} and jobs["tests"]["uses"] == "./.github/workflows/ci.yml"
    assert "workflow_call" in CI[True] and jobs["build"]["needs"] == "tests"
    assert "GITHUB_REF_NAME" in commands(jobs["build"])
    assert jobs["pypi"]["needs"] == jobs["registry"]["needs"] == "build"
