"""The slow cases: which they are, who leaves them out, who runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SLOW = (ROOT / "tests" / "slow.txt").read_text(encoding="utf-8").splitlines()


def test_every_line_is_a_case():
    assert len(SLOW) == len(set(SLOW)) > 100 and sorted(SLOW) == SLOW
    for line in SLOW:
        path, name = line.split("::", 1)
        source = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"\b{re.escape(name.split('[')[0])}\b", source), f"{line} is no test any more"


def collected(*arguments, **environ):
    """Ids of what pytest would run."""
    quiet = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "VITRINE"))}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    run = subprocess.run(command, cwd=ROOT, env={**quiet, **environ}, capture_output=True, text=True, check=True)
    return {line for line in run.stdout.splitlines() if "::" in line}


def test_of_the_whole_suite_they_wait():
    """The whole suite here is its top level: the folders take a minute to collect."""
    folders = [f"--ignore={p.relative_to(ROOT)}" for p in (ROOT / "tests").iterdir() if p.is_dir()]
    quick, whole = (collected(*folders, **environ) for environ in ({}, {"VITRINE_SLOW": "1"}))
    assert whole - quick == whole.intersection(SLOW) and len(whole - quick) >= 3


def test_a_named_file_is_run_whole():
    (path,) = {line.split("::")[0] for line in SLOW if "test_speed_table" in line}
    assert collected(path) & set(SLOW)


def test_ci_runs_them():
    assert "VITRINE_SLOW=1" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert 'VITRINE_SLOW: "1"' in (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
