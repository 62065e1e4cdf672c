"""The toy worlds of EM Distillation: their chains walk the density they name, their teachers are exact."""

import math

import pytest
import torch
from vitrine.engine.emd.chain import EStepConfig, e_step, normal_from
from vitrine.evidence.emd.mixture import Schooling, best_student, mixture_chain, mixture_distance
from vitrine.evidence.emd.mixture_claims import cancelled_x_step, spread, x_step
from vitrine.evidence.emd.rare import DEVIATION, SHARES, SIZE, Course, Denoiser, RareModes, Run
from vitrine.evidence.emd.toys import LinearGaussian

pytestmark = pytest.mark.rounding


def test_chains_on_x_with_z_frozen_are_chains_on_eps():
    student = (1.5 * torch.eye(2).double(), torch.ones(2).double())
    ends = [
        mixture_chain(student, EStepConfig(8, gz=0.0), torch.Generator().manual_seed(3), Schooling(batch=16, walk=walk))
        for walk in (cancelled_x_step, e_step)
    ]
    torch.testing.assert_close(ends[0][0].r, ends[1][0].r, rtol=1e-9, atol=1e-9)


def test_chains_on_x_walk_the_same_density():
    case, gen = LinearGaussian.example(), torch.Generator().manual_seed(1)
    z, eps = (torch.randn(8000, 2, generator=gen, dtype=torch.float64) for _ in range(2))
    end = x_step(case.rho(), z, eps, EStepConfig(400, 0.05, 0.02), normal_from(gen))
    x = case.alpha * case.net(end.z) + case.sigma * end.r
    joint, centred = case.joint(), (x - x.mean(0), end.z - end.z.mean(0))
    assert (x.mean(0) - joint["x"]).abs().max() < 0.06 and (end.z.mean(0) - joint["z"]).abs().max() < 0.06
    assert (centred[0].T @ centred[0] / len(x) - joint["xx"]).abs().max() < 0.1
    assert (centred[0].T @ centred[1] / len(x) - joint["xz"]).abs().max() < 0.1


def test_the_best_student_is_the_best():
    a, b = best_student()
    least = mixture_distance(a, b)[1]
    for other in ((1.05 * a, b), (0.95 * a, b), (a, b + torch.tensor([0.2, 0.0]))):
        assert mixture_distance(*other)[1] > least
    assert b.tolist() == pytest.approx([1.5, 0]) and float(a[0, 0]) == pytest.approx(math.sqrt(4.25))


def test_several_levels_have_the_scores_of_each():
    """Rows at one level have the gap that they have when all are at it."""
    student = (1.5 * torch.eye(2).double(), torch.ones(2).double())
    config = EStepConfig(1, 1.0, 0.0)
    end, sigma = mixture_chain(
        student, config, torch.Generator().manual_seed(5), Schooling(batch=64, levels=(0.5, 2.0))
    )
    assert sorted(sigma.unique().tolist()) == [0.5, 2.0] and sigma.shape == (64, 1)
    gen = torch.Generator().manual_seed(5)
    z, eps = (torch.randn(64, 2, generator=gen, dtype=torch.float64) for _ in range(2))
    x = z @ student[0].T + student[1] + sigma * eps
    with torch.enable_grad():
        leaf = x.clone().requires_grad_(True)
        var = 0.25 + sigma[:, 0] ** 2
        logs = [
            math.log(p) - ((leaf - torch.tensor([m, 0.0])) ** 2).sum(1) / (2 * var)
            for p, m in ((0.2, -2.5), (0.8, 2.5))
        ]
        (s_q,) = torch.autograd.grad(torch.logsumexp(torch.stack(logs), 0).sum(), leaf)
    s_p = -(x - student[1]) / (2.25 + sigma.square())
    torch.testing.assert_close(end.r, sigma * (s_q - s_p))


def test_the_rare_worlds_teacher_is_exact():
    toy, gen = RareModes.draw(), torch.Generator().manual_seed(0)
    captions = torch.randint(4, (20_000,), generator=gen)
    samples = toy.samples(captions, gen)
    assert toy.shares(samples, captions) == pytest.approx(SHARES, abs=0.01)
    x, sigma = samples[:64].double(), torch.full((64, 1), 0.7).double()
    with torch.enable_grad():
        leaf, var = x.clone().requires_grad_(True), DEVIATION**2 + 0.49
        logs = torch.tensor(SHARES).log() - (leaf[:, None] - toy.modes[captions[:64]]).square().sum(-1) / (2 * var)
        (score,) = torch.autograd.grad(torch.logsumexp(logs, 1).sum(), leaf)
    torch.testing.assert_close(toy.denoised(x, sigma, captions[:64]), x + 0.49 * score, rtol=1e-5, atol=1e-5)


def test_a_student_of_the_rare_world_counts_what_it_spends():
    torch.manual_seed(0)
    net = Denoiser().requires_grad_(False)
    run = Run(RareModes.draw(), net, EStepConfig(4, gz=0.001, clip=1.0), Course(batch=8), 0)
    before = run.draw(torch.ones(2, SIZE), torch.zeros(2).long()).detach()
    for _ in range(2):
        run.step()
    assert run.calls == 2 * 9 and run.updates == 2 and run.seconds > 0
    assert not torch.equal(run.draw(torch.ones(2, SIZE), torch.zeros(2).long()), before)
    assert set(run.judged(200)) == {"5 %", "2 %", "1 %", "near none", "precision", "recall"}


def test_intervals_are_students():
    assert spread([1.0, 2.0, 3.0]) == {"mean": 2.0, "+-": pytest.approx(4.303 / math.sqrt(3), abs=1e-4)}
