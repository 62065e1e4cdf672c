"""The copy check and the LoRA report on a MODEL: core's own sampler, and its own loader of LoRAs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.sample
import comfy.sd
import comfy.utils
import torch

from ...engine.copies import CopyCheck, Instruments, Pictures
from ...engine.copies.lora_contents import files_to_compare
from ...engine.copies.lora_samples import Loading, OnModel
from ...engine.errors import VitrineError, refuse
from ...engine.io.file_names import safe_name
from ...engine.io.picture_files import open_picture, pixels_of
from ...engine.nemo import ProbeConfig, make_probe, score_prompts
from ...engine.nemo.ssim import WINDOW
from ...engine.w2w.loras.base_weights import BaseWeights
from ...engine.w2w.loras.lora_facts import LoraFacts, facts_of
from ...engine.w2w.loras.lora_files import read_lora
from . import compat_comfyui as core
from .conditioning import literal, prompt_conditions, token_count
from .contents import clip_contents, model_contents, vae_contents
from .lora import with_lora
from .model import backbone_of, blank_latents, decode, denoiser_of, pixels_per_latent, unpatched
from .pictures import as_pictures
from .saved import folder, lora_files, lora_source, stamp

CHECKS, REPORTS = "vitrine_copy_check", "vitrine_lora_report"
"""Folders in ComfyUI's output."""
_NAMED = 8
"""Layers that are named where they did not arrive."""


def work_folder(kind: str, name: str) -> Path:
    """Of one check or report."""
    return folder(kind) / safe_name(name)


def training_pictures(images: torch.Tensor | None) -> Pictures:
    """Of an IMAGE (P, H, W, C); none of None."""
    if images is None:
        return Pictures()
    rows = as_pictures(images, "pictures")[..., :3].movedim(-1, 1).float().cpu()
    return Pictures([f"picture {i + 1}" for i in range(len(rows))], rows.__getitem__, rows)


# --- the copy check -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Sampling:
    """What core's KSampler would take.

    Attributes:
        latent: LATENT, gives the size.
        steps, cfg, sampler, scheduler: of each sample.
    """

    latent: dict
    steps: int
    cfg: float
    sampler: str
    scheduler: str


@dataclass(frozen=True)
class Models:
    """MODEL, CLIP, VAE, and the MODEL without its LoRA, if that is what is checked."""

    model: Any
    clip: Any
    vae: Any
    bare: Any = None

    def size(self, latent: dict) -> tuple[int, ...]:
        """(height, width) of the samples in pixels, whatever factor Empty Latent Image assumes."""
        factor = pixels_per_latent(self.vae)
        return tuple(side * factor for side in blank_latents(self.model, latent).shape[-2:])


def instruments_of(models: Models, sampling: Sampling, config: ProbeConfig) -> Instruments:
    """Core's sampler, and NeMo's score where latents are pictures, large enough to be compared."""
    blank = blank_latents(models.model, sampling.latent)[:1]
    identity = {
        "model": model_contents(models.model),
        "CLIP": clip_contents(models.clip),
        "VAE": vae_contents(models.vae),
        "model without the LoRA": None if models.bare is None else model_contents(models.bare),
        "sampling": [sampling.steps, sampling.cfg, sampling.sampler, sampling.scheduler],
        "size": list(blank.shape[1:]),
        "probe": config,
    }

    def sample(prompt: str, seeds: Sequence[int], bare: bool, after: Callable[[int], None]) -> torch.Tensor:
        model = models.bare if bare and models.bare is not None else models.model
        positive, negative = (literal(models.clip, text) for text in (prompt, ""))
        empty = blank_latents(model, sampling.latent)[:1].cpu()
        noise = torch.cat([comfy.sample.prepare_noise(empty, seed) for seed in seeds])
        samples = comfy.sample.sample(
            model, noise, sampling.steps, sampling.cfg, sampling.sampler, sampling.scheduler, positive, negative,
            empty.repeat(len(seeds), *[1] * (empty.ndim - 1)), disable_pbar=True, seed=seeds[0],
            callback=lambda step, x0, x, total: after(step + 1),
        )  # fmt: skip
        images: torch.Tensor = models.vae.decode(samples)
        return images.reshape(-1, *images.shape[-3:]).movedim(-1, 1)

    @torch.no_grad()
    def score(prompt: str) -> float:
        probe = make_probe(denoiser_of(models.model), config=config)
        (cond,) = prompt_conditions(models.model, models.clip, [prompt], blank)
        channels, height, width = blank.shape[1:]
        ((prompt_score,), _) = score_prompts(probe, [cond], (channels, height, width), None)
        return prompt_score.value

    rows = len(sampling.latent["samples"])
    scored = score if blank.ndim == 4 and min(blank.shape[-2:]) >= WINDOW else None
    return Instruments(sample, sampling.steps, rows, models.bare is not None, scored, identity)


def side_by_side(check: CopyCheck, images: torch.Tensor | None, count: int) -> torch.Tensor:
    """IMAGE (n, H, 2 W or 3 W, 3): sample, what of it is copied, and the training picture, most copied first."""
    rows = []
    for prompt in check.ranked[:count]:
        parts = []
        for file in (prompt.file, prompt.overlay_file):
            parts.append(torch.from_numpy(pixels_of(open_picture(file))) / 255)
        if images is not None:
            picture = images[int(prompt.numbers[prompt.closest])][None, ..., :3].movedim(-1, 1).float().cpu()
            height, width = parts[0].shape[:2]
            parts.append(comfy.utils.common_upscale(picture, width, height, "area", "center")[0].movedim(0, -1))
        rows.append(torch.cat(parts, 1))
    return torch.stack(rows)


# --- the LoRA report ------------------------------------------------------------------------------------------------
class ComfyModel:
    """MODEL, CLIP and VAE, with what is on them counted as part of the model; see ``ReportModel`` of the engine."""

    def __init__(self, model: Any, clip: Any, vae: Any, latent: dict) -> None:
        self.model, self.clip, self.vae = model, clip, vae
        self._put: Callable[[float], tuple[Any, Any]] | None = None
        self.blank = blank_latents(model, latent)[:1]
        self.shape: tuple[int, ...] = tuple(self.blank.shape[1:])
        self.shift = float(getattr(model.get_model_object("model_sampling"), "shift", None) or 1.0)
        self.identity: dict[str, object] = {
            "model": model_contents(model),
            "CLIP": clip_contents(clip),
            "VAE": vae_contents(vae),
        }

    def facts(self, path: str | Path) -> LoraFacts:
        """Of a file, with this model's weights for a DoRA."""
        return facts_of(path, self._weights())

    def _weights(self) -> BaseWeights:
        return BaseWeights.of_module(backbone_of(self.model), unpatched(self.model))

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """(n, 3, H, W) in [0, 1]."""
        return decode(self.model, self.vae, latents.to(self.model.load_device)).movedim(-1, 1).float().cpu()

    def pieces(self, word: str) -> int:
        """Tokens of a word without start and end; 1 where the text encoder's tokens cannot be counted."""
        try:
            return max(1, token_count(self.clip, word) - 2)
        except VitrineError:
            return 1

    @contextmanager
    def lora(self, facts: LoraFacts) -> Iterator[Loading]:
        """The file in memory, as core's loader takes it."""
        tensors = comfy.utils.load_torch_file(str(facts.path), safe_load=True)
        loading = self._loading(facts, tensors)
        if loading.loaded or facts.file is None:
            self._put = lambda strength: comfy.sd.load_lora_for_models(
                self.model, self.clip, tensors, strength, strength
            )
        else:  # none of its layers is known to core: what it says, in names that core reads
            lora = read_lora(facts.file, base=self._weights())
            with_lora(self.model, lora)  # refuses another model's
            note = "core's loader knows none of its names; measured is the same change under names that it knows"
            loading = loading._replace(note=note)
            self._put = lambda strength: (with_lora(self.model, lora, strength), self.clip)
        try:
            yield loading
        finally:
            self._put = None

    @contextmanager
    def at(self, strength: float) -> Iterator[OnModel]:
        """Clones of MODEL and CLIP with that LoRA at a strength; 0 is the model without it."""
        model, clip = self._put(strength) if strength and self._put else (self.model, self.clip)

        def conditions(prompts: Any) -> list[Any]:
            return prompt_conditions(model, clip, list(prompts), self.blank)

        denoiser = denoiser_of(model)
        yield OnModel(denoiser, conditions, conditions([""])[0])

    def _loading(self, facts: LoraFacts, tensors: dict[str, torch.Tensor]) -> Loading:
        """Which of the file's layers core's loader takes."""
        names = core.model_lora_keys_unet(self.model.model, {})
        texts = core.model_lora_keys_clip(self.clip.cond_stage_model, {})

        def taken(part: dict[str, torch.Tensor], known: dict[str, Any]) -> int:
            return len(core.load_lora(core.convert_lora(dict(part)), known, log_missing=False))

        entries = {} if facts.file is None else facts.file.entries
        arrived = taken(tensors, names)
        missing: list[str] = []
        if arrived < len(entries):
            missing = [
                path
                for path, entry in entries.items()
                if not taken({key: tensors[key] for _, key in entry.keys if key in tensors}, names)
            ]
        loaded = len(entries) - len(missing) if arrived else 0
        dropped = tuple((missing if arrived else sorted(entries))[:_NAMED])
        return Loading("ComfyUI", loaded, len(entries), dropped, taken(tensors, texts))


def lora_path(name: str) -> Path:
    """One of ComfyUI's LoRA files."""
    if not name:
        raise refuse("lora", "none", "a file of models/loras", "put a LoRA there and choose it")
    return lora_source(name)


def compared_stamp(lora: str) -> str:
    """What tells whether a LoRA, or one that it is compared with, has changed."""
    path = lora_source(lora) if lora in lora_files() else None
    return "" if path is None else stamp(*files_to_compare([path], path.parent))
