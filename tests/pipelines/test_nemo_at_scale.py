"""Long lists of prompts: one text is one prompt, nothing is held for all of them, and a killed run resumes."""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import ProbeConfig
from vitrine.engine.pipelines import NEMOPipeline
from vitrine.engine.portraits import load_portraits

ROOT = Path(__file__).parents[2]
SMALL = ProbeConfig(seeds=2)
CAPTIONS = [
    f"a smiling face with {hair} hair on {color}" for hair in ("red", "blond", "black") for color in ("pink", "blue")
]


@pytest.fixture(scope="module")
def pipe():
    pipe = NEMOPipeline.from_pipe(load_portraits().pipeline())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_a_text_is_one_prompt_not_its_letters(pipe):
    statistics = pipe.statistics(CAPTIONS)
    assert len(pipe.score("a hat", 0.9, SMALL)) == 1
    assert len(pipe.conditions("a hat")) == 1
    (result,) = pipe.find("a hat", statistics, probe=SMALL)
    assert result.prompt == "a hat"
    with pytest.raises(VitrineError, match="captions: given 1"):
        pipe.statistics("a hat")


def live_bytes():
    # Compiling leaves tensors without storage behind.
    tensors = (t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter))
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(kept.values())


@pytest.mark.parametrize("task", ["statistics", "score"])
def test_ten_times_the_prompts_need_no_more_memory(pipe, task):
    """Live tensors are counted while the job runs."""
    peaks = []

    def look(step, total, preview=None):
        if step % 64 == 0:
            peaks[-1] = max(peaks[-1], live_bytes())

    few, many = (64, 640) if task == "statistics" else (64, 256)
    for count in (few, many):
        peaks.append(0)
        prompts = [f"a face number {i}" for i in range(count)]
        if task == "statistics":
            pipe.statistics(prompts, progress=look)
        else:
            pipe.score(prompts, 0.9, SMALL, look)
    states = (many - few) * 77 * pipe.text_encoder.config.hidden_size * 4  # what held text states would add
    assert peaks[1] - peaks[0] <= states / 10, peaks


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import conftest
from vitrine.engine.pipelines import NEMOPipeline
from vitrine.engine.portraits import load_portraits

def die(step, total, preview=None):
    if step >= 128:
        os.kill(os.getpid(), signal.SIGKILL)

pipe = NEMOPipeline.from_pipe(load_portraits().pipeline())
pipe.statistics([f"a face number {{i}}" for i in range(200)], progress=die, state={state!r})
"""


def test_statistics_resume_after_a_kill(pipe, tmp_path):
    state, seen = tmp_path / "sums.safetensors", []
    script = KILLED.format(tests=str(ROOT / "tests"), state=str(state))
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ})
    assert run.returncode == -signal.SIGKILL, run.stderr[-800:]
    prompts = [f"a face number {i}" for i in range(200)]
    resumed = pipe.statistics(prompts, progress=lambda step, total, preview=None: seen.append(step), state=state)
    whole = pipe.statistics(prompts)
    assert seen == [192, 200]
    assert all(
        torch.equal(resumed.means[a], whole.means[a]) and torch.equal(resumed.stds[a], whole.stds[a])
        for a in whole.means
    )
    with pytest.raises(VitrineError, match="state: given"):
        pipe.statistics(prompts[:-1], state=state)
