"""A diffusers pipeline that LoRA files are put on, at any strength, for the LoRA report."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import VitrineError, refuse
from ..io.files import named
from ..io.lora_writing import write_lora
from ..jobs.digests import described
from ..w2w.loras.base_weights import BaseWeights, modules_of
from ..w2w.loras.lora_facts import LoraFacts, facts_of
from ..w2w.loras.lora_files import read_lora
from .components import components_of
from .lora_report_samples import Loading, OnModel
from .nemo import NEMOPipeline

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

ADAPTER = "vitrine_lora_report"
_NAMED = 8
"""Layers that are named where they did not arrive."""


class PipelineModel:
    """Any text-to-image pipeline of a known family.

    Args:
        pipe: diffusers' own pipeline; LoRAs that are on it stay, and count as part of the model.
        size: (height, width) of the samples in pixels; none: the pipeline's own.
    """

    def __init__(self, pipe: DiffusionPipeline, size: tuple[int, int] | None = None) -> None:
        self.pipe, self._tools = pipe, NEMOPipeline.from_pipe(pipe, size=size)
        self.shape: tuple[int, ...] = self._tools.latent_shape()
        self.shift = float(getattr(pipe.scheduler.config, "shift", None) or 1.0)
        # now: later a LoRA is in the network
        self.identity: dict[str, object] = {name: described(part) for name, part in components_of(pipe).items()}
        self._others = list(pipe.get_active_adapters()) if hasattr(pipe, "get_active_adapters") else []
        self._untouched = not any(pipe.get_list_adapters().values()) if hasattr(pipe, "get_list_adapters") else True

    @property
    def backbone(self) -> torch.nn.Module:
        """UNet or transformer."""
        network: torch.nn.Module = self._tools._network
        return network

    def facts(self, path: str | Path) -> LoraFacts:
        """Of a file, with this model's weights for a DoRA."""
        return facts_of(path, BaseWeights.of_module(self.backbone))

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """(n, 3, H, W) in [0, 1]."""
        with torch.no_grad():
            pixels = torch.cat([self._tools._adapter.decode(row).float().cpu() for row in latents.split(4)])
        return (pixels / 2 + 0.5).clamp(0, 1)

    def pieces(self, word: str) -> int:
        """Tokens of a word; 1 where the pipeline has no tokenizer."""
        tokenizer = getattr(self.pipe, "tokenizer", None)
        return 1 if tokenizer is None else len(tokenizer.tokenize(word))

    @contextmanager
    def lora(self, facts: LoraFacts) -> Iterator[PipelineLora]:
        """Loads the file as it is, or what it says in names that diffusers reads, where diffusers refuses it."""
        try:
            note = self._load(facts)
            yield PipelineLora(self, _loading(self, facts, note))
        finally:
            self._unload()
            self._tools.maybe_free_model_hooks()

    def _load(self, facts: LoraFacts) -> str:
        try:
            self._load_file(facts.path)
            return ""
        except VitrineError as error:
            problem = str(error)
        self._unload()
        if facts.file is None:
            raise refuse("LoRA", facts.path.name, "a LoRA of this model", facts.problem)
        base = BaseWeights.of_module(self.backbone)
        with tempfile.TemporaryDirectory() as scratch:
            lora = read_lora(facts.file, base=base)
            self._load_file(write_lora(Path(scratch) / "converted.safetensors", lora))
        reason = problem.split("accepted:")[0].strip(" ;").split("\n")[0][:200]
        return f"diffusers does not load the file itself ({reason}); measured is the same change in plain factors"

    def _load_file(self, path: Path) -> None:
        with named(path, "LoRA", "a LoRA of this model, as safetensors", "check the file"):
            self.pipe.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name=ADAPTER)
        if ADAPTER not in self.pipe.get_active_adapters():
            raise refuse("LoRA", path.name, "a LoRA of this model", "none of its layers fits")

    def _unload(self) -> None:
        if self._untouched:
            self.pipe.unload_lora_weights()
            return
        if any(ADAPTER in names for names in self.pipe.get_list_adapters().values()):
            self.pipe.delete_adapters(ADAPTER)
        if self._others:
            self.pipe.set_adapters(self._others)


class PipelineLora:
    """A LoRA next to a pipeline's model."""

    def __init__(self, model: PipelineModel, loading: Loading) -> None:
        self.model, self.loading = model, loading

    @contextmanager
    def at(self, strength: float) -> Iterator[OnModel]:
        """The model with the LoRA at a strength, in text encoders too; 0 is the model without it."""
        pipe, others = self.model.pipe, self.model._others
        if strength or others:
            pipe.enable_lora()
            names = [*others, ADAPTER] if strength else others
            pipe.set_adapters(names, [1.0] * len(others) + [strength] * bool(strength))
        else:
            pipe.disable_lora()
        tools = self.model._tools
        height, width = (side * tools._adapter.factor for side in self.model.shape[1:])
        with tools._in_use(), torch.no_grad():
            yield OnModel(tools._denoiser(), tools.conditions, tools._adapter.empty((height, width)))


def _loading(model: PipelineModel, facts: LoraFacts, note: str) -> Loading:
    """Which of the file's layers are in the network now."""
    arrived = {path for path, module in modules_of(model.backbone).items() if ADAPTER in getattr(module, "lora_A", ())}
    encoders = (getattr(model.pipe, name, None) for name in ("text_encoder", "text_encoder_2", "text_encoder_3"))
    text = sum(ADAPTER in getattr(m, "lora_A", ()) for e in encoders if e is not None for m in e.modules())
    wanted = set() if facts.file is None else set(facts.file.entries)
    missing = wanted - arrived
    if arrived - wanted and len(arrived) >= len(wanted):  # other names for the same layers, some of them fused
        missing = set()
    return Loading("diffusers", len(wanted) - len(missing), len(wanted), tuple(sorted(missing)[:_NAMED]), text, note)
