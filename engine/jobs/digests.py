"""Digests of a job's inputs: files, weights and pictures by content, settings by equality.

SHA-256 of the whole content, read in pieces: about 1.5 GB per second, so an SDXL network takes three seconds. Unknown
types raise, so no input of a resumed job can be overlooked.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import refuse
from ..network.patches import active_patches
from ..runtime.compat_torch import persistent_buffers
from ..runtime.compiled import uncompiled
from ..runtime.placement import weight_of
from ..settings.config import Config

_PIECE = 2**24
_PLAIN = (bool, int, float, str, type(None))
_NOT_CONTENT = ("transformers_version", "torch_dtype", "dtype", "name_or_path")
"""Configuration keys that record an origin, or repeat what the weights say. Keys with a leading underscore are left
out, too."""
_PLACEMENT = ("accelerate.", "diffusers.hooks", "torch.")
"""Libraries whose hooks move weights and do not change results."""
_LONGEST_LIST, _LONGEST_TEXT = 8, 80
"""Longest that are recorded in full."""
ATTENTION_CHOICE = "comfy_attention"
"""A module of newer ComfyUI versions: its ``config`` in a checkpoint names attention kernels and is no weight."""


def digest(value: object) -> str:
    """32 hexadecimal digits of a value's content.

    Args:
        value: plain values, paths (by the content of the file or folder), tensors, networks, schedulers, tokenizers,
            dataclasses, containers of these, and any object that has ``inputs`` made of these.
    """
    return _sha([json.dumps(_content(value), sort_keys=True).encode()])


def described(value: object) -> Any:
    """The value itself if it is plain and short, so that errors can show it, else its digest; JSON-compatible."""
    if isinstance(value, Config):
        value = value.to_dict()
    elif isinstance(getattr(value, "inputs", None), Mapping):
        value = value.inputs  # type: ignore[attr-defined]
    if isinstance(value, _PLAIN) and not (isinstance(value, str) and len(value) > _LONGEST_TEXT):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: described(entry) for key, entry in value.items()}
    short = isinstance(value, (list, tuple)) and len(value) <= _LONGEST_LIST
    if short and all(isinstance(entry, (bool, int, float)) for entry in value):  # type: ignore[attr-defined]
        return list(value)  # type: ignore[call-overload]
    if isinstance(value, nn.Module):  # a new version of its library may compute something else from equal weights
        library = version_of(type(uncompiled(value)).__module__.split(".")[0])
        return {"": f"sha256:{digest(value)}", "library": library}
    return f"sha256:{digest(value)}"


def version_of(package: str) -> str:
    """``"torch 2.13"``: the patch number is left out, since patch releases keep results. Empty if not installed."""
    try:
        parts = importlib.metadata.version(package).split(".")
    except importlib.metadata.PackageNotFoundError:
        return ""
    return f"{package} {'.'.join(parts[:2])}"


def network_digest(network: nn.Module, originals: Mapping[str, torch.Tensor] | None = None) -> str:
    """A network's class, configuration, weights, adapters with their scales, and patches by other code.

    Args:
        originals: name -> unpatched weight, for parameters that are currently patched.
    """
    network = uncompiled(network)
    weights = {name: _of_tensor((originals or {}).get(name, weight)) for name, weight in _weights(network)}
    applied = [p for p in active_patches(network) if not p.owner.startswith(_PLACEMENT)]
    patches = sorted(f"{p.kind} {p.where} {p.count}" for p in applied)
    return digest([_settings_of(network), weights, patches])


def _sha(pieces: Iterable[Any]) -> str:
    content = hashlib.sha256()
    for piece in pieces:
        content.update(piece)
    return content.hexdigest()[:32]


def _content(value: Any) -> Any:
    """As JSON, in which only equal values are equal: digests stand for tensors, files and networks."""
    if isinstance(value, Config):
        value = value.to_dict()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, bytes):
        return f"bytes {_sha([value])}"
    if isinstance(value, Path):
        return _of_path(value)
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, nn.Module):
        return f"network {network_digest(value)}"
    if isinstance(value, (torch.dtype, torch.device, type)):
        return f"name {value}"
    if isinstance(value, Mapping):
        return {str(key): _content(entry) for key, entry in value.items()}
    if isinstance(value, Set):
        return [_content(entry) for entry in sorted(value, key=str)]
    if isinstance(value, Sequence):
        if all(isinstance(entry, Path) for entry in value):
            with ThreadPoolExecutor(4) as pool:  # hashing releases the GIL
                return list(pool.map(_of_path, value))
        return [_content(entry) for entry in value]
    if hasattr(value, "inputs"):
        parts = value.inputs
    elif is_dataclass(value):
        parts = {f.name: getattr(value, f.name) for f in fields(value) if f.compare}
    elif hasattr(value, "get_vocab"):  # tokenizers
        parts = [value.get_vocab(), value.model_max_length, value.special_tokens_map]
    elif hasattr(value, "config") or hasattr(value, "to_dict"):  # schedulers, image processors
        parts = _settings_of(value)
    else:
        accepted = "plain values, files, tensors, networks, and objects with ``inputs`` of these"
        raise refuse("input", type(value).__name__, accepted, "give it a property ``inputs``")
    return [type(value).__name__, _content(parts)]


def _of_path(path: Path) -> Any:
    """A file by its content; a folder by its file names and contents, without hidden files."""
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
        return {file.relative_to(path).as_posix(): _of_path(file) for file in files}
    with open(path, "rb") as opened:
        return f"file {_sha(iter(lambda: opened.read(_PIECE), b''))}"


def _of_tensor(tensor: torch.Tensor) -> Any:
    if hasattr(tensor, "__tensor_flatten__"):  # quantised weights, which are several tensors
        return [type(tensor).__name__, *(_of_tensor(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])]
    plain = tensor.detach().as_subclass(torch.Tensor)
    pieces = (p.contiguous().cpu().view(torch.uint8).numpy() for p in plain.reshape(-1).split(_PIECE))
    return f"tensor {plain.dtype} {tuple(plain.shape)} {_sha(pieces)}"


def _weights(network: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and saved buffers by name, also of offloaded modules and of adapters that are off."""
    for path, module in network.named_modules():
        if ATTENTION_CHOICE in path.split("."):
            continue
        for name, stored in (dict(module.named_parameters(recurse=False)) | persistent_buffers(module)).items():
            whole = f"{path}.{name}" if path else name
            yield whole, weight_of(module, name)
            # bitsandbytes' scales, kept as attributes of a weight or of its state object
            scales = {key: value for key, value in vars(stored).items() if key != "grad"}
            scales |= getattr(scales.get("quant_state"), "__dict__", {})
            yield from ((f"{whole}/{k}", v) for k, v in scales.items() if isinstance(v, torch.Tensor))


def _settings_of(value: Any) -> dict[str, Any]:
    """Class and configuration of a model, scheduler or processor, without its origin."""
    config = getattr(value, "config", value)
    table = config if isinstance(config, Mapping) else config.to_dict() if hasattr(config, "to_dict") else {}
    return {"class": type(value).__name__, "settings": _without_origin(table)}


def _without_origin(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {str(k): v for k, v in value.items() if k not in _NOT_CONTENT and not str(k).startswith("_")}
        return {key: _without_origin(entry) for key, entry in kept.items()}
    if isinstance(value, Set):
        return sorted(map(str, value))
    if isinstance(value, (list, tuple)):
        return [_without_origin(entry) for entry in value]
    return value if isinstance(value, (*_PLAIN, torch.Tensor)) else str(value)
