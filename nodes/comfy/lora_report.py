"""A MODEL that LoRA files are put on by core's own loader, for the LoRA report; and the report of a node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.sd
import comfy.utils
import folder_paths
import torch

from ...engine.errors import VitrineError, refuse
from ...engine.io.file_names import safe_name
from ...engine.nemo.check import Pictures
from ...engine.pipelines.lora_report_samples import Loading, OnModel, ReportConfig
from ...engine.pipelines.lora_reports import LoraReport, Material, lora_report
from ...engine.runtime.progress import Progress
from ...engine.w2w.building.lora_neighbours import files_to_compare
from ...engine.w2w.loras.base_weights import BaseWeights
from ...engine.w2w.loras.lora_facts import LoraFacts, facts_of
from ...engine.w2w.loras.lora_files import read_lora
from . import compat_comfyui as core
from .conditioning import prompt_conditions, token_count
from .contents import clip_contents, model_contents, vae_contents
from .lora import with_lora
from .model import backbone_of, blank_latents, decode, loading_denoiser_of, unpatched
from .saved import stamp

KIND = "vitrine_lora_report"
_NAMED = 8


class ComfyModel:
    """MODEL, CLIP and VAE, with what is on them counted as part of the model; see ``ReportModel`` of the engine."""

    def __init__(self, model: Any, clip: Any, vae: Any, latent: dict) -> None:
        self.model, self.clip, self.vae = model, clip, vae
        self.blank = blank_latents(model, latent)[:1]
        self.shape: tuple[int, ...] = tuple(self.blank.shape[1:])
        self.shift = float(getattr(model.get_model_object("model_sampling"), "shift", None) or 1.0)
        self.identity: dict[str, object] = {
            "model": model_contents(model), "CLIP": clip_contents(clip), "VAE": vae_contents(vae),
        }  # fmt: skip

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
    def lora(self, facts: LoraFacts) -> Iterator[ComfyLora]:
        """The file in memory, as core's loader takes it."""
        tensors = comfy.utils.load_torch_file(str(facts.path), safe_load=True)
        loading = _loading(self, facts, tensors)
        if loading.loaded or facts.file is None:
            yield ComfyLora(self, tensors, loading)
            return
        # none of its layers is known to core: what it says, in names that core reads
        lora = read_lora(facts.file, base=self._weights())
        with_lora(self.model, lora)  # refuses another model's
        note = "core's loader knows none of its names; measured is the same change under names that it knows"
        yield ComfyLora(self, None, loading._replace(note=note), lora)


class ComfyLora:
    """A LoRA given next to a MODEL."""

    def __init__(self, holder: ComfyModel, tensors: Any, loading: Loading, lora: Any = None) -> None:
        self.holder, self.loading, self._tensors, self._lora = holder, loading, tensors, lora

    @contextmanager
    def at(self, strength: float) -> Iterator[OnModel]:
        """Clones of MODEL and CLIP with the LoRA at a strength; 0 is the model without it."""
        model, clip = self.holder.model, self.holder.clip
        if strength and self._lora is not None:
            model = with_lora(model, self._lora, strength)
        elif strength:
            model, clip = comfy.sd.load_lora_for_models(model, clip, self._tensors, strength, strength)
        blank = self.holder.blank

        def conditions(prompts: Any) -> list[Any]:
            return prompt_conditions(model, clip, list(prompts), blank)

        denoiser = loading_denoiser_of(model)
        yield OnModel(denoiser, conditions, conditions([""])[0])


def _loading(holder: ComfyModel, facts: LoraFacts, tensors: dict[str, torch.Tensor]) -> Loading:
    """Which of the file's layers core's loader takes."""
    names = core.model_lora_keys_unet(holder.model.model, {})
    texts = core.model_lora_keys_clip(holder.clip.cond_stage_model, {})

    def taken(part: dict[str, torch.Tensor], known: dict[str, Any]) -> int:
        return len(core.load_lora(core.convert_lora(dict(part)), known, log_missing=False))

    entries = {} if facts.file is None else facts.file.entries
    arrived = taken(tensors, names)
    missing: list[str] = []
    if arrived < len(entries):
        missing = [path for path, entry in entries.items()
                   if not taken({key: tensors[key] for _, key in entry.keys if key in tensors}, names)]  # fmt: skip
    loaded = len(entries) - len(missing) if arrived else 0
    dropped = tuple((missing if arrived else sorted(entries))[:_NAMED])
    return Loading("ComfyUI", loaded, len(entries), dropped, taken(tensors, texts))


@dataclass(frozen=True)
class Asked:
    """What a node asks for.

    Attributes:
        lora: one of ComfyUI's LoRA files; compared with the others of its folder with ``compare``.
        name: of the folder in output/vitrine_lora_report.
        captions, triggers, ordinary: empty ones take what the file says, and the usual prompts.
        pictures: (P, 3, H, W) in [0, 1], the training pictures.
        minutes: budget; 0 is without end.
    """

    lora: str
    name: str
    captions: list[str]
    triggers: list[str]
    ordinary: list[str]
    pictures: torch.Tensor | None = None
    minutes: float = 0.0
    compare: bool = True


def reported(holder: ComfyModel, asked: Asked, config: ReportConfig, progress: Progress) -> LoraReport:
    """The report, in its folder."""
    if not asked.lora:
        raise refuse("lora", "none", "a file of models/loras", "put a LoRA there and choose it")
    path = Path(folder_paths.get_full_path_or_raise("loras", asked.lora))
    folder = Path(folder_paths.get_output_directory()) / KIND / safe_name(asked.name)
    rows, shown = asked.pictures, Pictures()
    if rows is not None:
        shown = Pictures([f"picture {i + 1}" for i in range(len(rows))], rows.__getitem__, rows)
    extra: dict[str, Any] = {"ordinary": tuple(asked.ordinary)} if asked.ordinary else {}
    extra |= {"folder": path.parent} if asked.compare else {}
    material = Material(shown, tuple(asked.captions), tuple(asked.triggers), **extra)
    return lora_report([path], folder, lambda: holder, material, config, asked.minutes or None, progress)


def compared_stamp(lora: str) -> str:
    """What tells whether a LoRA, or one that it is compared with, has changed."""
    path = folder_paths.get_full_path("loras", lora) if lora else None
    return "" if path is None else stamp(*files_to_compare([Path(path)], Path(path).parent))


def page_entry(report: LoraReport) -> dict[str, str]:
    """Where the page is, as the browser asks ComfyUI for files."""
    subfolder = report.folder.relative_to(folder_paths.get_output_directory()).as_posix()
    return {"filename": report.page.name, "subfolder": subfolder, "type": "output"}
