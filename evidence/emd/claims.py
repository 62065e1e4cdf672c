"""Claims of EM Distillation: here those that need no trained student."""

from __future__ import annotations

import torch

from ...engine.emd.chain import EStepConfig, e_step, normal_from
from ...engine.runtime.progress import Progress, silent
from ..registry import ClaimResult, arms, claim
from . import mixture_claims as _mixture  # noqa: F401  registers what is measured on the mixture
from . import rare_claims as _rare  # noqa: F401  registers emd.rare_modes
from . import student_claims as _students  # noqa: F401  registers emd.student
from . import variety_claims as _variety  # noqa: F401  registers emd.variety_flow
from .toys import LinearGaussian

PAPER = "Xie et al. 2024 (EM Distillation)"


@claim(
    "emd.likelihood",
    paper=PAPER,
    figure="relative error of the raw direction against the exact forward-KL gradient",
    target="< 5 %, and the cancelled one worse when z moves as fast as eps",
    minutes=0.1,
    quick_minutes=0.05,
)
def likelihood(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """The linear-Gaussian chain, where the gradient of the likelihood is known; the raw direction is eps^K itself.

    Quick: a quarter of the chains, and so twice the error allowed.
    """
    case, errors = LinearGaussian.example(), {}
    chains, limit = (10_000, 0.1) if quick else (40_000, 0.05)
    for i, name in enumerate(("raw", "cancel", "last")):
        gen = torch.Generator().manual_seed(1)
        z, eps = (torch.randn(chains, 2, generator=gen, dtype=torch.float64) for _ in range(2))
        config = EStepConfig(300, 0.02, 0.02, "last" if name == "last" else "cancel")
        end = e_step(case.rho(), z, eps, config, normal_from(gen))
        direction = end.eps if name == "raw" else end.r
        gradient, exact = case.alpha / case.sigma * direction.T @ end.z / len(z), case.likelihood_gradient()
        errors[name] = float((gradient - exact).norm() / exact.norm())
        progress(i + 1, 3, None)
    holds = errors["raw"] < limit and errors["last"] < limit and errors["cancel"] > errors["raw"]
    return ClaimResult(
        errors["raw"],
        None,
        holds,
        errors,
        n=chains,
        arms=arms(errors, {"raw": "ours", "last": "rival", "cancel": "rival"}),
        parts={"raw and last exact": max(errors["raw"], errors["last"]) < limit},
    )
