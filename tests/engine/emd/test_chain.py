"""EMD's identities: the book-keeping, the signs, the gradients; and two students where everything is known."""

import math
from dataclasses import replace

import pytest
import torch
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.diffusion.noise import RowNoise
from vitrine.engine.diffusion.schedule import NoiseSchedule
from vitrine.engine.emd.calibration import calibrate_gz
from vitrine.engine.emd.chain import (
    ChainEnd,
    EStepConfig,
    Joint,
    NoiseLevels,
    ScoreDifference,
    clipped,
    e_step,
    normal_from,
    row_rms,
)
from vitrine.engine.emd.losses import m_step_loss, sample_times, score_difference, score_loss
from vitrine.engine.errors import VitrineError
from vitrine.engine.network.condition import Condition
from vitrine.evidence.emd.mixture import train_mixture
from vitrine.evidence.emd.toys import LinearGaussian

pytestmark = pytest.mark.rounding
VP, FLOW = NoiseSchedule.scaled_linear(), NoiseSchedule.flow()
ONE = torch.ones((), dtype=torch.float64)
LEVELS = NoiseLevels(0.8 * ONE, 0.6 * ONE)


def mlp(seed, size=16):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(size, 32), torch.nn.Tanh(), torch.nn.Linear(32, size)).double()


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draws(seed=0):
    return normal_from(torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("steps", [1, 8, 64, 300])
def test_equal_scores_give_no_direction(steps):
    rho = Joint(mlp(0), lambda x: ScoreDifference(0 * x), LEVELS)
    end = e_step(rho, normal(1, 4, 16), normal(2, 4, 16), EStepConfig(steps, gz=0.01), draws())
    assert end.r.abs().max() < 1e-6


@pytest.mark.parametrize("gz", [0.0, 0.01])
def test_direction_is_the_weighted_sum_of_gaps(gz):
    net, teacher, student, seen, k, ge = mlp(0), mlp(1), mlp(2), [], 8, 0.16

    def difference(x):
        seen.append(student(x) - teacher(x))
        return ScoreDifference(seen[-1])

    end = e_step(Joint(net, difference, LEVELS), normal(1, 4, 16), normal(2, 4, 16), EStepConfig(k, ge, gz), draws())
    wanted = sum(ge * (1 - ge) ** (k - 1 - i) * d for i, d in enumerate(seen))
    assert len(seen) == k
    assert (end.r - wanted).norm() / wanted.norm() < 1e-12
    assert all(p.grad is None for p in net.parameters()), "no weight receives a gradient in the E-step"
    assert not end.z.requires_grad and not end.r.requires_grad


def denoisers(net, form):
    """One eps network seen through each prediction convention."""
    schedule = FLOW if form == "flow" else VP

    def call(x, t, cond):
        signal, noise = (s.view(-1, 1) for s in schedule.scales(t))
        eps = net(x)
        x0 = (x - noise * eps) / signal
        return {"eps": eps, "x0": x0, "v": signal * eps - noise * x0, "flow": eps - x0}[form]

    return Denoiser(torch.nn.Identity(), schedule, form, call)


@pytest.mark.parametrize("form", ["eps", "v", "x0", "flow"])
def test_gap_is_the_same_in_every_convention(form):
    x, t = normal(3, 6, 16), torch.tensor([20.0, 150, 399, 625, 800, 980])
    found = score_difference(denoisers(mlp(1), form), denoisers(mlp(2), form), t, Condition())(x).delta
    wanted = mlp(2)(x) - mlp(1)(x)
    assert (found - wanted).norm() / wanted.norm() < 1e-4


def test_gap_points_outwards_where_the_student_is_narrower():
    x = normal(0, 100, 16)
    difference = score_difference(
        Denoiser(torch.nn.Identity(), VP, "eps", lambda x, t, c: 0.5 * x),
        Denoiser(torch.nn.Identity(), VP, "eps", lambda x, t, c: 0.9 * x),
        torch.full((100,), 500.0),
        Condition(),
    )
    assert bool(((difference(x).delta * x).sum(1) > 0).all())


@pytest.mark.parametrize("form", ["eps", "v", "x0"])
def test_one_step_of_emd_is_diff_instruct(form):
    net, t, z, eps = mlp(0), torch.tensor([100.0, 400, 700, 900]), normal(1, 4, 16), normal(2, 4, 16)
    teacher, student = denoisers(mlp(1), form), denoisers(mlp(2), form)
    alpha, sigma = levels = NoiseLevels.at(VP, t, z)
    rho = Joint(net, score_difference(teacher, student, t, Condition()), levels)
    end = e_step(rho, z, eps, EStepConfig.diff_instruct(), draws())
    ours = torch.autograd.grad(m_step_loss(net(end.z), end, levels), list(net.parameters()))
    y = net(z)
    x = (alpha * y + sigma * eps).detach()
    with torch.no_grad():  # DMD's surrogate: 1/2 |y - sg[y - (D_phi - D_q)]|^2
        push = student.predict(x, t, Condition()).x0 - teacher.predict(x, t, Condition()).x0
    theirs = torch.autograd.grad(0.5 * (y - (y - push).detach()).square().sum(1).mean(), list(net.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() / b.norm() < 1e-5


def test_only_the_teacher_is_guided():
    sizes = {"teacher": [], "student": []}

    def spy(name):
        def call(x, t, c):
            sizes[name].append(len(x))
            return c.text.mean((1, 2))[:, None] * x

        return Denoiser(torch.nn.Identity(), VP, "eps", call)

    cond, null = Condition(torch.full((3, 2, 2), 2.0)), Condition(torch.ones(1, 2, 2))
    x, t = torch.ones(3, 4), torch.full((3,), 500.0)
    delta = score_difference(spy("teacher"), spy("student"), t, cond, null, 3.0)(x).delta
    assert sizes == {"teacher": [6], "student": [3]}
    torch.testing.assert_close(delta, torch.full((3, 4), 2.0 - (1 + 3 * (2 - 1))))
    with pytest.raises(VitrineError, match="empty prompt"):
        score_difference(spy("teacher"), spy("student"), t, cond, None, 3.0)


def test_score_loss_sees_uncorrected_samples_and_no_generator_gradient():
    y, seen = normal(0, 4, 16).requires_grad_(True), []
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)

    def call(x, t, c):
        seen.append(x)
        return scale * x

    noise, t = normal(1, 4, 16), torch.full((4,), 300.0)
    score_loss(Denoiser(torch.nn.Identity(), VP, "eps", call), y, noise, t, Condition()).backward()
    torch.testing.assert_close(seen[0], NoiseLevels.at(VP, t, noise).noisy(y.detach(), noise))
    assert y.grad is None and scale.grad is not None


@pytest.mark.parametrize("form", ["eps", "v", "x0", "flow"])
def test_score_loss_is_the_teachers_own(form):
    """In eps, the error of a v network counted alpha^2 times: 0.005 at t = 999."""
    schedule = FLOW if form == "flow" else VP
    y, noise, error = normal(0, 4, 16), normal(1, 4, 16), normal(2, 4, 16)
    t = torch.tensor([20.0, 300, 700, 999])
    alpha, sigma = NoiseLevels.at(schedule, t, noise)
    right = {"eps": noise, "v": alpha * noise - sigma * y, "x0": y, "flow": noise - y}[form]
    for k in range(4):
        row, out = slice(k, k + 1), (right + error)[k : k + 1]
        score = Denoiser(torch.nn.Identity(), schedule, form, lambda x, t, c, out=out: out)
        found = score_loss(score, y[row], noise[row], t[row], Condition())
        torch.testing.assert_close(found, error[k].square().mean())
    exact = score.with_call(lambda x, t, c: right)
    exact = exact.predict(NoiseLevels.at(schedule, t, noise).noisy(y, noise), t, Condition()).eps
    torch.testing.assert_close(exact, noise, rtol=1e-6, atol=1e-6)


def test_calibration_answers_to_the_drift():
    """It always gave its largest value: drifts of real runs have an RMS of 0.2 to 8."""
    case, z, eps = LinearGaussian.example(), normal(1, 512, 2), normal(2, 512, 2)

    def step(away):
        rho = replace(case, mean=case.mean * away).rho()
        return calibrate_gz(lambda gz, clip: e_step(rho, z, eps, EStepConfig(4, 0.16, gz), draws()).moved, 0.16).gz

    assert step(40.0) < 0.6 * step(20.0) < 0.024


def test_dmd_weight_normalises_each_row():
    y, r, x0 = normal(0, 3, 4), normal(1, 3, 4), normal(2, 3, 4)
    end = ChainEnd(r, y, r, r, x0)
    rows = 0.5 * r.square().sum(1) / (y - x0).abs().mean(1)
    torch.testing.assert_close(m_step_loss(y, end, NoiseLevels(ONE, ONE), "dmd"), rows.mean())
    with pytest.raises(VitrineError, match="weight"):
        m_step_loss(y, end, NoiseLevels(ONE, ONE), "other")


def test_settings_and_small_parts():
    config = EStepConfig(8, 0.1, 0.01, "last", 2.0)
    assert EStepConfig.from_dict(config.to_dict()) == config
    assert EStepConfig.from_dict(EStepConfig().to_dict()) == EStepConfig()
    for bad in ({"steps": 0}, {"ge": 0.0}, {"gz": -1.0}, {"estimator": "x"}, {"clip": 0.0}):
        with pytest.raises(VitrineError):
            EStepConfig(**bad)
    short = clipped(torch.tensor([[3.0, 3.0], [0.1, 0.1]]), 1.0)
    torch.testing.assert_close(short, torch.tensor([[1.0, 1.0], [0.1, 0.1]]))
    t = sample_times(VP, 1000, torch.Generator().manual_seed(0))
    assert t.min() >= 19 and t.max() <= 980
    two = RowNoise([5, 6]).like(torch.zeros(2, 3))
    torch.testing.assert_close(two[1:], RowNoise([6]).like(torch.zeros(1, 3)))
    assert row_rms(torch.full((2, 3, 4), 2.0)).tolist() == [2.0, 2.0]


def moments(x, z):
    return {
        "x": x.mean(0),
        "z": z.mean(0),
        "xx": torch.cov(x.T),
        "zz": torch.cov(z.T),
        "xz": (x - x.mean(0)).T @ (z - z.mean(0)) / len(x),
    }


@pytest.fixture(scope="module")
def long_chain():
    case = LinearGaussian.example()
    config = EStepConfig(300, 0.02, 0.02)
    z, eps = normal(1, 40_000, 2), normal(2, 40_000, 2)
    return case, e_step(case.rho(), z, eps, config, draws(3))


@pytest.mark.nightly
def test_chain_reaches_the_joint(long_chain):
    case, end = long_chain
    found = moments(case.alpha * case.net(end.z) + case.sigma * end.eps, end.z)
    for name, wanted in case.joint().items():
        assert (found[name] - wanted).abs().max() < 0.03, name


@pytest.mark.nightly
def test_raw_direction_is_the_likelihood_gradient(long_chain):
    case, end = long_chain
    wanted = case.likelihood_gradient()
    last = case.difference(case.alpha * case.net(end.z) + case.sigma * end.eps).delta
    for name, r in (("raw", end.eps), ("last", last)):
        found = case.alpha / case.sigma * r.T @ end.z / len(r)
        assert (found - wanted).norm() / wanted.norm() < 0.05, name


def test_cancelling_the_noise_cuts_the_variance():
    case = LinearGaussian.example()
    z, eps = normal(1, 20_000, 2), normal(2, 20_000, 2)
    end = e_step(case.rho(), z, eps, EStepConfig(4, 0.16, 0.01), draws(3))
    raw, cancelled = (float((r[:, :, None] * end.z[:, None]).flatten(1).var(0).sum()) for r in (end.eps, end.r))
    assert raw > 2 * cancelled


@pytest.mark.nightly
def test_a_small_student_covers_both_modes_only_with_emd():
    seeking = train_mixture(EStepConfig.diff_instruct(), 0)
    covering = train_mixture(EStepConfig(4, 0.16, 0.01), 0)
    assert seeking.minor_mass < 0.005 and seeking.forward_kl > 3
    assert covering.minor_mass > 0.1 and covering.forward_kl < 0.75
    assert math.isfinite(covering.forward_kl)
