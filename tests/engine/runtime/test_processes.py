"""Workers on CPU cores: each does its share, what one raises comes back, the environment stays as it was."""

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
from vitrine.engine.runtime.processes import ONE_CORE, cores, side_by_side
from vitrine_tests.hangs import HANGS


def test_each_worker_is_told_its_number_of_how_many():
    before = dict(os.environ)
    assert side_by_side(divmod, 2) == [(0, 0), (0, 1)]
    assert dict(os.environ) == before


JOB = """
import time
from pathlib import Path


def fail_or_go_on(worker, workers):
    if worker == 0:
        raise RuntimeError("the first has failed")
    time.sleep(HANGS)
    Path(__file__).with_name("ended by itself").touch()
"""


def test_what_a_worker_raises_is_raised_here_and_nobody_waits_for_the_others(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    (tmp_path / "some_jobs.py").write_text(JOB.replace("HANGS", str(HANGS)))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="the first has failed"):
        side_by_side(importlib.import_module("some_jobs").fail_or_go_on, 2)
    assert not multiprocessing.active_children() and not (tmp_path / "ended by itself").exists()
    assert os.environ["OMP_NUM_THREADS"] == "7" and not set(ONE_CORE) - {"OMP_NUM_THREADS"} & set(os.environ)


def test_cores_are_shared_out_once(monkeypatch):
    assert cores() >= 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cores() == 1


WAITING = """
import signal, sys, time
from pathlib import Path
from vitrine.cli import commands
from vitrine.cli.main import main
from vitrine.engine.runtime.processes import {each}


def wait(worker, workers=0):
    Path(f"{{worker}} was born").touch()
    time.sleep({seconds})


def run(self):
    Path("begun").touch()
    {call}


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is born ignoring it
    commands.Demo.run = run
    sys.exit(main(["demo"]))
"""


@pytest.mark.parametrize(
    ("call", "seen"),
    [
        ("side_by_side(wait, 2)", "1 was born"),
        pytest.param("side_by_side(wait, 2)", "begun", marks=pytest.mark.nightly),
        pytest.param("list(each_in_turn(wait, [0, 1, 2], 2))", "1 was born", marks=pytest.mark.nightly),
        pytest.param("list(each_in_turn(wait, [0, 1, 2], 2))", "begun", marks=pytest.mark.nightly),
    ],
)
def test_ctrl_c_ends_all_of_them_in_one_line(call, seen, tmp_path):
    """A terminal sends it to every process; each of them printed a traceback."""
    script = WAITING.format(each=call.removeprefix("list(").partition("(")[0], seconds=HANGS, call=call)
    running = _running(script, tmp_path, seen)
    os.killpg(running.pid, signal.SIGINT)
    assert running.communicate(timeout=HANGS)[1] == "demo: loading\nvitrine: interrupted\n"
    assert running.returncode == 130
    _all_end(running)


@pytest.mark.parametrize("how", [pytest.param(signal.SIGTERM, marks=pytest.mark.nightly), signal.SIGKILL])
def test_workers_end_with_a_process_that_is_killed(how, tmp_path):
    """They went on with the queue, unseen, beside whatever ran next."""
    call = "list(each_in_turn(wait, [0, 1, 2, 3], 2))"
    running = _running(WAITING.format(each="each_in_turn", seconds=HANGS, call=call), tmp_path, "1 was born")
    running.send_signal(how)
    assert running.wait(HANGS) == -how
    _all_end(running)
    assert not (tmp_path / "2 was born").exists()


def _running(script, folder, seen):
    """The script in a process group of its own, once the file ``seen`` is there."""
    (folder / "waiting.py").write_text(script)
    command = [sys.executable, str(folder / "waiting.py")]
    running = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not (folder / seen).exists() and running.poll() is None:
        time.sleep(0.01)
    return running


def _all_end(running):
    """Waits for every process of its group; multiprocessing's own, which watches the others, ends last."""
    end = time.monotonic() + HANGS
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < end:
            os.killpg(running.pid, 0)
            time.sleep(0.01)
