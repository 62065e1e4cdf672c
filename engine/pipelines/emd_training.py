"""From the name of a model and a list of prompts to an EMD trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..diffusion.denoiser import Denoiser
from ..emd import StudentPreset
from ..emd.networks import adapted_layers
from ..errors import refuse
from ..io.prompt_files import read_prompts
from ..jobs.stored_text import KnownText, StoredText, in_memory, row_bytes
from ..network.condition import Condition
from ..runtime.footprint import memory_bytes
from ..runtime.processes import ALONE, Workers, processes
from ..runtime.progress import Progress, silent
from .adapter import Adapter, network_of
from .components import text_parts_of
from .emd import decoded, latent_shape
from .loading import FLOW, SHIPPED, LoadConfig, load_pipeline

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

    from ..emd.emd_trainer import Trainer
    from ..emd.train_config import EMDTrainConfig

PORTRAITS = SHIPPED
TEXTS = "texts"
"""Folder, in a run's folder, of text states that are not kept in memory."""
PORTRAIT_SCENES = range(200_000, 202_000)
"""Seeds of the scenes whose captions the portraits model is distilled on by default."""


class TrainingParts(NamedTuple):
    """Teacher, encoded prompts, encoded empty prompt, latent shape, preset, and the pipeline they come from."""

    teacher: Denoiser
    conditions: Condition | StoredText
    null: Condition
    shape: tuple[int, ...]
    preset: StudentPreset
    pipeline: DiffusionPipeline

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """(B, 3, H, W) pictures in [0, 1] of (B, C, h, w) latents."""
        pixels: torch.Tensor = decoded(self.pipeline, latents.to(self.pipeline.vae.device), "pt")
        return pixels

    def trainer(self, config: EMDTrainConfig, folder: str | Path) -> Trainer:
        """A run in ``folder``, new or resumed."""
        from ..emd.emd_trainer import Trainer

        return Trainer(self.teacher, self.conditions, self.shape, config, folder, self.null, self.preset)


def training_parts(
    model: str = PORTRAITS,
    prompts: str | Path | Sequence[str] | None = None,
    base: str | None = None,
    load: LoadConfig | None = None,
    folder: str | Path | None = None,
    memory: int | str = "1GB",
    progress: Progress = silent,
    workers: Workers = ALONE,
    size: Sequence[int] | None = None,
) -> TrainingParts:
    """Load the teacher and encode the prompts on the run's device, empty lines left out.

    Args:
        model: ``"portraits"``, ``"flow portraits"``, a diffusers folder, or a hub id.
        prompts: a text file with one prompt a line, or the prompts; by default captions of portraits.
        base: the model's name in the student's preset; its own by default.
        load: precision and version of the model. Its device must be this process's, which accelerate decides on.
        folder: of the run; text states larger than ``memory`` go into its folder ``texts``.
        memory: what text states may take in memory, in bytes or as "2GB"; room for the encoding of 64 prompts at least.
        workers: processes that share the encoding of such a list.
        size: (height, width) of the student's pictures in pixels; the pipeline's own by default.
    """
    load = load or LoadConfig()
    _check_device(load)
    pipe, texts = _pipeline_and_prompts(model, _lines(prompts), load)
    adapter = Adapter(pipe)
    shape = latent_shape(adapter, *(size or (None, None)))
    pixels = (shape[1] * adapter.factor, shape[2] * adapter.factor)
    pipe.to(processes().device)
    with torch.no_grad():
        encode = partial(_encoded, adapter, pixels)
        encoded_by = {**text_parts_of(pipe), "size": list(pixels)}
        null, row = KnownText.of(adapter.empty(pixels).to("cpu"), encoded_by), encode(texts[:1])
        if row_bytes(row) * len(texts) <= memory_bytes(memory):
            conditions: Condition | StoredText = KnownText.of(in_memory(texts, encode), encoded_by | {"prompts": texts})
        elif folder is None:
            shown = f"{len(texts)}, {row_bytes(row) * len(texts) / 2**20:.0f} MiB of text states"
            raise refuse("prompts", shown, f"{memory}, or a folder for them", "give a folder, or allow more memory")
        else:
            conditions = StoredText.encoded(texts, encode, Path(folder) / TEXTS, encoded_by, progress, workers)
    pipe.to("cpu")
    preset = StudentPreset(base or model, latent_scale=float(pipe.vae.config.get("scaling_factor") or 0.0))
    return TrainingParts(Denoiser.from_diffusers(pipe), conditions, null, shape, preset, pipe)


def _encoded(adapter: Adapter, pixels: tuple[int, int], texts: Sequence[str]) -> Condition:
    return adapter.condition(texts, pixels)


def _lines(prompts: str | Path | Sequence[str] | None) -> list[str]:
    if isinstance(prompts, (str, Path)):
        return read_prompts(prompts)[0] if prompts else []
    return [line.strip() for line in prompts or () if line.strip()]


def _check_device(load: LoadConfig) -> None:
    """Refuse a device that the run would not take."""
    asked, own = load.place, processes().device
    if asked.type != own.type or (asked.index is not None and own.index not in (None, asked.index)):
        remedy = "leave it out; CUDA_VISIBLE_DEVICES and accelerate launch choose among several"
        raise refuse("device", load.device, f"{own}, this process's", remedy)


def _pipeline_and_prompts(model: str, prompts: list[str], load: LoadConfig) -> tuple[Any, list[str]]:
    if model in (PORTRAITS, FLOW) and not prompts:
        from ..portraits import caption, sample_scenes

        prompts = caption(sample_scenes(PORTRAIT_SCENES))
    if not prompts:
        raise refuse("prompts", "none", "one prompt a line", "the student learns the prompts it is trained on")
    pipe = load_pipeline(model, None, replace(load, device="cpu"))
    adapted_layers(network_of(pipe))
    return pipe, prompts
