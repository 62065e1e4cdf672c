"""The copy check on LoRAs trained on one, five and twenty portraits of a person: does a score follow the copies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...engine.condition import Condition
from ...engine.nemo.check import CheckConfig, CopyCheck
from ...engine.nemo.config import ProbeConfig
from ...engine.progress import Progress, silent
from ...engine.w2w.train import LoraTrainConfig, Subject, train_loras
from .world import DETECT, GUIDANCE, STEPS

SIZES = (1, 5, 20)
TUNING, MEASURED = 20_008_000, 20_009_000
"""First identity of the people that recipe and settings were chosen on, and of those that are measured."""
RECIPE = LoraTrainConfig(rank=8, alpha=8.0, steps=300, batch=2, lr=4e-3, schedule="cosine", weighting="debiased")
"""As many steps for every size, so that a single portrait is seen twenty times as often as one of twenty."""
PROMPTS = 2
SCORED = ("nemo", "norm", "anisotropy", "sharpness")


def train(folder: Path, people: Sequence[int], progress: Progress = silent, model: str | None = None) -> list[str]:
    """A LoRA for each person and number of portraits, and the portraits beside it; returns their names."""
    from PIL import Image

    from ...engine.denoiser import Denoiser
    from ...engine.portraits import load_portraits
    from ..portraits.identities import training_pictures

    portraits = load_portraits(model)
    for module in (portraits.unet, portraits.text_encoder, portraits.vae):
        module.requires_grad_(False)
    names, subjects = [], []
    for number, identity in enumerate(people):
        for size in SIZES:
            name = f"person-{number}-of-{size}"
            images, captions, _ = training_pictures(identity, size)
            latents = portraits.vae.encode(images * 2 - 1).latent_dist.mean * portraits.vae.config.scaling_factor
            subject = Subject(name, latents, Condition(portraits.encode(captions).detach()), number)
            (folder / name).mkdir(parents=True, exist_ok=True)
            for i, image in enumerate(images):
                picture = Image.fromarray((image.movedim(0, -1) * 255).round().byte().numpy())
                picture.save(folder / name / f"{i:02d}.png")
            (folder / name / "captions.txt").write_text("\n".join(captions), encoding="utf-8")
            names.append(name)
            subjects.append(lambda subject=subject: subject)
    denoiser = Denoiser.from_diffusers(portraits.pipeline())
    train_loras(denoiser, subjects, names, folder / "loras", RECIPE, together=12, progress=progress)
    return names


def check(folder: Path, name: str, seeds: int, model: str | None = None, lora: bool = True) -> CopyCheck:
    """The copy check of one LoRA on its first captions, or of the model without it on the same."""
    from ...engine.pipelines.copies import copy_check
    from ...engine.portraits import load_portraits

    pipe = load_portraits(model).pipeline()
    pipe.set_progress_bar_config(disable=True)
    captions = (folder / name / "captions.txt").read_text(encoding="utf-8").split("\n")[:PROMPTS]
    config = CheckConfig(seeds=seeds, usual=8, ordinary=() if lora else tuple(captions))
    path = folder / "loras" / f"{name}.safetensors"
    probe: ProbeConfig = DETECT
    return copy_check(
        pipe, captions, folder / "checks" / f"{name}{'' if lora else '-without'}", pictures=folder / name,
        lora=path if lora else None, config=config, probe=probe, num_inference_steps=STEPS, guidance_scale=GUIDANCE,
    )  # fmt: skip
