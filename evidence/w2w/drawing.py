"""Pictures of people for edits: each person once, with a prompt and a seed of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...engine.w2w.train.batched_lora import late_lora
from ..portraits.sampling import decode, sample_latents
from .people import GUIDANCE, LABELS, Studio

WORDS = {label: label for label in LABELS} | {"bald": "bald head", "dark skin": "dark", "pale skin": "pale"}
"""Attributes whose edits are measured, and what captions call them: the prompt baseline says it."""
EDIT_STEPS, EDIT_BATCH = 10, 40
"""Sampler steps where edits are compared, and models sampled at once."""


def draw_once(
    studio: Studio,
    weights: torch.Tensor,
    prompts: Sequence[str] | torch.Tensor,
    late: torch.Tensor | None = None,
    start: float = 1000.0,
    steps: int = EDIT_STEPS,
    first_seed: int = 0,
) -> torch.Tensor:
    """(M, 1, 3, S, S) in [0, 1]: each model (flat weights) with a prompt (or text states) and its own seed.

    ``late`` weights take over from timestep ``start`` down. One picture of many people tells more about a slider than
    many pictures of few: whether another attribute comes along depends on the person.
    """
    batches = []
    for first in range(0, len(weights), EDIT_BATCH):
        batch = slice(first, first + EDIT_BATCH)
        after = None if late is None else late[batch]
        with late_lora(studio.portraits.backbone, studio.manifest, weights[batch], after, start):
            text = prompts[batch] if isinstance(prompts, torch.Tensor) else list(prompts[batch])
            seeds = list(range(first_seed + first, first_seed + first + len(weights[batch])))
            latents = sample_latents(studio.portraits, text, seeds, steps=steps, guidance=GUIDANCE)
        batches.append(decode(studio.portraits, latents))
    return torch.cat(batches)[:, None]


def with_word(prompt: str, word: str) -> str:
    """A prompt that also names an attribute, where training captions do."""
    if word in ("dark", "pale"):
        return prompt.replace(" face", f" {word} face")
    return prompt.replace("face with", f"face with {word}")
