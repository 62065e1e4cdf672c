"""Files appear whole or not at all: write beside the target, flush to the disk, rename."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import refuse
from ..untrusted import named, parse_json

KEY = "vitrine"
"""The safetensors metadata key that holds our JSON header."""

TEMPORARY = ".tmp-vitrine"


def write_whole(path: str | Path, write: Callable[[str], None]) -> Path:
    """Let ``write`` fill a temporary file in the same folder, then rename it to ``path``; an error leaves nothing."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.parent / f".{path.name}.{secrets.token_hex(4)}{TEMPORARY}"
    try:
        write(str(scratch))
        with open(scratch, "rb+") as handle:
            os.fsync(handle.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    return path


def save_tensors(path: str | Path, tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]) -> Path:
    """Write a safetensors file whose metadata holds ``header`` as JSON."""
    from safetensors.torch import save_file

    dense = torch.contiguous_format
    plain = {name: tensor.detach().cpu().clone(memory_format=dense) for name, tensor in tensors.items()}
    return write_whole(path, lambda scratch: save_file(plain, scratch, metadata={KEY: json.dumps(header)}))


def open_tensors(path: str | Path, kind: str, version: int) -> tuple[Any, dict[str, Any]]:
    """Memory-map a safetensors file of ours: its ``safe_open`` handle and checked header.

    Raises:
        VitrineError: missing, truncated, not safetensors, not written by Vitrine, another kind or format version.
    """
    from safetensors import safe_open

    path = Path(path)
    if not path.is_file():
        raise refuse("file", str(path), f"an existing {kind} file", "check the path")
    with named(path, "file", "a complete safetensors file", "it is damaged or something else; write it again"):
        handle = safe_open(str(path), framework="pt")
        metadata = handle.metadata() or {}
        return handle, _header(path, metadata.get(KEY), kind, version)


def _header(path: Path, text: str | None, kind: str, version: int) -> dict[str, Any]:
    try:
        header = parse_json(text) if text else None
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("kind") != kind:
        given = header.get("kind") if isinstance(header, dict) else "no readable Vitrine header"
        raise refuse("file", f"{path} ({given})", f"a file of kind {kind}", "this file was not written by that tool")
    if header.get("version") != version:
        remedy = "update Vitrine, or write the file again with this one"
        raise refuse("format version", f"{header.get('version')!r} in {path}", f"{version} for {kind}", remedy)
    return header
