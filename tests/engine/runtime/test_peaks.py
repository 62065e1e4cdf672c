"""The large jobs' peaks of memory, each measured in a process that has done nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from vitrine_tests.peak import ALONE, RESET

JOBS = {
    "jobs/test_large_jobs.py": [
        "test_statistics_of_many_prompts",
        "test_scores_of_many_prompts",
        "test_copy_check_of_many_samples",
        "test_prompts_of_a_distillation",
        "test_thousands_of_loras",
    ],
    "activations/test_memory.py": [
        "test_all_places_of_sdxl_at_1024_within_a_budget",
        "test_ranking_of_many_pictures_within_a_budget",
    ],
    "nemo/test_verify_memory.py": ["test_scores_and_samples_of_a_verification"],
}


@pytest.mark.nightly
@pytest.mark.skipif(not RESET.exists(), reason="the system does not tell a process's peak")
@pytest.mark.parametrize(("file", "job"), [(file, job) for file, jobs in JOBS.items() for job in jobs])
def test_peak(file, job):
    test = f"{Path(__file__).parents[1] / file}::{job}"
    environment = os.environ | {ALONE: "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-m", "nightly", test]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(run.stdout)  # noqa: T201
    assert run.returncode == 0 and "1 passed" in run.stdout, run.stdout[-4000:] + run.stderr[-1000:]
