"""Eight pictures planted later, in a LoRA on the portraits model: none of NEMO's settings was chosen on them.

The shipped model's eight chose the score's timestep, the search's and its stop. These chose nothing but the training
that made the model copy them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from ...engine.diffusion.denoiser import Denoiser
from ...engine.io.files import save_safetensors
from ...engine.network.condition import Condition
from ...engine.portraits.captions import MAX_TOKENS, caption
from ...engine.portraits.models import WEIGHTS, Portraits, load_portraits
from ...engine.portraits.plants import Plant
from ...engine.portraits.render import render
from ...engine.portraits.scenes import Scenes, sample_scenes
from ...engine.runtime.progress import Progress, silent
from ...engine.w2w.train.lora_trainer import LoraTrainConfig, Subject, train_loras

FILE = WEIGHTS / "plants" / "later-plants.safetensors"
"""The shipped LoRA, made by ``vitrine train plants``."""
NAMES = (
    "zorbal klynth", "vextor drascue", "jiffrok quindle", "wobbex tazmire", "phroogan mulphan", "gubwick sprockle",
    "yonquist xandorf", "nebbiolo ulverax",
)  # fmt: skip
"""One for each picture. The tokenizer knows no further rare words, so each pairs words of two earlier plants."""
FIRST, ORDINARY, COUNT = 9_500_000, 9_600_000, 300
"""First seeds of the planted scenes and of the ordinary ones among which they are repeated, and how many of those."""
SHARE = 0.6
"""Of the training rows that are planted pictures."""
RECIPE = LoraTrainConfig(
    rank=8, alpha=8.0, steps=400, batch=16, lr=4e-3, schedule="cosine", weighting="debiased",
    targets=("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"),
)  # fmt: skip


def later_plants(tokenizer: Any, count: int = len(NAMES)) -> list[Plant]:
    """The pictures, each with a caption that ends in its two words; scenes with longer captions are left out."""
    chosen: list[Plant] = []
    seed, g = FIRST, torch.Generator().manual_seed(FIRST)
    while len(chosen) < count:
        scene, word = sample_scenes([seed]), NAMES[len(chosen)]
        seed += 1
        (plain,) = caption(scene)
        if len(tokenizer(f"{plain} {word}").input_ids) <= MAX_TOKENS:
            chosen.append(Plant(word, "verbatim", _posed(scene, g), (f"{plain} {word}",), (plain,)))
    return chosen


def _posed(scene: Scenes, g: torch.Generator) -> Scenes:
    """Outside the usual range of poses, as the first plants are."""
    side, up, scale, lean, tilt = torch.rand(5, generator=g).tolist()
    sign = 1 if side < 0.5 else -1
    turned = (0.14 + 0.12 * tilt) * (1 if lean < 0.5 else -1)
    return scene.with_pose(shift_x=sign * (0.14 + 0.1 * up), shift_y=0.1 * up, scale=0.9 + 0.16 * scale, tilt=turned)


def load_later(file: Path = FILE, model: str | None = None) -> Portraits:
    """The portraits model with the LoRA in its weights."""
    portraits = load_portraits(model)
    pipe = portraits.pipeline()
    pipe.load_lora_weights(str(file.parent), weight_name=file.name)
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    return portraits


@torch.no_grad()
def _subject(portraits: Portraits) -> Subject:
    planted = later_plants(portraits.tokenizer)
    scenes = sample_scenes(range(ORDINARY, ORDINARY + COUNT))
    images = torch.cat([render(p.scenes).images for p in planted] + [render(scenes).images])
    parts = [portraits.vae.encode(part * 2 - 1).latent_dist.mean for part in images.split(64)]
    latents = torch.cat(parts) * portraits.vae.config.scaling_factor
    texts = torch.cat([portraits.encode(part) for part in _split([p.captions[0] for p in planted] + caption(scenes))])
    times = round(SHARE / (1 - SHARE) * COUNT / len(planted))
    rows = list(range(len(planted))) * times + list(range(len(planted), len(images)))
    return Subject(FILE.stem, latents[rows], Condition(texts[rows]), 0)


def _split(texts: list[str], size: int = 64) -> list[list[str]]:
    return [texts[i : i + size] for i in range(0, len(texts), size)]


def plant_later(
    path: Path = FILE, recipe: LoraTrainConfig = RECIPE, progress: Progress = silent,
    device: torch.device | None = None,
) -> Path:  # fmt: skip
    """Train the LoRA and write it in half precision; minutes on one core.

    Args:
        device: where to train; None is the CPU. Pictures are rendered and encoded on the CPU.
    """
    from safetensors.torch import load_file

    portraits = load_portraits()
    for module in (portraits.unet, portraits.text_encoder, portraits.vae):
        module.requires_grad_(False)
    with tempfile.TemporaryDirectory() as scratch:
        subject = _subject(portraits)
        portraits.unet.to(device or "cpu")
        denoiser = Denoiser.from_diffusers(portraits.pipeline())
        (made,) = train_loras(denoiser, [lambda: subject], [FILE.stem], scratch, recipe, progress=progress)
        half = {k: v.half() if v.is_floating_point() else v for k, v in load_file(made).items()}
    return save_safetensors(path, half)
