"""What a run writes while it trains changes nothing of it; gradients of several batches are their mean."""

import pytest
import torch
from safetensors.torch import load_file
from vitrine.engine.emd import EStepConfig, read_student
from vitrine.engine.emd.logs import TrainLog, read_log
from vitrine.engine.emd.networks import GENERATOR, SCORE
from vitrine.engine.errors import VitrineError
from vitrine_tests.emd_runs import trainer

MOVES = {"chain": EStepConfig(2, 0.16, 0.01), "auto_gz": False}


def states(folder, *names):
    return [load_file(folder / name / "state.safetensors") for name in names]


@pytest.mark.nightly
def test_the_log_has_a_row_every_few_steps_and_changes_nothing(tmp_path):
    trainer(tmp_path / "silent", steps=5, log_every=0, **MOVES).run()
    trainer(tmp_path / "logged", steps=5, log_every=2, **MOVES).run()
    silent, logged = states(tmp_path, "silent", "logged")
    assert all(torch.equal(silent[k], logged[k]) for k in silent)
    rows = read_log(tmp_path / "logged")
    assert [row["step"] for row in rows] == ["2", "4"] and not read_log(tmp_path / "silent")
    for name in ("loss generator", "loss score", "gap", "drift", "moved", "gradient generator", "gradient score"):
        assert all(float(row[name]) > 0 for row in rows), name
    assert all(float(r["rate score"]) == 5e-4 and float(r["gz"]) == 0.01 and r["skipped"] == "0" for r in rows)


@pytest.mark.nightly
def test_a_resumed_log_is_that_of_an_unbroken_run(tmp_path):
    trainer(tmp_path / "whole", steps=4, log_every=1, **MOVES).run()
    first = trainer(tmp_path / "parts", steps=4, log_every=1, save_every=2, **MOVES)
    for _ in range(3):  # the third step is logged, and lost with the process
        first.step()
        if first.done == 2:
            first.save()
    assert len(read_log(tmp_path / "parts")) == 3
    trainer(tmp_path / "parts", steps=4, log_every=1, save_every=2, **MOVES).run()
    assert read_log(tmp_path / "parts") == read_log(tmp_path / "whole")


def test_tensorboard_is_written_where_it_is_installed(tmp_path):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = TrainLog(tmp_path, 1)
    log.read("gap", torch.tensor([1.0, 3.0]))
    log.row(7, {"gz": 0.01})
    log.pictures(7, torch.zeros(2, 3, 4, 4))
    log._writer().flush()
    events = reading.EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("gap")] == [(7, 2.0)]
    assert [(e.step, round(e.value, 4)) for e in events.Scalars("gz")] == [(7, 0.01)]
    assert [e.step for e in events.Images("samples")] == [7]


def test_gradients_of_several_batches_are_their_mean(tmp_path):
    run, found = trainer(tmp_path, accumulate=2, log_every=0, **MOVES), []
    batches = [run._sample_batch(), run._sample_batch()]
    assert not torch.equal(batches[0][1], batches[1][1])
    adam = run.optimizers[SCORE]
    adam.step = lambda: found.append([p.grad.clone() for p in run.roles.parameters(SCORE).values()])
    state = run.random.get_state()
    run._score_update(batches)
    for batch in batches:
        if batch is batches[0]:
            run.random.set_state(state)
        run._update(SCORE, [run._score_loss(*batch[:2])])  # divided by the two batches that an update has
    both, first, second = found
    for whole, a, b in zip(both, first, second, strict=True):
        torch.testing.assert_close(whole, a + b, rtol=1e-5, atol=1e-8)
    del adam.step
    before = [p.detach().clone() for p in run.roles.parameters(GENERATOR).values()]
    run.step()
    assert run.done == 1 and run.skipped == 0
    assert any(not torch.equal(a, b) for a, b in zip(before, run.roles.parameters(GENERATOR).values(), strict=True))
    with pytest.raises(VitrineError, match="accumulate"):
        trainer(tmp_path / "none", accumulate=0)


@pytest.mark.nightly
def test_the_last_exports_are_kept(tmp_path):
    run = trainer(tmp_path, steps=4, save_every=1, keep=2, **MOVES)
    run.run()
    home = tmp_path / "checkpoints"
    assert sorted(p.name for p in home.iterdir()) == ["step_3", "step_4"]
    kept = read_student(home / "step_4" / "generator_kohya.safetensors")[1]
    final = read_student(tmp_path / "generator_kohya.safetensors")[1]
    assert all(torch.equal(kept[k], final[k]) for k in final)
    older = read_student(home / "step_3" / "generator_kohya.safetensors")[1]
    assert any(not torch.equal(older[k], final[k]) for k in final)
