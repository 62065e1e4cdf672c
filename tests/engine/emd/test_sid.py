"""Score identity distillation: its gradient by brute force in one dimension, and a short run on a flow."""

import math
from functools import partial

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.diffusion.schedule import NoiseSchedule
from vitrine.engine.emd import EStepConfig, Scores, sid_loss
from vitrine.engine.emd.emd_trainer import Trainer
from vitrine.engine.emd.networks import GENERATOR, SCORE
from vitrine.engine.emd.train_config import EMDAdvancedConfig, EMDTrainConfig
from vitrine.engine.errors import VitrineError
from vitrine.engine.network.condition import Condition
from vitrine_tests.emd_runs import teacher
from vitrine_tests.engine.emd.test_quadrature import difference, g, log_normal
from vitrine_tests.families.twin import inputs, network

FLOW, LEVEL = NoiseSchedule.from_diffusers(FlowMatchEulerDiscreteScheduler()), 0.4
THETA = torch.tensor([0.9, 0.2, 0.5], dtype=torch.float64)
GRID, STEP = torch.linspace(-8, 8, 161, dtype=torch.float64), 0.1
CLEAN = torch.linspace(-8, 8, 321, dtype=torch.float64)
TIME = torch.tensor([1000 * LEVEL])
MODES = ((0.3, -1.5, 0.7), (0.7, 1.2, 0.9))


def teacher_x0(x):
    """E[clean | x] of a mixture of normals at (1 - s) clean + s n."""
    found, total = 0.0, 0.0
    for share, mean, deviation in MODES:
        signal, variance = (1 - LEVEL) * deviation, ((1 - LEVEL) * deviation) ** 2 + LEVEL**2
        likely = share * log_normal(x, (1 - LEVEL) * mean, math.sqrt(variance)).exp()
        found = found + likely * (mean + signal * deviation / variance * (x - (1 - LEVEL) * mean))
        total = total + likely
    return found / total


def student_x0(theta, x):
    """The same of the generator's samples: a sum over z."""
    rows = (log_normal(x.reshape(-1, 1), (1 - LEVEL) * g(theta, CLEAN), LEVEL) + log_normal(CLEAN, 0.0, 1.0)).exp()
    return ((rows * g(theta, CLEAN)).sum(1) / rows.sum(1)).view(x.shape)


def denoiser(x0_of):
    """A flow network that takes the clean value to be so: its velocity is (x - x0) / s."""
    return Denoiser(torch.nn.Identity(), FLOW, "flow", lambda x, t, cond: (x - x0_of(x)) / LEVEL)


def pairs():
    """z and noise of every pair of grid points, (N, 1), and their probabilities."""
    z, n = (v.reshape(-1, 1) for v in torch.meshgrid(GRID, GRID, indexing="ij"))
    weight = (log_normal(z, 0.0, 1.0) + log_normal(n, 0.0, 1.0)).exp() * STEP**2
    near = weight[:, 0] > 1e-12
    return z[near], n[near], weight[near]


def fisher(theta):
    """sum (1 - s) |y_r - y_f|^2 with the student's own exact score."""
    z, n, weight = pairs()
    x = (1 - LEVEL) * g(theta, z) + LEVEL * n
    return float(((1 - LEVEL) * weight * (teacher_x0(x) - student_x0(theta, x)).square()).sum())


def sid_gradient(alpha, theta=THETA):
    """Of the engine's loss, the mean over rows made an integral."""
    z, n, weight = pairs()
    theta = theta.clone().requires_grad_(True)
    frozen = Scores(denoiser(teacher_x0), denoiser(partial(student_x0, theta.detach())))
    # rows count alike in the loss, so that each is asked for by itself
    y = g(theta, z)
    leaf = y.detach().requires_grad_(True)
    loss = sid_loss(frozen, leaf, n, TIME.expand(len(z)), Condition(), alpha) * len(z)
    (by_y,) = torch.autograd.grad(loss, leaf)
    (gradient,) = torch.autograd.grad(y, theta, weight * by_y)
    return gradient


def by_difference(fn):
    axes = torch.eye(3, dtype=torch.float64)
    return torch.tensor([difference(lambda s, e=e: fn(THETA + s * e), 0.0, 1e-2) for e in axes], dtype=torch.float64)


def test_at_one_half_it_is_half_the_gradient_of_the_fisher_divergence():
    wanted = by_difference(fisher) / 2
    found = sid_gradient(0.5)
    assert (found - wanted).norm() / wanted.norm() < 1e-4, (found, wanted)


@pytest.mark.parametrize("alpha", [0.0, 1.0, 1.2])
def test_it_is_the_gradient_of_the_formula_with_the_score_held(alpha):
    def formula(theta):
        z, n, weight = pairs()
        y = g(theta, z)
        x = (1 - LEVEL) * y + LEVEL * n
        real, fake = teacher_x0(x), student_x0(THETA, x)
        rows = (1 - LEVEL) * (real - fake) * ((real - y) - alpha * (real - fake))
        return float((weight * rows).sum())

    wanted, found = by_difference(formula), sid_gradient(alpha)
    assert (found - wanted).norm() / wanted.norm() < 1e-4
    half = sid_gradient(0.5)
    assert float(found @ half / (found.norm() * half.norm())) > 0, "downhill all the same"


def test_equal_networks_give_no_gradient():
    y = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_(True)
    one = denoiser(teacher_x0)
    loss = sid_loss(Scores(one, one), y, torch.ones(5, 3, dtype=torch.float64), TIME.expand(5), Condition())
    (gradient,) = torch.autograd.grad(loss, y)
    assert float(loss.detach()) == 0 and float(gradient.abs().max()) < 1e-15


def test_a_short_run_on_a_flow(tmp_path):
    import copy

    x, _, cond = inputs("z_image", 1)
    base = Denoiser.from_diffusers(copy.deepcopy(network("z_image")), FlowMatchEulerDiscreteScheduler())
    config = EMDTrainConfig(
        2, 2, rank=2, lr_generator=1e-2, advanced=EMDAdvancedConfig(objective="sid", ema=0.0)
    )  # fmt: skip
    run = Trainer(base, cond, tuple(x.shape[1:]), config, tmp_path)
    before = {k: v.clone() for role in (GENERATOR, SCORE) for k, v in run.roles.parameters(role).items()}
    frozen = {k: v.clone() for k, v in run.roles.net.named_parameters() if ".lora_" not in k}
    run.run()
    after = {k: v for role in (GENERATOR, SCORE) for k, v in run.roles.parameters(role).items()}
    assert run.done == 2 and run.skipped == 0 and run.calibration is None
    assert all(any(not torch.equal(before[k], after[k]) for k in after if f".{r}." in k) for r in (GENERATOR, SCORE))
    assert all(torch.equal(v, frozen[k]) for k, v in run.roles.net.named_parameters() if k in frozen)


def test_what_it_cannot_do_is_refused(tmp_path):
    with pytest.raises(VitrineError, match="objective"):
        EMDAdvancedConfig(objective="other")
    config = EMDTrainConfig(1, 1, rank=2, chain=EStepConfig(1), advanced=EMDAdvancedConfig(objective="sid"))
    run = Trainer(teacher(), Condition(torch.randn(1, 5, 8)), (4, 8, 8), config, tmp_path)
    with pytest.raises(VitrineError, match="sid of a flow"):
        run.step()
