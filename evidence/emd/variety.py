"""A student that generates one picture for every seed, and methods that restore variety, at equal network calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...engine.diffusion.denoiser import Denoiser
from ...engine.diffusion.guidance import guide
from ...engine.diffusion.noise import seeded_noise
from ...engine.emd import (
    Base,
    FirstSteps,
    NoiseLevels,
    StudentPreset,
    StudentSampling,
    few_steps,
    noisy_text,
    one_step,
)
from ...engine.emd.networks import GENERATOR, Roles
from ...engine.network.condition import Condition
from ...engine.pipelines.emd import one_step_pipeline
from ...engine.portraits import Portraits, caption, load_portraits, sample_scenes
from ...engine.portraits.captions import OPTIONAL
from ...engine.portraits.scenes import Scenes
from ...engine.runtime.progress import Progress, silent
from ..portraits.sampling import decode, sample_latents

SAMPLING = StudentSampling("portraits", (999.0, 749.0, 499.0, 249.0))
GUIDANCE, STRENGTHS = 7.5, (0.3, 0.6, 1.0)
TRAINING_SCENES, FIRST_EVALUATION_SCENE = range(200_000, 200_128), 7_300_000
STUDENT_ALONE, WITH_BASE = "student, 4 steps", "base for 1 of 4 steps"
TEACHER = "teacher, 10 steps, guidance 3"
SHAPE, SEEDS = (4, 16, 16), 8


def open_captions(scenes: Scenes) -> list[str]:
    """Captions that do not mention skin, hair colour, mouth, shirt and background, like some training captions."""
    import numpy as np

    return caption(scenes, np.ones((len(scenes), len(OPTIONAL)), bool))


def collapsed_student(model: Portraits, updates: int = 60, progress: Progress = silent) -> Denoiser:
    """A mode-seeking student of four steps: a LoRA into which the teacher's guidance of 7.5 is distilled.

    At each of its four levels it learns the guided prediction (Meng et al. 2023), at half the teacher's calls. Strong
    guidance makes the seeds of a prompt similar, and the student's as well. Its training pictures are renders.
    """
    gen, batch = torch.Generator().manual_seed(0), 8
    scenes = sample_scenes(TRAINING_SCENES)
    text, null = model.encode(open_captions(scenes)).detach(), model.encode([""]).detach()
    with torch.no_grad():
        clean = model.vae.encode(model.draw(scenes) * 2 - 1).latent_dist.mean * model.vae.config.scaling_factor
    roles = Roles(Denoiser.from_diffusers(model.unet, model.scheduler), 16)
    roles.train_only(GENERATOR)
    adam = torch.optim.Adam(list(roles.parameters(GENERATOR).values()), lr=1e-3, betas=(0.9, 0.99))
    times = torch.tensor([SAMPLING.timesteps[0], *SAMPLING.timesteps]).double()  # pure noise counts twice
    for step in range(updates):
        rows = torch.randint(len(clean), (batch,), generator=gen)
        t, noise = times[torch.randint(len(times), (batch,), generator=gen)], torch.randn(batch, *SHAPE, generator=gen)
        x = NoiseLevels.at(roles.base.schedule, t, noise).noisy(clean[rows], noise)
        with torch.no_grad():
            both = Condition(torch.cat([text[rows], null.expand(batch, -1, -1)]))
            full, empty = roles.teacher.predict(torch.cat([x, x]), torch.cat([t, t]), both).eps.chunk(2)
        loss = (roles.generator.predict(x, t, Condition(text[rows])).eps - guide(empty, full, GUIDANCE)).square().mean()
        adam.zero_grad()
        loss.backward()
        adam.param_groups[0]["lr"] = 1e-3 * (1 - step / updates)
        adam.step()
        progress(step + 1, updates, None)
    roles.train_only(None)
    return roles.generator


@dataclass
class Drawn:
    """Pictures of several prompts, each with the same seeds, by sampling method.

    Attributes:
        scenes: one for each prompt: what its pictures should show.
        pictures: name -> (prompts, seeds, 3, S, S) in [0, 1].
        calls: name -> network calls a picture.
    """

    scenes: Scenes
    pictures: dict[str, torch.Tensor]
    calls: dict[str, int]


Ways = dict[str, tuple[int, Callable[[], torch.Tensor]]]
"""Name of a sampling method -> network calls a picture, and the method: latents of all pictures."""


def four_step_ways(
    student: Denoiser,
    base: Denoiser,
    cond: Condition,
    z: torch.Tensor,
    sampling: StudentSampling,
    strengths: tuple[float, ...],
) -> Ways:
    """The student alone, with its base for one step and two, with noise on the text; ``SEEDS`` rows a prompt."""
    prompts = len(z) // SEEDS
    seeds = list(range(SEEDS)) * prompts
    ways: Ways = {STUDENT_ALONE: (4, partial(few_steps, student, z, cond, sampling, seeds))}
    for count in (1, 2):
        begun = Base(base, cond, FirstSteps(count))
        ways[f"base for {count} of 4 steps"] = (4, partial(few_steps, student, z, cond, sampling, seeds, begun))
    for strength in strengths:
        noisy = noisy_text(cond, strength, own_seeds(prompts))
        ways[f"noise on the text, {strength}"] = (4, partial(few_steps, student, z, noisy, sampling, seeds))
    return ways


def own_seeds(prompts: int) -> list[int]:
    """Separate seeds for each picture."""
    return [s + 1000 * p for p in range(prompts) for s in range(SEEDS)]


def drawn_by(ways: Ways, model: Any, scenes: Scenes, progress: Progress) -> Drawn:
    """The pictures of each method."""
    drawn = Drawn(scenes, {}, {})
    for done, (name, (calls, sample)) in enumerate(ways.items()):
        images = decode(model, sample())
        drawn.pictures[name] = images.view(len(scenes), SEEDS, *images.shape[1:])
        drawn.calls[name] = calls
        progress(done + 1, len(ways), None)
    return drawn


def draw(prompts: int = 8, updates: int = 60, progress: Progress = silent) -> Drawn:
    """The student alone, with its base for one step and two, with noise on the text; shipped students; the teacher."""
    scenes = sample_scenes(range(FIRST_EVALUATION_SCENE, FIRST_EVALUATION_SCENE + prompts))
    student, plain = collapsed_student(load_portraits(), updates), load_portraits()
    teacher = Denoiser.from_diffusers(plain.unet, plain.scheduler)
    captions, seeds = [c for c in open_captions(scenes) for _ in range(SEEDS)], list(range(SEEDS)) * prompts
    cond, z = Condition(plain.encode(captions).detach()), seeded_noise(seeds, SHAPE)
    ways = four_step_ways(student, teacher, cond, z, SAMPLING, STRENGTHS)
    for name in ("student", "diff-instruct"):
        pipe, preset = one_step_pipeline(name)
        shipped = partial(_once, Denoiser.from_diffusers(pipe), preset)
        label = {"student": "shipped EMD, 1 step", "diff-instruct": "shipped Diff-Instruct, 1 step"}[name]
        ways[label] = (1, partial(shipped, z, cond))
        if name == "student":
            noisy = noisy_text(cond, 0.3, own_seeds(prompts))
            ways[f"{label}, noise on the text, 0.3"] = (1, partial(shipped, z, noisy))
    ways[TEACHER] = (20, partial(sample_latents, plain, captions, seeds, steps=10))
    return drawn_by(ways, plain, scenes, progress)


@torch.no_grad()
def _once(net: Denoiser, preset: StudentPreset, z: torch.Tensor, cond: Condition) -> torch.Tensor:
    return one_step(net, z, cond, preset)
