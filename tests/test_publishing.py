"""Releases: actions pinned by commit, keys in environments, built with the versions that were tested."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
yaml = pytest.importorskip("yaml")
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
JOBS = yaml.safe_load((ROOT / ".github" / "workflows" / "publish.yml").read_text(encoding="utf-8"))["jobs"]


def test_actions_are_pinned_by_commit_and_say_their_version():
    uses = [line.strip() for path in FILES for line in path.read_text(encoding="utf-8").splitlines() if "uses:" in line]
    others = [line for line in uses if "uses: ./" not in line]
    pinned = re.compile(r"(?:- )?uses: [\w-]+/[\w-]+@([0-9a-f]{40}) # (?:v\d+\.\d+\.\d+|main of \d{4}-\d\d-\d\d)\b")
    assert len(others) > 10 and not [line for line in others if not pinned.match(line)]
    commits = {}
    for line in others:
        action, commit = re.search(r"uses: (\S+)@(\w+)", line).groups()
        commits.setdefault(action, set()).add(commit)
    assert all(len(found) == 1 for found in commits.values()), commits


def test_keys_are_held_by_environments():
    assert JOBS["pypi"]["environment"] == "pypi" and JOBS["registry"]["environment"] == "registry"
    for name, job in JOBS.items():
        secret = "secrets." in str(job) or "id-token" in str(job.get("permissions"))
        assert secret == ("environment" in job), name


def test_the_registry_gets_the_tree_with_its_address():
    """The action checks out again unless told not to, and would publish pyproject.toml without the address."""
    steps = JOBS["registry"]["steps"]
    written = next(i for i, step in enumerate(steps) if step.get("run") == ".ci/address")
    published = next(i for i, step in enumerate(steps) if "publish-node-action" in step.get("uses", ""))
    assert written < published and steps[published]["with"]["skip_checkout"] == "true"


def test_the_build_takes_the_tested_versions():
    steps = [step.get("run", "") for step in JOBS["build"]["steps"]]
    build = next(step for step in steps if "python -m build" in step)
    assert "pip install -c constraints.txt build" in build and 'PIP_CONSTRAINT="$PWD/constraints.txt"' in build
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert all(re.search(rf"^{name}==", pinned, re.M) for name in ("build", "setuptools"))
