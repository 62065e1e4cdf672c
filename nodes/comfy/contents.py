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
"""Objects within objects into which a patch is followed: a node's numbers are in its closure, or in attributes."""


def model_contents(model: Any) -> list[Any]:
    """A MODEL's checkpoint, and its LoRAs, patches, options and sampling."""
    sampling, network = model.get_model_object("model_sampling"), model.model.diffusion_model
    own = frozenset(map(id, network.modules()))  # where they are in a patch's hands, their weights count above
    patches = {key: model.object_patches[key] for key in sorted(model.object_patches)}
    return [
        _patched(network, "diffusion_model.", model),
        network_digest(sampling),
        _plain(model.model_options, own=own),
        _plain(model.wrappers, own=own),
        _plain(patches, own=own),
    ]


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


def _plain(value: Any, depth: int = _DEPTH, own: frozenset[int] = frozenset()) -> Any:
    """What a digest understands of anything that nodes put into a model's options.

    A function is known by its name and what it closes over.

    Args:
        own: ``id`` of each module of the MODEL's own network.
    """
    same, below = (partial(_plain, depth=d, own=own) for d in (depth, depth - 1))
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.Tensor)):
        return value
    whole = hasattr(value, "model_options") or hasattr(value, "diffusion_model")  # MODEL, or what is in one
    if depth == 0 or whole or id(value) in own:
        return type(value).__qualname__
    if isinstance(value, nn.Module):
        return [network_digest(value), {key: below(entry) for key, entry in vars(value).items() if key[:1] != "_"}]
    if isinstance(value, Mapping):
        return {str(key): same(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [same(entry) for entry in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(same, value), key=str)  # sets of texts have another order in each process
    if isinstance(value, partial):
        return [below(value.func), below(value.args), below(value.keywords)]
    if isinstance(value, MethodType):
        return [value.__func__.__qualname__, below(value.__self__)]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        name, defaults = f"{value.__module__}.{value.__qualname__}", [value.__defaults__, value.__kwdefaults__]
        return [name, [below(c) for c in cells if _lasting(c)], below(defaults)]
    kept = {key: entry for key, entry in getattr(value, "__dict__", {}).items() if not key.startswith("_")}
    lasting = {key: entry for key, entry in kept.items() if _lasting(entry) or _of_numbers(entry)}
    return [type(value).__qualname__, {key: below(entry) for key, entry in lasting.items()}]


def _lasting(value: Any) -> bool:
    """Whether it is a setting; lists and tables in a closure are often what a patch has seen so far."""
    return not isinstance(value, (list, dict, set))


def _of_numbers(value: Any) -> bool:
    """Whether a list or table contains numbers, texts and tensors alone, as the settings of attention patches do."""
    if isinstance(value, Mapping):
        return all(map(_of_numbers, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_of_numbers, value))
    return value is None or isinstance(value, (bool, int, float, str, torch.Tensor))
