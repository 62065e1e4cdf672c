"""Digests of a job's inputs: equal content gives equal digests, whatever its name and location.

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
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
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
_NOT_CONTENT = ("transformers_version", "torch_dtype", "dtype", "name_or_path")
"""Configuration keys that record an origin, or repeat what the weights say. Keys with a leading underscore are left
out, too."""
_PLACEMENT = ("accelerate.", "diffusers.hooks", "torch.")
"""Libraries whose hooks move weights and do not change results."""
_LISTED = 8
"""Longest list that is recorded in full."""


def digest(value: object) -> str:
    """32 hexadecimal digits of a value's content.

    Args:
        value: plain values, paths (by their content), tensors, arrays, pictures, networks, schedulers,
            tokenizers, dataclasses, functions with what they close over, containers of these, and any object that has
            ``inputs`` made of these.
    """
    content = hashlib.sha256()
    _add(content, value)
    return content.hexdigest()[:32]


class Files:
    """A list of files by content and order, read in parallel when digested."""

    def __init__(self, paths: Iterable[str | Path]) -> None:
        self.paths = [Path(path) for path in paths]

    @property
    def inputs(self) -> list[str]:
        """A digest per file."""
        with ThreadPoolExecutor(4) as pool:  # hashing releases the GIL
            return list(pool.map(digest, self.paths))


def described(value: object) -> Any:
    """The value itself if it is plain and short, so that errors can show it, else its digest; JSON-compatible."""
    if isinstance(value, Config):
        value = value.to_dict()
    elif isinstance(getattr(value, "inputs", None), Mapping):
        value = value.inputs  # type: ignore[attr-defined]
    if value is None or isinstance(value, (bool, int, float)) or isinstance(value, str) and len(value) <= 80:
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: described(entry) for key, entry in value.items()}
    plain = isinstance(value, (list, tuple)) and all(isinstance(v, (bool, int, float)) for v in value)
    if plain and len(value) <= _LISTED:  # type: ignore[arg-type]
        return list(value)  # type: ignore[call-overload]
    if isinstance(value, nn.Module):
        return {"weights": digest(value), "library": library_of(value)}
    return f"sha256:{digest(value)}"


def network_digest(network: nn.Module, originals: Mapping[str, torch.Tensor] | None = None) -> str:
    """:func:`digest` of a network.

    Args:
        originals: name -> unpatched weight, for parameters that are currently patched.
    """
    content = hashlib.sha256()
    _add_network(content, network, originals)
    return content.hexdigest()[:32]


def library_of(network: nn.Module) -> str:
    """Name and minor version of the library that a network's class comes from; empty if it is not from one.

    A new version of diffusers or transformers may compute something else from equal weights.
    """
    return version_of(type(uncompiled(network)).__module__.split(".")[0])


def version_of(package: str) -> str:
    """``"torch 2.13"``: the patch number is left out, since patch releases keep results."""
    try:
        parts = importlib.metadata.version(package).split(".")
    except importlib.metadata.PackageNotFoundError:
        return ""
    return f"{package} {'.'.join(parts[:2])}"


# --- kinds of values ----------------------------------------------------------------------------------------------
def _add(content: Any, value: Any) -> None:
    """Hashes the kind and size of every value before its content, so that different values cannot collide."""
    if isinstance(value, Config):
        value = value.to_dict()
    if value is None or isinstance(value, (bool, int, float, str)):
        content.update(f"{type(value).__name__} {json.dumps(value)}\n".encode())
    elif isinstance(value, (bytes, bytearray)):
        content.update(b"bytes %d\n" % len(value) + bytes(value))
    elif isinstance(value, Path):
        _add_path(content, value)
    elif isinstance(value, torch.Tensor):
        _add_tensor(content, value)
    elif isinstance(value, nn.Module):
        _add_network(content, value)
    elif isinstance(value, (torch.dtype, torch.device, type)):
        content.update(f"name {value}\n".encode())
    elif isinstance(value, Mapping):
        content.update(b"table %d\n" % len(value))
        for key in sorted(value, key=str):
            _add(content, str(key))
            _add(content, value[key])
    elif isinstance(value, (Sequence, Set)):
        entries = sorted(value, key=str) if isinstance(value, Set) else value
        content.update(b"list %d\n" % len(entries))
        for entry in entries:
            _add(content, entry)
    else:
        _add_object(content, value)


def _add_object(content: Any, value: Any) -> None:
    """Hashes composite objects."""
    content.update(f"object {type(value).__name__}\n".encode())
    if hasattr(value, "inputs"):
        _add(content, value.inputs)
    elif is_dataclass(value):
        _add(content, {f.name: getattr(value, f.name) for f in fields(value) if f.compare})
    elif isinstance(value, partial):
        _add(content, [value.func, list(value.args), value.keywords])
    elif isinstance(value, MethodType):
        _add(content, [value.__func__, value.__self__])
    elif isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        _add(content, [*code_of(value), cells, value.__defaults__, value.__kwdefaults__])
    elif hasattr(value, "getpalette"):  # PIL pictures
        _add(content, [value.mode, list(value.size), value.getpalette(), value.tobytes()])
    elif hasattr(value, "__array_interface__"):
        _add_tensor(content, _array(value))
    elif hasattr(value, "get_vocab"):  # tokenizers
        _add(content, [value.get_vocab(), value.model_max_length, value.special_tokens_map])
    elif hasattr(value, "config") or hasattr(value, "to_dict"):  # schedulers, image processors
        _add(content, _settings(value))
    else:
        accepted = "plain values, files, tensors, networks, and objects with ``inputs`` of these"
        raise refuse("input", type(value).__name__, accepted, "give it a property ``inputs``")


def code_of(function: FunctionType) -> list[object]:
    """Where a function is defined, and what it does: its instructions and the plain constants in them."""
    code = function.__code__
    constants = [c for c in code.co_consts if isinstance(c, (bool, int, float, str, bytes, type(None)))]
    return [function.__module__, function.__qualname__, code.co_code, constants]


def _array(value: Any) -> torch.Tensor:
    import numpy as np

    array = np.ascontiguousarray(value)
    return torch.from_numpy(array.copy() if not array.flags.writeable else array)


def _add_path(content: Any, path: Path) -> None:
    """Hashes a file's content, or a folder's file names and contents without hidden files."""
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
        content.update(b"folder %d\n" % len(files))
        for file in files:
            _add(content, file.relative_to(path).as_posix())
            _add_path(content, file)
        return
    content.update(b"file %d\n" % path.stat().st_size)
    with open(path, "rb") as opened:
        while piece := opened.read(_PIECE):
            content.update(piece)


def _add_tensor(content: Any, tensor: torch.Tensor) -> None:
    if hasattr(tensor, "__tensor_flatten__"):  # quantised weights, which are several tensors
        parts = tensor.__tensor_flatten__()[0]
        _add(content, [type(tensor).__name__, *(getattr(tensor, name) for name in parts)])
        return
    plain = tensor.detach().as_subclass(torch.Tensor)
    content.update(f"tensor {plain.dtype} {tuple(plain.shape)}\n".encode())
    flat = plain.reshape(-1)
    for piece in flat.split(_PIECE):
        content.update(memoryview(piece.contiguous().cpu().view(torch.uint8).numpy()))


# --- networks -----------------------------------------------------------------------------------------------------
def _add_network(content: Any, network: nn.Module, originals: Mapping[str, torch.Tensor] | None = None) -> None:
    """Hashes class, configuration, weights, active adapters with their scales, and patches by other code."""
    network = uncompiled(network)
    _add(content, [type(network).__name__, _settings(network)])
    for name, weight in sorted(_weights(network), key=lambda pair: pair[0]):
        _add(content, name)
        _add_tensor(content, (originals or {}).get(name, weight))
    applied = [p for p in active_patches(network) if not p.owner.startswith(_PLACEMENT)]
    _add(content, sorted(f"{p.kind} {p.where} {p.count}" for p in applied))


ATTENTION_CHOICE = "comfy_attention"
"""A module of newer ComfyUI versions: its ``config`` in a checkpoint names attention kernels and is no weight."""


def _weights(network: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and saved buffers by name, also of offloaded modules; inactive adapters are left out."""
    off = _adapters_off(network)
    for path, module in network.named_modules():
        tensors = dict(module.named_parameters(recurse=False))
        tensors |= persistent_buffers(module)
        for name, stored in tensors.items():
            whole = f"{path}.{name}" if path else name
            if ATTENTION_CHOICE in path.split("."):
                continue
            if any(whole.startswith(prefix) and adapter in whole.split(".") for prefix, adapter in off):
                continue
            whole = whole.replace(".base_layer.", ".")
            yield whole, weight_of(module, name)
            for key, part in _quantised(stored).items():
                yield f"{whole}/{key}", part


def _adapters_off(network: nn.Module) -> list[tuple[str, str]]:
    """(layer path, adapter name) of every inactive adapter."""
    off = []
    for path, module in network.named_modules():
        layer: Any = module
        if hasattr(layer, "base_layer") and hasattr(layer, "active_adapters"):
            on = [] if layer.disable_adapters else [a for a in layer.active_adapters if layer.scaling.get(a)]
            off += [(f"{path}.", a) for a in layer.scaling if a not in on]
    return off


def _quantised(weight: Any) -> dict[str, torch.Tensor]:
    """bitsandbytes' scales of a weight, kept as attributes of it or of its state object."""
    parts = {key: value for key, value in vars(weight).items() if key != "grad"}
    parts |= vars(parts.get("quant_state")) if hasattr(parts.get("quant_state"), "__dict__") else {}
    return {key: value for key, value in parts.items() if isinstance(value, torch.Tensor)}


def _settings(value: Any) -> dict[str, Any]:
    """The configuration of a model, scheduler or processor, without its origin; {} if it has none."""
    config = getattr(value, "config", value)
    table = config if isinstance(config, Mapping) else config.to_dict() if hasattr(config, "to_dict") else {}
    return {"class": type(value).__name__} | _plain(table)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items() if k not in _NOT_CONTENT and not str(k).startswith("_")}
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None), torch.Tensor)) else str(value)
