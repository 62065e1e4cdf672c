"""A student of the flow portraits that has collapsed: four steps, one picture for every seed."""

from __future__ import annotations

import copy
from functools import partial

import torch

from ...engine.diffusion.denoiser import Denoiser
from ...engine.diffusion.guidance import guide
from ...engine.diffusion.noise import seeded_noise
from ...engine.emd import NoiseLevels, StudentSampling, few_steps
from ...engine.network.condition import Condition
from ...engine.portraits import sample_scenes
from ...engine.portraits.flow import FlowPortraits, load_flow_portraits
from ...engine.runtime.progress import Progress, silent
from ..portraits.sampling import sample_latents
from .variety import SEEDS, TEACHER, Drawn, drawn_by, four_step_ways, open_captions

SAMPLING = StudentSampling("flow portraits", (1000.0, 750.0, 500.0, 250.0))
GUIDANCE, RANK, RATE, BATCH, LOWEST_LEVEL = 7.5, 8, 1e-3, 8, 0.02
STRENGTHS = (0.3, 0.6, 1.0, 1.5, 2.0)
"""Of noise on the text: up to where it reaches as far as the base does."""
TRAINING_SCENES, FIRST_EVALUATION_SCENE = range(210_000, 210_256), 7_320_000
"""The settings are the first that were tried, inspected on four prompts from 7,310,000."""
LAYERS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "net.0.proj",
          "net.2", "proj_mlp", "proj_out", "linear", "x_embedder")  # fmt: skip


def collapsed_flow_student(model: FlowPortraits, updates: int = 60, progress: Progress = silent) -> Denoiser:
    """A LoRA of rank 8 on the transformer, trained by score distillation; the model itself is unchanged.

    Each update runs the student's steps to one of its four levels and moves its prediction there towards the
    teacher's guided prediction from a noisier copy. That is the gradient of the reverse KL divergence with the
    student's distribution taken for a point (Poole et al. 2023, DreamFusion): nothing in it requires two seeds to
    differ.
    """
    teacher, student, weights = Denoiser.from_diffusers(model.transformer, model.scheduler), *_with_lora(model)
    gen, times = torch.Generator().manual_seed(0), SAMPLING.timesteps
    captions = open_captions(sample_scenes(TRAINING_SCENES))
    with torch.no_grad():
        text, null = model.encode(captions), model.encode([""]).expand(BATCH, -1, -1)
    adam = torch.optim.Adam(weights, lr=RATE, betas=(0.0, 0.99))
    for step in range(updates):
        states = text[torch.randint(len(text), (BATCH,), generator=gen)]
        cond, both = model.condition(states), model.condition(torch.cat([states, null]))
        x = torch.randn(BATCH, *model.latent_shape, generator=gen)
        level = int(torch.randint(len(times), (1,), generator=gen))
        x0 = student.predict(_walked(student, x, cond, level), times[level], cond).x0
        t = 1000 * (LOWEST_LEVEL + (times[level] / 1000 - LOWEST_LEVEL) * torch.rand(BATCH, generator=gen).double())
        noise = torch.randn(x.shape, generator=gen)
        with torch.no_grad():
            noisy = NoiseLevels.at(teacher.schedule, t, x).noisy(x0, noise)
            full, empty = teacher.predict(torch.cat([noisy, noisy]), torch.cat([t, t]), both).x0.chunk(2)
            away = x0 - guide(empty, full, GUIDANCE)
            # Yin et al. 2024 (DMD), Eq. 8: all noise levels at one scale
            away = away / away.abs().mean((1, 2, 3), keepdim=True).clamp(min=1e-3)
        adam.zero_grad()
        (x0 * away).mean().backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        adam.step()
        adam.param_groups[0]["lr"] = RATE * (1 - step / updates)
        progress(step + 1, updates, None)
    return student


def _with_lora(model: FlowPortraits) -> tuple[Denoiser, list[torch.nn.Parameter]]:
    from peft import LoraConfig

    transformer = copy.deepcopy(model.transformer).requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(LAYERS)))
    weights = [p for p in transformer.parameters() if p.requires_grad]
    return Denoiser.from_diffusers(transformer, model.scheduler), weights


@torch.no_grad()
def _walked(student: Denoiser, x: torch.Tensor, cond: Condition, level: int) -> torch.Tensor:
    """Noise to where the student's step ``level`` begins: Euler's steps, as it is sampled."""
    for t, following in zip(SAMPLING.timesteps[:level], SAMPLING.timesteps[1:], strict=False):
        eps, x0 = student.predict(x, t, cond)
        signal, noise = (float(s) for s in student.schedule.scales(following))
        x = signal * x0 + noise * eps
    return x


def draw_flow(prompts: int = 8, updates: int = 60, progress: Progress = silent) -> Drawn:
    """The student alone, with its base for one step and two, with noise on the text; the base alone; the teacher."""
    model = load_flow_portraits()
    scenes = sample_scenes(range(FIRST_EVALUATION_SCENE, FIRST_EVALUATION_SCENE + prompts))
    student = collapsed_flow_student(model, updates)
    teacher = Denoiser.from_diffusers(model.transformer, model.scheduler)
    captions, seeds = [c for c in open_captions(scenes) for _ in range(SEEDS)], list(range(SEEDS)) * prompts
    with torch.no_grad():
        cond = model.condition(model.encode(captions))
    z = seeded_noise(seeds, model.latent_shape)
    ways = four_step_ways(student, teacher, cond, z, SAMPLING, STRENGTHS)
    ways["base alone, 4 steps"] = (4, partial(few_steps, teacher, z, cond, SAMPLING, seeds))
    ways["base alone, 2 steps of guidance 3"] = (4, partial(sample_latents, model, captions, seeds, steps=2))
    ways[TEACHER] = (20, partial(sample_latents, model, captions, seeds, steps=10))
    return drawn_by(ways, model, scenes, progress)
