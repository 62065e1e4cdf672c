"""MODEL, CLIP and VAE as inputs of a job that resumes: their weights, and what nodes have put on them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ...engine.jobs.digests import network_digest

_DEPTH = 6
"""How far a patch is looked into: a node's numbers are in its closure, or in attributes of its object."""


def model_contents(model: Any) -> list[Any]:
    """A MODEL's checkpoint, and its LoRAs, patches, options and sampling."""
    sampling = model.get_model_object("model_sampling")
    return [
        _patched(model.model.diffusion_model, "diffusion_model.", model), network_digest(sampling),
        _plain(model.model_options), _plain(model.wrappers), _plain(sorted(model.object_patches)),
    ]  # fmt: skip


def clip_contents(clip: Any) -> list[Any]:
    """A CLIP's text encoders, their LoRAs, the layer that is read (CLIP Set Last Layer) and its tokenizer's options."""
    layer = [clip.layer_idx, clip.use_clip_schedule, type(clip.tokenizer).__name__, _plain(clip.tokenizer_options)]
    return [_patched(clip.cond_stage_model, "", clip.patcher), layer, _plain(clip.patcher.model_options)]


def vae_contents(vae: Any) -> str:
    """A VAE's weights."""
    return network_digest(vae.first_stage_model)


def _patched(network: nn.Module, prefix: str, patcher: Any) -> list[Any]:
    """Weights as in the checkpoint, whatever is loaded at the moment, and the patches that go onto them."""
    originals = {k.removeprefix(prefix): b.weight for k, b in patcher.backup.items() if k.startswith(prefix)}
    return [network_digest(network, originals), {str(key): _plain(p) for key, p in patcher.patches.items()}]


def _plain(value: Any, depth: int = _DEPTH) -> Any:
    """What a digest understands of anything that nodes put into a model's options: numbers, tensors, code."""
    below = partial(_plain, depth=depth - 1)
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.Tensor)):
        return value
    if isinstance(value, nn.Module) or depth == 0 or hasattr(value, "model_options"):
        return type(value).__qualname__
    if isinstance(value, Mapping):
        return {str(key): below(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [below(entry) for entry in value]
    if isinstance(value, partial):
        return [below(value.func), below(value.args), below(value.keywords)]
    if isinstance(value, MethodType):
        return [value.__func__.__qualname__, below(value.__self__)]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [value.__module__, value.__qualname__, value.__code__.co_code, [below(c) for c in cells if _lasting(c)]]
    kept = {key: entry for key, entry in getattr(value, "__dict__", {}).items() if not key.startswith("_")}
    return [type(value).__qualname__, {key: below(entry) for key, entry in kept.items() if _lasting(entry)}]


def _lasting(value: Any) -> bool:
    """Whether it is a setting; lists and tables that a patch keeps are often what it has seen so far."""
    return not isinstance(value, (list, dict, set))
