"""The step size of z is measured: how far a chain's drifts move it, on fresh draws, once the scores differ."""

import json
import math
import os
import signal

import pytest
import torch
from safetensors.torch import load_file
from vitrine.engine.emd import EStepConfig, calibrate_gz, calibration, e_step
from vitrine.engine.emd.calibration import MOVED, CalibratedRun, CalibrationState, settle
from vitrine.engine.emd.chain import normal_from
from vitrine.engine.emd.train_config import EMDTrainConfig
from vitrine.engine.errors import VitrineError
from vitrine.engine.pipelines.emd_training import training_parts
from vitrine.engine.runtime.progress import Interrupted
from vitrine.evidence.emd.mixture import Schooling, mixture_chain, train_mixture
from vitrine.evidence.emd.toys import LinearGaussian
from vitrine_tests.emd_runs import trainer
from vitrine_tests.killed import killed, killing, one_thread

START = 2 * torch.eye(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)


def on_the_mixture(steps, levels=(0.5,)):
    """Calibration at the student's start, on 512 chains."""

    def moved(gz, clip):
        gen = torch.Generator().manual_seed(5)
        return mixture_chain(START, EStepConfig(steps, 0.16, gz, clip=clip), gen, Schooling(0, 512, levels))[0].moved

    return calibrate_gz(moved, 0.16)


def test_a_longer_chain_takes_smaller_steps():
    """One gz was chosen for every length: the rule looked at single steps."""
    found = {steps: on_the_mixture(steps) for steps in (2, 4, 8)}
    for steps, one in found.items():
        assert one.reached and 0.9 * MOVED < one.moved < 1.1 * MOVED
        assert one.gz < 0.04 and one.gz * one.clip == pytest.approx(0.2)
        again = mixture_chain(
            START,
            EStepConfig(steps, 0.16, one.gz, clip=one.clip),
            torch.Generator().manual_seed(77),
            Schooling(0, 4096),
        )[0].moved
        assert float(again.square().mean().sqrt()) == pytest.approx(MOVED, rel=0.2), "other draws say the same"
    assert found[2].gz > 1.5 * found[4].gz > 2.25 * found[8].gz


@pytest.mark.parametrize("steps", [2, pytest.param(8, marks=pytest.mark.nightly)])
def test_a_calibrated_chain_keeps_the_minor_mode(steps):
    """Forward KL of the best student 0.60, of Diff-Instruct's 4.1."""
    one = on_the_mixture(steps)
    student = train_mixture(EStepConfig(steps, 0.16, one.gz, clip=one.clip), 1, Schooling(400, 256))
    assert student.forward_kl < 0.72 and student.minor_mass > 0.08


def test_a_chain_is_moved_by_its_drifts_alone():
    case, gen = LinearGaussian.example(), torch.Generator().manual_seed(0)
    z, eps = (torch.randn(64, 2, generator=gen, dtype=torch.float64) for _ in range(2))
    config = EStepConfig(3, 0.16, 0.02)

    def ends(rho):
        return e_step(rho, z, eps, config, normal_from(torch.Generator().manual_seed(1)))

    walked, still = (
        ends(case.rho()),
        ends(case.rho()._replace(difference=lambda x: case.rho().difference(x)._replace(delta=0 * x))),
    )
    torch.testing.assert_close(walked.moved, (walked.z - still.z).square().mean(1).sqrt())
    assert float(still.moved.max()) < 1e-15
    frozen = e_step(case.rho(), z, eps, EStepConfig(3, gz=0.0), normal_from(gen))
    assert frozen.moved is None


def test_what_cannot_be_reached_is_said():
    short = calibrate_gz(lambda gz, clip: torch.full((8,), gz), 0.16)
    assert short.gz == 0.04 and not short.reached and short.moved == pytest.approx(0.04)
    assert str(short) == "gz 0.04, the largest allowed: a chain moves z by 0.04, and 0.15 cannot be reached"
    far = calibrate_gz(lambda gz, clip: torch.full((8,), 1e9 * gz), 0.16)
    assert not far.reached and far.gz < 1e-4 and "the smallest" in str(far)
    wild = calibrate_gz(lambda gz, clip: torch.full((8,), 10 * gz if gz < 0.03 else math.nan), 0.16)
    assert wild.reached and wild.gz == pytest.approx(0.015, rel=0.06), "larger ones diverge"
    with pytest.raises(VitrineError, match="wanted"):
        calibrate_gz(lambda gz, clip: torch.ones(2), 0.16, 0.0)


def test_scores_differ_before_anything_is_measured():
    sizes, done = [0.1, 0.4, 0.8, 0.82, 9.0], []
    run = CalibratedRun(lambda: done.append(1), None, None, torch.Generator(), None, None, lambda: None)
    state = CalibrationState(block=3)
    settle(state, run, lambda: torch.full((4,), sizes.pop(0)))
    assert len(done) == 12 and sizes == [9.0] and state.settled and state.blocks == 4


@pytest.mark.nightly
def test_batches_of_one_measurement_are_fresh(tmp_path):
    run, seen = trainer(tmp_path, auto_gz=False), []
    update = run._score_update
    run._score_update = lambda cond, z: seen.append(z) or update(cond, z)
    run._calibrating = CalibrationState()
    run.calibrate()
    assert len(seen) > 4 and not any(torch.equal(a, b) for k, a in enumerate(seen) for b in seen[:k])


@pytest.mark.nightly
def test_the_portraits_say_how_far_they_got(tmp_path):
    """It was the largest allowed, 0.04, for chains of every length, and nothing was said."""
    parts = training_parts("portraits", ["a smiling face", "a pale face with glasses"])
    run = parts.trainer(EMDTrainConfig(2, 2, rank=4, guidance=3.0, chain=EStepConfig(2)), tmp_path)
    found = run.calibrate()
    assert found == run.calibration
    assert (run.chain.gz, run.chain.clip) == (found.gz, found.clip)
    assert 0 < found.moved < 1.1 * MOVED
    assert found.reached or (found.gz == 0.04 and f"by {found.moved:.2g}, and 0.15 cannot be reached" in str(found))


def test_its_state_is_written_and_read():
    state = CalibrationState(3, 5, 2, 1, 0.1 + 0.2, True, {0.04: 1 / 3, 0.01: None})
    assert CalibrationState.from_dict(json.loads(json.dumps(state.to_dict()))) == state
    assert 0 < state.done(2) < state.total(2)


# --- a phase of the run -------------------------------------------------------------------------------------------
def states(*folders):
    return [load_file(folder / "state.safetensors") for folder in folders]


def test_calibration_is_a_phase_with_progress(tmp_path):
    """It was done in the constructor: 166 forwards without a word."""
    run, steps = short(tmp_path), []
    assert run.calibration is None and run.chain == run.config.chain and not list(tmp_path.iterdir())
    run.calibrate(lambda step, total, preview=None: steps.append((step, total)))
    assert len(steps) > 10 and steps == sorted(steps) and steps[-1][0] == steps[-1][1]
    assert len({total for _, total in steps}) == 1
    assert run.chain.gz == run.calibration.gz != run.config.chain.gz
    again = short(tmp_path)
    assert again.calibration == run.calibration and again.chain == run.chain
    again.calibrate(killing(lambda step, total: True))


def short(folder):
    """A run of one step, and so of a short calibration."""
    return trainer(folder, steps=1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run without an interruption, and how many reports its calibration made."""
    folder, steps = tmp_path_factory.mktemp("calibrated") / "run", []
    with one_thread():
        run = short(folder)
        run.calibrate(lambda *step: steps.append(step))
        run.run()
    return folder, len(steps)


@pytest.mark.parametrize(
    "where", [0.6, *(pytest.param(share, marks=pytest.mark.nightly) for share in (0.05, 0.3, 0.9))]
)
def test_killed_during_calibration_it_ends_with_the_same_bytes(tmp_path, whole, where):
    folder, reports = whole
    seen = []
    killed(lambda: short(tmp_path).run(killing(lambda *_: seen.append(1) or len(seen) > where * reports)))
    with one_thread():
        resumed, steps = short(tmp_path), []
        assert resumed.done == 0 and resumed.calibration is None
        resumed.calibrate(lambda *step: steps.append(step))
        resumed.run()
    assert 0 < len(steps) <= reports, "what was measured is not measured again"
    assert where < 0.5 or len(steps) < 0.9 * reports
    ours, theirs = states(tmp_path, folder)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], v) for k, v in theirs.items())


@pytest.mark.nightly
def test_killed_after_the_last_measurement(tmp_path, whole, monkeypatch):
    """Nothing is left to measure, but the random numbers go on as after it."""
    folder, _ = whole

    def die(moved, ge):
        calibrate_gz(moved, ge)
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(calibration, "calibrate_gz", die)
        killed(lambda: short(tmp_path).run())
    with one_thread():
        short(tmp_path).run()
    ours, theirs = states(tmp_path, folder)
    assert all(torch.equal(ours[k], v) for k, v in theirs.items())


@pytest.mark.nightly
def test_interrupted_it_goes_on_in_the_same_process(tmp_path, whole):
    folder, reports = whole
    with one_thread():
        run = short(tmp_path)
        for stop in (3, 0.5 * reports):
            seen = []

            def interrupt(*_, stop=stop, seen=seen):
                seen.append(1)
                if len(seen) > stop:
                    raise Interrupted

            with pytest.raises(Interrupted):
                run.calibrate(interrupt)
        run.run()
    ours, theirs = states(tmp_path, folder)
    assert all(torch.equal(ours[k], v) for k, v in theirs.items())
