"""All trainers under ``torchrun`` with two processes on the CPU: one group, one owner, equal weights in both."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vitrine.engine.jobs.run import state_facts
from vitrine_tests.run_jobs import JOBS

TESTS = Path(__file__).parents[2]
TRAINERS = ("EMD", "control")


def train(name, folder, out, **changed):
    """Two steps of a trainer, then the rest by a new one; its weights and what it knows of its processes."""
    from vitrine_tests import run_jobs

    job = JOBS[name]
    make = {"EMD": run_jobs.emd_trainer, "control": run_jobs.control_trainer}[name]
    for until in (2, None):
        given = {k: v() if callable(v) else v for k, v in (job.inputs | changed).items()}
        trainer = make(folder / name, **given)
        trainer.run(until=until)
    weights = trainer.roles.parameters("generator") if name == "EMD" else trainer.parameters
    index = trainer.accelerator.process_index
    save_file({k: p.detach().contiguous() for k, p in weights.items()}, out / f"{name}-{index}.safetensors")
    facts = {"processes": trainer.accelerator.num_processes, "main": trainer.accelerator.is_main_process}
    (out / f"{name}-{index}.json").write_text(json.dumps(facts))


def train_without_a_gradient(folder, out):
    """A parameter that one process's rows do not use: processes waited for each other for ever."""
    from vitrine_tests import run_jobs

    given = {k: v() if callable(v) else v for k, v in JOBS["control"].inputs.items()}
    trainer = run_jobs.control_trainer(folder / "gap", **given)
    extra = torch.nn.Parameter(torch.ones(3))
    trainer.parameters["base.extra"], trainer.average.values["base.extra"] = extra, extra.detach().clone()
    loss = trainer.loss
    trainer.loss = lambda batch: loss(batch) + (0 if trainer.accelerator.process_index else extra.sum())
    trainer.step()
    (out / f"gap-{trainer.accelerator.process_index}.json").write_text(json.dumps(trainer.done))


def phases(folder, out):
    """The shipped models' phase, as each of their trainings runs it."""
    import time

    from vitrine.engine.runtime.processes import accelerator
    from vitrine.evidence.recipes.phase import Phase, run_of
    from vitrine.evidence.recipes.settings import TrainConfig

    config, group = TrainConfig(out=str(folder / "phase")), accelerator()
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    with run_of("train", config, group):
        phase = Phase("line", config, net, 3, 0.1)

        def loss():
            rows = torch.randn(4, 4, generator=phase.generator(1, torch.device("cpu")))
            return net(rows[group.process_index :: group.num_processes]).square().mean()

        phase.run(group, loss, time.monotonic() + 100, lambda *_: None)
    save_file(dict(net.state_dict()), out / f"phase-{group.process_index}.safetensors")


def everything(folder, out):
    """What each process runs, or one alone."""
    for name in TRAINERS:
        train(name, folder, out)
    phases(folder, out)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        train_without_a_gradient(folder, out)
    from vitrine.engine.diffusion.denoiser import Denoiser
    from vitrine.engine.runtime.processes import launched
    from vitrine.engine.w2w import Subject, train_loras

    job, workers = JOBS["LoRA training"].inputs, launched()
    denoiser = Denoiser.from_diffusers(job["network"]().requires_grad_(False), job["scheduler"]())
    made = [lambda i=i: Subject(f"s{i}", job["latents"][i : i + 1], job["prompt"], i) for i in range(3)]
    part = (workers.index, workers.count)
    train_loras(denoiser, made, ["s0", "s1", "s2"], folder / "loras", job["config"], together=1, part=part)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Folder of one process's results, and of two processes'."""
    root = tmp_path_factory.mktemp("trainers")
    one, two = root / "one", root / "two"
    for folder in (one, two):
        (folder / "out").mkdir(parents=True)
    script = root / "two.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        from pathlib import Path
        sys.path[:0] = [{str(TESTS)!r}, {str(Path(__file__).parent)!r}]
        import conftest
        from test_runs_in_processes import everything
        everything(Path({str(two)!r}), Path({str(two / "out")!r}))
    """)
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    ended = subprocess.run(launch, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, timeout=900)
    assert ended.returncode == 0, ended.stderr.decode()[-9000:]
    everything(one, one / "out")
    return one, two


@pytest.mark.nightly
@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_is_one_run_of_two_processes(both, name):
    _, two = both
    facts = [json.loads((two / "out" / f"{name}-{i}.json").read_text()) for i in (0, 1)]
    assert facts == [{"processes": 2, "main": True}, {"processes": 2, "main": False}]
    first, second = (load_file(two / "out" / f"{name}-{i}.safetensors") for i in (0, 1))
    assert first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)
    assert state_facts(two / name)["done"] == 3


@pytest.mark.nightly
def test_a_gradient_that_one_process_lacks_is_zero_there(both):
    _, two = both
    assert [json.loads((two / "out" / f"gap-{i}.json").read_text()) for i in (0, 1)] == [1, 1]


@pytest.mark.nightly
def test_phases_and_loras_give_what_one_process_gives(both):
    one, two = both
    alone, *shared = [load_file(f / "out" / f"phase-{i}.safetensors") for f, i in ((one, 0), (two, 0), (two, 1))]
    for weights in shared:
        for key, value in weights.items():
            torch.testing.assert_close(value, alone[key], rtol=1e-5, atol=1e-6)
    trained = [sorted(p.name for p in (f / "loras").glob("*.safetensors")) for f in both]
    assert trained[0] == trained[1] == ["s0.safetensors", "s1.safetensors", "s2.safetensors"]
    for name in trained[0]:
        a, b = (load_file(f / "loras" / name) for f in both)
        assert all(torch.allclose(a[k], b[k], atol=1e-6, rtol=0) for k in a)
