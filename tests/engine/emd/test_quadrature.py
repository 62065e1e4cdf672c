"""EMD's gradients by brute force: one dimension, every integral a sum over a grid, every derivative a difference.

Teacher: a mixture of two normals at one noise level. Generator: g(z) = a z + b + c tanh z, so that the student's
marginal has no closed form. What the engine computes is held to the Kullback-Leibler divergence itself.
"""

import math

import pytest
import torch
from vitrine.engine.emd.chain import ChainEnd, EStepConfig, Joint, NoiseLevels, ScoreDifference, e_step, normal_from
from vitrine.engine.emd.losses import m_step_loss

ALPHA, SIGMA = 0.8, 0.6
THETA = torch.tensor([0.9, 0.2, 0.5], dtype=torch.float64)
STEP = 0.03
X = Z = torch.linspace(-9, 9, 601, dtype=torch.float64)
COARSE = Z[::5]
LEVELS = NoiseLevels(*(torch.tensor(v, dtype=torch.float64) for v in (ALPHA, SIGMA)))


def log_normal(x, mean, deviation):
    return -0.5 * ((x - mean) / deviation) ** 2 - math.log(deviation * math.sqrt(2 * math.pi))


def log_q(x):
    """The teacher at this noise level."""
    return torch.logaddexp(math.log(0.3) + log_normal(x, -1.5, 0.7), math.log(0.7) + log_normal(x, 1.2, 0.9))


def g(theta, z):
    return theta[0] * z + theta[1] + theta[2] * torch.tanh(z)


def log_p(theta, x):
    """The student's marginal, log of a sum over z."""
    rows = log_normal(x.reshape(-1, 1), ALPHA * g(theta, Z), SIGMA) + log_normal(Z, 0.0, 1.0)
    return torch.logsumexp(rows, 1).view(x.shape) + math.log(STEP)


def divergence(theta):
    q = log_q(X)
    return float((q.exp() * (q - log_p(theta, X))).sum() * STEP)


def difference(fn, at, step=1e-4):
    """Central differences of the fourth order."""
    weights = ((1, 8), (-1, -8), (2, -1), (-2, 1))
    return sum(w * fn(at + k * step) for k, w in weights) / (12 * step)


def reverse_divergence(theta):
    p = log_p(theta, X)
    return float((p.exp() * (p - log_q(X))).sum() * STEP)


def gradient_of(loss):
    axes = torch.eye(3, dtype=torch.float64)
    return torch.tensor([difference(lambda s, e=e: loss(THETA + s * e), 0.0, 1e-3) for e in axes], dtype=torch.float64)


def scores(x):
    """sigma (s_q - s_phi) at x, by differences of the log densities."""
    return ScoreDifference(SIGMA * (difference(log_q, x) - difference(lambda u: log_p(THETA, u), x)))


def grid():
    """z, x and eps of every pair of grid points, (N, 1) each."""
    x, z = (v.reshape(-1, 1) for v in torch.meshgrid(COARSE, COARSE, indexing="ij"))
    return z, x, (x - ALPHA * g(THETA, z)) / SIGMA


def expected_gradient(end, weight):
    """The gradient of the M-step's loss where its mean over rows is an integral: the loss is linear in r's size."""
    theta, near = THETA.clone().requires_grad_(True), weight > 1e-16
    rows = end.take(near)
    rows = rows._replace(r=rows.r * weight[near, None] * int(near.sum()))
    (gradient,) = torch.autograd.grad(m_step_loss(g(theta, rows.z), rows, LEVELS), theta)
    return gradient * (ALPHA / SIGMA) ** 2  # without the weight sigma^2 / alpha^2


def weights(z, x, of_teacher):
    """rho(x, z) = q(x) p(z | x), or the student's own p(x, z), times the area of a cell."""
    log_pair = log_normal(x, ALPHA * g(THETA, z), SIGMA) + log_normal(z, 0.0, 1.0)
    if of_teacher:
        log_pair = log_pair + (log_q(COARSE) - log_p(THETA, COARSE)).repeat_interleave(len(COARSE))[:, None]
    weight = log_pair.exp()[:, 0] * (5 * STEP) ** 2
    assert abs(float(weight.sum()) - 1) < 1e-9, "the grid holds all of it"
    return weight


@pytest.mark.parametrize("estimator", ["raw", "last"])
def test_the_m_step_is_the_gradient_of_the_forward_divergence(estimator):
    z, x, eps = grid()
    r = eps if estimator == "raw" else scores(x).delta
    found = expected_gradient(ChainEnd(eps, z, eps, r), weights(z, x, True))
    wanted = gradient_of(divergence)
    assert (found - wanted).norm() / wanted.norm() < 1e-6, (found, wanted)


def test_one_full_step_with_z_frozen_is_the_reverse_divergence():
    """Diff-Instruct: the same direction, expected under the student instead."""
    z, x, eps = grid()
    rho = Joint(lambda u: g(THETA, u), scores, LEVELS)
    end = e_step(rho, z, eps, EStepConfig.diff_instruct(), normal_from(torch.Generator().manual_seed(0)))
    found = expected_gradient(end, weights(z, x, False))
    wanted, forward = gradient_of(reverse_divergence), gradient_of(divergence)
    assert (found - wanted).norm() / wanted.norm() < 1e-6
    assert (forward - wanted).norm() / wanted.norm() > 0.1, "the two divergences ask for other things"


def test_the_chain_climbs_the_log_density():
    """grad_eps = Delta - eps and grad_z = (alpha / sigma) J^T Delta - z, against differences of log rho(eps, z)."""

    def log_rho(eps, z):
        x = ALPHA * g(THETA, z) + SIGMA * eps
        return log_q(x) - log_p(THETA, x) - 0.5 * eps**2 - 0.5 * z**2

    gen = torch.Generator().manual_seed(0)
    z, eps = (torch.randn(64, 1, generator=gen, dtype=torch.float64) for _ in range(2))
    found, drift = Joint(lambda u: g(THETA, u), scores, LEVELS).z_drift(z, eps)
    by_eps, by_z = difference(lambda e: log_rho(e, z), eps), difference(lambda u: log_rho(eps, u), z)
    assert (found.delta - eps - by_eps).abs().max() < 1e-7
    assert (drift - z - by_z).abs().max() < 1e-7
