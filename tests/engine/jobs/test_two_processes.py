"""Commands under ``torchrun --nnodes 2`` give what they give alone, and work folders have one owner.

Two agents stand for two machines with a shared folder. All commands run in one launch. Two processes of one machine:
test_runs_in_processes, and EMD's training in test_train.
"""

import csv
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from vitrine.cli.main import main
from vitrine.engine.activations.ranking import RankingConfig
from vitrine.engine.errors import VitrineError
from vitrine.engine.io.lora_writing import kohya
from vitrine.engine.jobs.run import LOCK, sole_owner
from vitrine.engine.nemo import Calibration, NeuronSet
from vitrine.engine.pipelines import ActivationTapPipeline
from vitrine.engine.pipelines.emd_training import TEXTS, training_parts
from vitrine.engine.portraits import caption, load_portraits, plants, render, sample_scenes
from vitrine.engine.runtime.processes import launched
from vitrine.engine.settings.ranking_options import FilterRule
from vitrine.engine.w2w import BuildConfig, build_space, load_space, train_loras
from vitrine_tests.engine.small_loras import lora
from vitrine_tests.hangs import HANGS

TESTS = Path(__file__).parents[2]
CONFIG = RankingConfig("up-level0-repeat0-*-q", rule=FilterRule(None, None, (None, None)), most=1)
TEXT = [f"a face number {i}" for i in range(200)]


def commands(inputs, out):
    cal, find = ["--calibration", str(out / "cal.safetensors")], ["--effect-fraction", "0.8", "--mode", "fast"]
    calibrate = ["--out", str(out / "cal.safetensors"), "--timestep-index", "15", "--scored", "8"]
    return [
        ["nemo", "calibrate", str(inputs / "ordinary.txt"), *calibrate],
        ["nemo", "detect", str(inputs / "wanted.txt"), *cal, "--out", str(out / "scores.csv")],
        ["nemo", "find", str(inputs / "wanted.txt"), *cal, *find, "--out", str(out / "neurons")],
        ["w2w", "train-loras", str(inputs / "people"), "--steps", "2", "--out", str(out / "trained")],
        [
            "w2w",
            "build",
            str(inputs / "loras"),
            "--memory-gb",
            "0.001",
            "--dtype",
            "float32",
            "--out",
            str(out / "space.w2w.safetensors"),
        ],
    ]


def run_all(inputs, out):
    """What both sides run, one process or each of two."""
    for command in commands(inputs, out):
        assert main(command) == 0, command
    workers, drawn = launched(), render(sample_scenes(range(7_900_000, 7_900_008)))
    pipe = ActivationTapPipeline.from_pipe(load_portraits().pipeline())
    for memory in (None, "16MiB"):
        state = None if memory is None else out / "ranking"
        told = {"config": CONFIG, "memory": memory, "state": state, "workers": workers}
        found = pipe.rank(drawn.images * 2 - 1, (drawn.parts > 0).long(), **told)
        facts = {"chosen": found.chosen, "singles": found.search.singles}
        (out / f"rank-{memory}-{workers.index}.json").write_text(json.dumps(facts))
    parts = training_parts(prompts=TEXT, folder=out, memory=2**20, workers=workers)
    states = parts.conditions.take(torch.arange(len(TEXT))).text
    save_file({"text": states.contiguous()}, out / f"text-{workers.index}.safetensors")


def machines(script):
    """An agent of ``torchrun`` for each of two machines, with one process each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    launch += ["--master-addr", "127.0.0.1", "--master-port", port, "--node-rank"]
    return [
        subprocess.Popen(
            [*launch, str(rank), str(script)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in (0, 1)
    ]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Folders of results: one process's and two processes'."""
    root = tmp_path_factory.mktemp("processes")
    inputs, one, two = root / "inputs", root / "one", root / "two"
    for folder in (inputs / "loras", one, two, *(inputs / "people" / name for name in "abc")):
        folder.mkdir(parents=True)
    memorized, ordinary = plants()[2].captions[0], caption(sample_scenes(range(24)))
    (inputs / "ordinary.txt").write_text("\n".join(ordinary))
    (inputs / "wanted.txt").write_text("\n".join([memorized, "a hat"]))
    for i, name in enumerate("abc"):
        pixels = torch.randint(0, 256, (64, 64, 3), generator=torch.Generator().manual_seed(i)).byte().numpy()
        Image.fromarray(pixels).save(inputs / "people" / name / "0.png")
    shapes = {"down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q": (3000, 3000)}
    for i in range(30):
        save_file(kohya(lora(i, shapes=shapes, start=7)), inputs / "loras" / f"{i:02}.safetensors")
    (inputs / "loras" / "cut.safetensors").write_bytes(b"nothing")
    script = root / "two.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        from pathlib import Path
        sys.path[:0] = [{str(TESTS)!r}, {str(Path(__file__).parent)!r}]
        import conftest
        from test_two_processes import run_all
        run_all(Path({str(inputs)!r}), Path({str(two)!r}))
    """)
    )
    printed = ""
    for machine in machines(script):
        output, errors = machine.communicate(timeout=HANGS)
        assert machine.returncode == 0, errors[-3000:]
        printed += output
    assert printed.count("3 LoRAs in") == printed.count("space:") == 1, printed
    run_all(inputs, one)
    return one, two


@pytest.mark.nightly
def test_statistics_and_threshold(both):
    alone, shared = (Calibration.load(out / "cal.safetensors") for out in both)
    one, two = alone.statistics, shared.statistics
    assert one.count == two.count == 24 and list(one.means) == list(two.means)
    for a in one.means:
        torch.testing.assert_close(two.means[a], one.means[a], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(two.stds[a], one.stds[a], rtol=1e-4, atol=1e-7)
    assert alone.score.tau == pytest.approx(shared.score.tau, abs=1e-4) and alone.score.count == shared.score.count == 8
    first, second = alone.samples, shared.samples
    assert first.count == second.count == 8 and first.distance == pytest.approx(second.distance, rel=1e-3)
    assert torch.allclose(first.places, second.places, rtol=1e-3)
    assert not any((out / "cal.state").exists() for out in both), "states are gone when all is done"


@pytest.mark.nightly
def test_scores_and_neurons(both):
    tables = [list(csv.DictReader((out / "scores.csv").open(newline=""))) for out in both]
    for a, b in zip(*tables, strict=True):
        assert a["prompt"] == b["prompt"] and a["memorized"] == b["memorized"]
        assert float(a["distance"]) == pytest.approx(float(b["distance"]), abs=1e-4)
    assert tables[0][0]["prompt"] == plants()[2].captions[0] and len(tables[0]) == 2
    found = [
        {NeuronSet.load(p).info["prompt"]: NeuronSet.load(p) for p in (o / "neurons").glob("*.json")} for o in both
    ]
    assert found[0].keys() == found[1].keys() and len(found[0]) == 2
    for prompt, neurons in found[0].items():
        assert neurons.neurons == found[1][prompt].neurons, prompt
    assert len(found[0][tables[0][0]["prompt"]]) > 0


@pytest.mark.nightly
def test_a_lost_machine_ends_the_job_and_a_second_run_goes_on(tmp_path):
    """The other machine does not wait for ever; what was finished is not computed again; the result is the same."""
    prompts, state = tmp_path / "ordinary.txt", tmp_path / "cal.state"
    prompts.write_text("\n".join(caption(sample_scenes(range(24)))))
    command = ["nemo", "calibrate", str(prompts), "--timestep-index", "15", "--scored", "8"]
    script = tmp_path / "calibrate.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, sys
        from pathlib import Path
        sys.path[:0] = [{str(TESTS)!r}]
        import conftest
        from vitrine.cli.main import main
        Path({str(tmp_path)!r}, "process " + os.environ["RANK"]).write_text(str(os.getpid()))
        sys.exit(main({[*command, "--out", str(tmp_path / "cal.safetensors")]!r}))
    """)
    )
    first, second = machines(script)
    while not any(state.rglob("*")) and first.poll() is None:
        time.sleep(0.05)
    os.killpg(second.pid, signal.SIGKILL)
    os.kill(int((tmp_path / "process 1").read_text()), signal.SIGKILL)
    for machine in (first, second):
        machine.communicate(timeout=HANGS)
        assert machine.returncode
    assert not (tmp_path / "cal.safetensors").exists() and any(state.rglob("*"))
    for machine in machines(script):
        _, errors = machine.communicate(timeout=HANGS)
        assert machine.returncode == 0, errors[-3000:]
    assert main([*command, "--out", str(tmp_path / "alone.safetensors")]) == 0
    alone, shared = (Calibration.load(tmp_path / f"{name}.safetensors") for name in ("alone", "cal"))
    assert shared.statistics.count == 24 and shared.score.tau == pytest.approx(alone.score.tau, abs=1e-4)
    for a, mean in alone.statistics.means.items():
        torch.testing.assert_close(shared.statistics.means[a], mean, rtol=1e-5, atol=1e-7)


@pytest.mark.nightly
def test_loras_and_space(both):
    trained = [sorted((out / "trained").glob("*.safetensors")) for out in both]
    assert [p.name for p in trained[0]] == [p.name for p in trained[1]] == [f"{n}.safetensors" for n in "abc"]
    for alone, shared in zip(*trained, strict=True):
        a, b = load_file(alone), load_file(shared)
        assert all(torch.allclose(a[k], b[k], atol=1e-6, rtol=0) for k in a) and a.keys() == b.keys()
    one, two = (load_space(out / "space.w2w.safetensors") for out in both)
    assert one.names == two.names and one.count == 30 and torch.equal(one.mean, two.mean)
    torch.testing.assert_close(two.singular_values, one.singular_values, rtol=1e-6, atol=0)
    assert float((one.components * two.components).sum(1).min()) > 1 - 1e-5
    assert not [p for out in both for p in out.glob("*.work")], "the work folder goes when the space is saved"


@pytest.mark.nightly
def test_rankings_and_text_states(both):
    one, two = both
    for memory in (None, "16MiB"):
        alone = json.loads((one / f"rank-{memory}-0.json").read_text())
        for index in (0, 1):
            shared = json.loads((two / f"rank-{memory}-{index}.json").read_text())
            assert shared["chosen"] == alone["chosen"]
            assert shared["singles"] == pytest.approx(alone["singles"], abs=1e-3)
    files = [one / "text-0.safetensors", two / "text-0.safetensors", two / "text-1.safetensors"]
    states = [load_file(f)["text"] for f in files]
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], states[2]), "bit for bit"
    assert (two / TEXTS / "rows.bin").is_file()


# --- one owner ----------------------------------------------------------------------------------------------------
def hold(folder, said):
    with sole_owner(folder):
        said.send(os.getpid())
        signal.pause()


def test_a_second_builder_is_refused_until_the_first_is_gone(tmp_path):
    """Two real processes; the first is killed with SIGKILL, and its lock with it."""
    fork = multiprocessing.get_context("fork")
    heard, said = fork.Pipe(duplex=False)
    first = fork.Process(target=hold, args=(tmp_path / "work", said))
    first.start()
    try:
        assert heard.poll(60) and heard.recv() == first.pid
        for i in range(3):
            save_file(kohya(lora(i, start=7)), tmp_path / f"{i}.safetensors")
        message = rf"work folder: given work, in use by process {first.pid} on .*wait for that process"
        with pytest.raises(VitrineError, match=message):
            build_space(tmp_path, BuildConfig(), work=tmp_path / "work")
        with pytest.raises(VitrineError, match=message):
            train_loras(None, [], [], tmp_path / "work", None)
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.join()
    assert (tmp_path / "work" / LOCK).is_file(), "the file stays, the lock does not"
    assert build_space(tmp_path, BuildConfig(), work=tmp_path / "work").space.count == 3


def test_a_folder_is_free_again_after_an_error(tmp_path):
    for _ in range(2):
        with pytest.raises(RuntimeError), sole_owner(tmp_path):
            with pytest.raises(VitrineError, match="in use"), sole_owner(tmp_path):
                raise AssertionError("entered twice")
            raise RuntimeError
