"""The EMD section of ``vitrine demo``: mode covering where everything is known, and one step against thirty."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from ...engine.diffusion.noise import seeded_noise
from ...engine.emd import PRESETS, EStepConfig, StudentPreset, noise_scale, one_step
from ...engine.pipelines.emd import one_step_pipeline
from ...engine.runtime.progress import Progress, silent
from .mixture import train_mixture

if TYPE_CHECKING:
    from ...engine.io.html_page import Report


def section(report: Report, progress: Progress = silent) -> None:
    """Add the section; it takes a few seconds on one core."""
    report.add_paragraph(
        "A student too small for its teacher must cover two modes badly or drop one. Diff-Instruct (reverse KL) drops "
        "the smaller; EMD moves the generator's input as well and keeps it, with more mass than it should have. The "
        "best student of this size (maximum likelihood) has mass 0.10 near the smaller mode and forward KL 0.60; the "
        "teacher itself has 0.20."
    )
    rows: list[list[object]] = [["training", "mass near the smaller mode", "forward KL"]]
    runs = {"Diff-Instruct": EStepConfig.diff_instruct(), "EMD K = 4, z frozen": EStepConfig(4, gz=0.0)}
    runs |= {f"EMD K = {k}": EStepConfig(k, 0.16, 0.01) for k in (2, 4)}
    for i, (name, config) in enumerate(runs.items()):
        run = train_mixture(config)
        rows.append([name, f"{run.minor_mass:.3f}", f"{run.forward_kl:.2f}"])
        progress(i + 1, len(runs) + 1, None)
    report.add_table(rows)
    _conventions(report)
    _side_by_side(report)
    progress(len(runs) + 1, len(runs) + 1, None)


def _conventions(report: Report) -> None:
    from ...engine.diffusion.schedule import NoiseSchedule

    report.add_paragraph("What each published student expects; a plain sampler feeds all of them the vp column.")
    rows: list[list[object]] = [["student", "t*", "noise", "network input / z", "vp"]]
    schedule = NoiseSchedule.scaled_linear()
    for name, preset in PRESETS.items():
        vp = noise_scale(schedule, StudentPreset(timestep=preset.timestep, noise="vp"))
        rows.append([name, f"{preset.timestep:.0f}", preset.noise, f"{noise_scale(schedule, preset):.4f}", f"{vp:.4f}"])
    report.add_table(rows)


@torch.no_grad()
def _side_by_side(report: Report) -> None:
    from ...engine.diffusion.denoiser import Denoiser
    from ...engine.network.condition import Condition
    from ...engine.portraits import caption, load_portraits, sample_scenes
    from ..portraits.page import to_pil
    from ..portraits.sampling import decode, sample_latents

    model = load_portraits()
    prompts, seeds = caption(sample_scenes(range(6_000_000, 6_000_008))), list(range(8))
    cond, z = Condition(model.encode(prompts)), seeded_noise(seeds, (4, 16, 16))
    report.add_paragraph(
        "The same prompts and seeds: the teacher with 30 steps (60 UNet evaluations a picture), its one-step "
        "prediction, and two LoRAs of 2 MB distilled for equally long. `vitrine reproduce emd.student` measures them."
    )

    def show(name: str, sample: Callable[[], torch.Tensor]) -> None:
        start = time.perf_counter()
        latents = sample()
        label = f"{name}, {1000 * (time.perf_counter() - start) / len(seeds):.0f} ms a picture"
        report.add_images([(p, label) for p in to_pil(decode(model, latents))], width=100)

    show("teacher, 30 steps", lambda: sample_latents(model, prompts, seeds))
    teacher = Denoiser.from_diffusers(model.unet, model.scheduler)
    show("teacher, 1 step", lambda: one_step(teacher, z, cond, StudentPreset()))
    for name, title in (("diff-instruct", "Diff-Instruct, 1 step"), ("student", "EMD, 1 step")):
        pipe, preset = one_step_pipeline(name)
        student = Denoiser.from_diffusers(pipe)
        show(title, partial(one_step, student, z, cond, preset))
