"""The EMD section of ``vitrine demo``: mode covering where everything is known, and one step against thirty."""

from __future__ import annotations

from typing import Any

import torch

from ..progress import Progress, silent
from .config import EStepConfig
from .contract import PRESETS, StudentContract
from .onestep import noise_scale, one_step, seeded
from .toys import train_mixture


def section(report: Any, progress: Progress = silent) -> None:
    """Add the section; a few seconds on one core."""
    report.add_heading("EM Distillation: one-step generators")
    report.add_paragraph(
        "A student too small for its teacher must cover two modes badly or drop one. Diff-Instruct (reverse KL) drops "
        "the smaller; EMD moves the generator's input as well and keeps it. The exact maximum-likelihood student has "
        "mass 0.10 near the smaller mode and forward KL 0.60."
    )
    rows: list[list[object]] = [["training", "mass near the smaller mode", "forward KL"]]
    runs = {"Diff-Instruct": EStepConfig.diff_instruct(), "EMD K = 4, z frozen": EStepConfig(4)}
    runs |= {f"EMD K = {k}": EStepConfig(k, 0.16, 0.01) for k in (2, 4, 8)}
    for i, (name, config) in enumerate(runs.items()):
        found = train_mixture(config)
        rows.append([name, f"{found.minor_mass:.3f}", f"{found.forward_kl:.2f}"])
        progress(i + 1, len(runs) + 1, None)
    report.add_table(rows)
    _conventions(report)
    _start(report)
    progress(len(runs) + 1, len(runs) + 1, None)


def _conventions(report: Any) -> None:
    from ..schedule import NoiseSchedule

    report.add_paragraph("What each published student expects; a plain sampler feeds all of them the vp column.")
    rows: list[list[object]] = [["student", "t*", "noise", "network input / z", "vp"]]
    schedule = NoiseSchedule.scaled_linear()
    for name, told in PRESETS.items():
        vp = noise_scale(schedule, StudentContract(timestep=told.timestep, noise="vp"))
        rows.append([name, f"{told.timestep:.0f}", told.noise, f"{noise_scale(schedule, told):.4f}", f"{vp:.4f}"])
    report.add_table(rows)


@torch.no_grad()
def _start(report: Any) -> None:
    from ..denoiser import Condition, Denoiser
    from ..portraits import caption, load_portraits, sample_scenes
    from ..portraits.report import to_pil
    from ..portraits.sampling import decode, sample_latents

    model = load_portraits()
    prompts = caption(sample_scenes(range(6_000_000, 6_000_004)))
    teacher = Denoiser.from_diffusers(model.unet, model.scheduler)
    cond, z = Condition(model.encode(prompts)), seeded([0, 1, 2, 3], (4, 16, 16))
    report.add_paragraph(
        "Where a student starts: the teacher's one-step prediction, below the teacher's 30 steps. "
        "`vitrine emd train` distils the way from the second row to the first."
    )
    many = to_pil(decode(model, sample_latents(model, prompts, [0, 1, 2, 3])))
    report.add_images([(p, "teacher, 30 steps") for p in many], width=100)
    once = to_pil(decode(model, one_step(teacher, z, cond, StudentContract())))
    report.add_images([(p, "teacher, 1 step") for p in once], width=100)
