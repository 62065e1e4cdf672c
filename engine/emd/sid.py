"""Score identity distillation (SiD) for flow teachers: an alternative generator loss.

Zhou et al. 2024 (SiD), for flows as in SiD-DiT (Zhou et al. 2025), re-implemented from the formulas.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..diffusion.denoiser import Denoiser
from ..errors import refuse
from ..network.condition import Condition
from .chain import NoiseLevels
from .losses import guided_x0


class Scores(NamedTuple):
    """The two score networks at the generator's samples; gradients flow through both to their inputs.

    Attributes:
        teacher, student: real and fake score, weights frozen here. Only the teacher is guided.
        null: the empty prompt, one row; needed if guidance is not 1.
        guidance: of the teacher.
    """

    teacher: Denoiser
    student: Denoiser
    null: Condition | None = None
    guidance: float = 1.0


def sid_loss(
    scores: Scores, y: torch.Tensor, noise: torch.Tensor, t: torch.Tensor, cond: Condition, alpha: float = 1.0
) -> torch.Tensor:  # fmt: skip
    """Sum over pixels, batch mean of (1 - s) (y_r - y_f) ((y_r - y) - alpha (y_r - y_f)) at x_s = (1 - s) y + s n.

    y_r and y_f are the x0 predictions of teacher and student score. If the student's score is exact, the
    gradient at alpha = 1/2 is half that of the Fisher divergence sum (1 - s) |y_r - y_f|^2; the authors take 1.

    Args:
        y: (B, ...) samples of the generator, with gradient.
        noise: (B, ...) standard normal.
        t: (B,) timesteps.
    """
    if scores.teacher.schedule.kind != "flow":
        shown = f"sid with a teacher that predicts {scores.teacher.prediction}"
        raise refuse("objective", shown, "emd, or sid of a flow", "take emd")
    y = y.to(noise.dtype)
    levels = NoiseLevels.at(scores.teacher.schedule, t, noise)
    x = levels.noisy(y, noise)
    real = guided_x0(scores.teacher, x, t, cond, scores.null, scores.guidance).to(y.dtype)
    difference = real - scores.student.predict(x, t, cond).x0.to(y.dtype)
    rows = levels.alpha * difference * ((real - y) - alpha * difference)
    return rows.flatten(1).sum(1).mean()
