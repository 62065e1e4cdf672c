"""Workers on CPU cores: each does its share, what one raises comes back, the environment stays as it was."""

import math
import os

import pytest
from vitrine.engine.processes import ONE_CORE, cores, side_by_side


def test_each_worker_is_told_its_number_of_how_many():
    before = dict(os.environ)
    assert side_by_side(divmod, 2) == [(0, 0), (0, 1)]
    assert dict(os.environ) == before


def test_what_a_worker_raises_is_raised_here(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with pytest.raises(ValueError, match="math domain error"):
        side_by_side(math.log, 2)  # log(0) to base 2
    assert os.environ["OMP_NUM_THREADS"] == "7" and not set(ONE_CORE) - {"OMP_NUM_THREADS"} & set(os.environ)


def test_cores_are_shared_out_once(monkeypatch):
    assert cores() >= 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cores() == 1
