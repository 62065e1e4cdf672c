"""Jobs larger than memory: each is given a budget, and the process's real peak stays within 1.25 times as much.

Sizes are such that holding everything would break the bound several times over; each test says what that would take.
With VITRINE_LARGE=1 there are 50,000 prompts, 10,000 scores and 65,000 LoRAs, an hour on one core; ``-s`` shows the
peaks. Taps of large pictures and the ranking are in test_activations_memory.py.
"""

import os

import pytest
import torch
from safetensors.torch import save_file
from vitrine.engine.copies import CheckConfig
from vitrine.engine.errors import VitrineError
from vitrine.engine.io.lora_writing import kohya
from vitrine.engine.io.table_on_disk import RowFile
from vitrine.engine.jobs.stored_text import StoredText
from vitrine.engine.nemo import ProbeConfig
from vitrine.engine.pipelines import NEMOPipeline, copy_check
from vitrine.engine.pipelines.emd_training import TEXTS, training_parts
from vitrine.engine.portraits import load_portraits
from vitrine.engine.w2w import BuildConfig, build_space
from vitrine.engine.w2w.space import build_state
from vitrine_tests.engine.small_loras import lora
from vitrine_tests.killed import killed, killing
from vitrine_tests.peak import MiB, bounded, held, needs_peak

SMALL = ProbeConfig(seeds=2)
FULL = bool(os.environ.get("VITRINE_LARGE"))


@pytest.fixture(scope="module")
def pipe():
    pipe = NEMOPipeline.from_pipe(load_portraits().pipeline())
    pipe.set_progress_bar_config(disable=True)
    pipe.calibrate(["a face", "a hat"], ["statistics"], memory="1GB")
    scored(pipe, ["a face"], memory="1GB")
    return pipe


def scored(pipe, texts, **how):
    return pipe.detect(texts, None, "one step", SMALL, **how)


def prompts(count):
    return [f"a face number {i}" for i in range(count)]


# --- NEMO ---------------------------------------------------------------------------------------------------------
@needs_peak
def test_statistics_of_many_prompts(pipe):
    """Their text states, 6 KiB each, would take 18 MiB, and twice that where they are joined."""
    texts, budget, seen = prompts(50_000 if FULL else 3000), (32 if FULL else 6) * MiB, []
    assert len(texts) * 24 * 64 * 4 > 2.5 * budget
    told = {"memory": budget, "progress": lambda n, total, _=None: seen.append((n, total))}
    bounded(f"statistics of {len(texts)} prompts", held(lambda: pipe.calibrate(texts, ["statistics"], **told)), budget)
    assert seen[-1] == (1000, 1000) and all(total == 1000 for _, total in seen)


@needs_peak
def test_scores_of_many_prompts(pipe):
    """80 rows of the UNet at once, as without a budget, take 85 MiB; this is measured too."""
    texts, budget = prompts(10_000 if FULL else 72), 16 * MiB
    found = []
    peak = held(lambda: found.append(scored(pipe, texts, memory=budget)))
    bounded(f"scores of {len(texts)} prompts", peak, budget)
    free = held(lambda: found.append(scored(pipe, texts[:72])))
    assert free > 4 * budget, f"{free / MiB:.1f} MiB"
    values = [torch.tensor([s.value for s in scores[:72]]) for scores in found]
    assert torch.allclose(*values, atol=1e-4), "the budget changes rounding alone"


def test_scores_and_statistics_go_on_after_kill_9(pipe, tmp_path):
    texts, state, sums = prompts(192), tmp_path / "scores.safetensors", tmp_path / "sums"
    few, at_the_second, at_the_end = texts[:80], killing(lambda step, total: 3 * step > total), killing(int.__eq__)
    killed(lambda: pipe.calibrate(texts, ["statistics"], progress=at_the_second, state=sums))
    killed(lambda: scored(pipe, few, progress=at_the_end, state=state))
    seen = []
    told = {"state": sums, "progress": lambda step, total, _=None: seen.append(step)}
    resumed = pipe.calibrate(texts, ["statistics"], **told).statistics
    whole = pipe.calibrate(texts, ["statistics"]).statistics
    assert seen == [1000]
    for a in whole.means:
        assert torch.equal(resumed.means[a], whole.means[a]) and torch.equal(resumed.stds[a], whole.stds[a])
    seen.clear()
    scores = scored(pipe, few, progress=lambda step, total, _=None: seen.append((step, total)), state=state)
    assert seen == [(80, 80)] and len(scores) == 80
    alone = scored(pipe, few[:64]) + scored(pipe, few[64:])
    assert all(torch.equal(a.per_seed, b.per_seed) for a, b in zip(scores, alone, strict=True))
    gathering = lambda: pipe.calibrate(texts[:-1], ["statistics"], state=sums)  # noqa: E731
    for job in (gathering, lambda: scored(pipe, texts, state=state)):
        with pytest.raises(VitrineError, match="run: given .*begun with"):
            job()


@needs_peak
def test_copy_check_of_many_samples(pipe, tmp_path):
    """All 64 samples of a prompt at once, as without a budget, take more; this is measured too."""
    config, budget = CheckConfig(seeds=64, usual=2, ordinary=("a hat", "glasses")), 24 * MiB

    def check(folder, memory):
        how = {"config": config, "probe": SMALL, "num_inference_steps": 1}
        return copy_check(pipe, ["a face"], tmp_path / folder, memory=memory, **how)

    check("warm", budget)
    bounded("a copy check of 64 samples", held(lambda: check("bounded", budget)), budget)
    assert held(lambda: check("wide", "4GB")) > 1.25 * budget


# --- EMD ----------------------------------------------------------------------------------------------------------
@needs_peak
def test_prompts_of_a_distillation(tmp_path):
    """Text states of 5000 prompts are 29 MiB, and twice that where they are joined; a run draws from the file."""
    texts, budget, parts = prompts(50_000 if FULL else 5000), (32 if FULL else 16) * MiB, []
    few = training_parts(prompts=texts[:100]).conditions
    model = held(lambda: training_parts(prompts=texts[:1]))
    peak = held(lambda: parts.append(training_parts(prompts=texts, folder=tmp_path, memory=budget))) - model
    stored = parts[0].conditions
    assert isinstance(stored, StoredText) and stored.count == len(texts)
    bounded(f"text states of {len(texts)} prompts", peak, budget)
    rows = torch.tensor([99, 3, 3, 64])
    assert torch.equal(stored.take(rows).text, few.take(rows).text), "from disk or from memory: the same bits"
    with pytest.raises(VitrineError, match="a folder for them"):
        training_parts(prompts=texts, memory=budget)


def test_encoding_goes_on_after_kill_9(tmp_path):
    texts, seen = prompts(200), []
    killed(lambda: training_parts(prompts=texts, folder=tmp_path, memory=MiB, progress=killing(lambda n, _: n == 2)))
    again = training_parts(prompts=texts, folder=tmp_path, memory=MiB)
    whole = training_parts(prompts=texts)
    every = torch.arange(200)
    assert torch.equal(again.conditions.take(every).text, whole.conditions.take(every).text)
    with pytest.raises(VitrineError, match="begun with other prompts"):
        training_parts(prompts=texts[:-1], folder=tmp_path, memory=MiB)
    assert (tmp_path / TEXTS / "rows.bin").stat().st_size == 200 * 24 * 64 * 4 and not seen


# --- W2W ----------------------------------------------------------------------------------------------------------
def folder_of(path, count, shapes):
    path.mkdir()
    for i in range(count):
        save_file(kohya(lora(i, shapes=shapes, start=7)), path / f"{i:05}.safetensors")
    return path


@needs_peak
def test_thousands_of_loras(tmp_path):
    """1600 of 12,000 numbers are 73 MiB; their Gram matrix, its eigenvectors and what makes them would be 98 more."""
    shapes = {"down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q": (6000, 6000)}
    count, budget, built = (65_000, 160 * MiB, []) if FULL else (1600, 16 * MiB, [])
    folder = folder_of(tmp_path / "loras", count, shapes)
    config = BuildConfig("factors", 8, budget)
    few = BuildConfig("factors", 8, MiB, "randomised")
    build_space(sorted(folder.glob("000*")), few, work=tmp_path / "warm")
    peak = held(lambda: built.append(build_space(folder, config, work=tmp_path / "work")))
    space = built[0].space
    assert (tmp_path / "work" / "rows.bin").stat().st_size == count * 12_000 * 4 > 4 * budget
    assert space.count == count and space.dimension == 8
    bounded(f"a space of {count} LoRAs", peak, budget)
    with pytest.raises(VitrineError, match="fewer components"):
        build_space(folder, BuildConfig("factors", memory=budget), work=tmp_path / "another")


@pytest.mark.parametrize("route", ["gram", "randomised"])
def test_a_build_goes_on_after_kill_9(tmp_path, monkeypatch, route):
    monkeypatch.setattr(build_state, "SAVE_SECONDS", 0.0)
    shapes = {"down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q": (3000, 3000)}
    folder = folder_of(tmp_path / "loras", 60, shapes)
    config = BuildConfig("factors", 4, MiB, route)
    shards = -(-6000 // (MiB // 2 // (28 * 60)))
    turns = shards * (5 if route == "randomised" else 1)

    def build(work, progress):
        return build_space(folder, config, progress, tmp_path / work).space

    scanned = []  # the first pass over all files reads headers, the second one tensors

    def in_the_second(step, total):
        scanned.append(total == 60 and step == 45)
        return sum(scanned) == 2

    killed(lambda: build("work", killing(in_the_second)))
    with RowFile(tmp_path / "work", (60, 6000)) as table:
        assert 0 < int(table.done.sum()) < 60
    killed(lambda: build("work", killing(lambda step, total: total == turns and step == turns - 3)))
    seen = []
    resumed = build("work", lambda step, total, _=None: seen.append((step, total)))
    whole = build("other", lambda step, total, _=None: None)
    assert torch.equal(resumed.components, whole.components) and torch.equal(resumed.coefficients, whole.coefficients)
    assert (tmp_path / "work" / "sums.safetensors").is_file() and (turns, turns) in seen
