"""Claims of EM Distillation: here those that need no trained student."""

from __future__ import annotations

from typing import Any

import torch

from ...engine.emd.chain import e_step, normal_from
from ...engine.emd.config import EStepConfig
from ...engine.progress import Progress, silent
from ..registry import ClaimResult, claim
from . import chain_claims as _chains  # noqa: F401  registers emd.chain_length
from . import student_claims as _students  # noqa: F401  registers emd.student
from .toys import LinearGaussian, train_mixture

PAPER = "Xie et al. 2024 (EM Distillation)"


@claim(
    "emd.mixture", paper=PAPER, figure="minor mass of EMD K = 4, worst of 3 seeds",
    target="EMD: mass > 0.1, forward KL < 0.75; Diff-Instruct: mass < 0.005, forward KL > 3; on each seed",
)  # fmt: skip
def mixture(model: str | None = None, progress: Progress = silent) -> ClaimResult:
    """A student too small for its teacher: forward KL covers both modes, reverse KL drops one."""
    found: dict[str, list[Any]] = {"emd": [], "diff_instruct": []}
    for seed in range(3):
        for i, (name, config) in enumerate(
            (("diff_instruct", EStepConfig.diff_instruct()), ("emd", EStepConfig(4, 0.16, 0.01)))
        ):
            run = train_mixture(config, seed)
            found[name].append((run.minor_mass, run.forward_kl))
            progress(2 * seed + i + 1, 6, None)
    mass = [m for m, _ in found["emd"]]
    holds = all(m > 0.1 and k < 0.75 for m, k in found["emd"])
    holds = holds and all(m < 0.005 and k > 3 for m, k in found["diff_instruct"])
    return ClaimResult(min(mass), (min(mass), max(mass)), holds, found)


@claim(
    "emd.likelihood", paper=PAPER, figure="relative error of the raw direction against the exact forward-KL gradient",
    target="< 5 %, and the cancelled one worse when z moves as fast as eps",
)  # fmt: skip
def likelihood(model: str | None = None, progress: Progress = silent) -> ClaimResult:
    """The linear-Gaussian chain, where the gradient of the likelihood is known."""
    case, errors = LinearGaussian.example(), {}
    for i, name in enumerate(("raw", "cancel", "last")):
        gen = torch.Generator().manual_seed(1)
        z, eps = (torch.randn(40_000, 2, generator=gen, dtype=torch.float64) for _ in range(2))
        config = EStepConfig(300, 0.02, 0.02, name)
        end = e_step(case.net, case.gap, z, eps, case.alpha, case.sigma, config, normal_from(gen))
        found, wanted = case.alpha / case.sigma * end.r.T @ end.z / len(z), case.likelihood_gradient()
        errors[name] = float((found - wanted).norm() / wanted.norm())
        progress(i + 1, 3, None)
    holds = errors["raw"] < 0.05 and errors["last"] < 0.05 and errors["cancel"] > errors["raw"]
    return ClaimResult(errors["raw"], None, holds, errors)
