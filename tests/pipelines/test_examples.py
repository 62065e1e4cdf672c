"""docs/examples: each file runs as it is, on one core, and writes pictures with something on them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
# As conftest does, so that they run from a checkout that is not installed as well.
RUN = f"""
import runpy, sys
sys.path.append({str(ROOT / "tests")!r})
import conftest
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.nightly
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_runs_and_draws(example, tmp_path):
    out, one_core = tmp_path / "pictures", os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", RUN, str(example), str(out)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=tmp_path, env=one_core)
    assert done.returncode == 0, done.stderr[-3000:]
    pictures = sorted(out.glob("*.png"))
    assert pictures and f"pictures in {out}" in done.stdout and re.search(r"\d", done.stdout)
    for path in pictures:
        pixels = np.asarray(Image.open(path).convert("RGB")).astype(float)
        cells = np.stack(np.array_split(pixels, 4, axis=1)[:3])  # a blank row of pictures would hide in the whole
        assert min(pixels.std(), *cells.std(axis=(1, 2, 3))) > 10, f"{path.name} is blank"
