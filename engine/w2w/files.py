"""Safetensors files with a kind and a version in their header, written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from ..errors import refuse
from ..untrusted import named


def write_file(path: str | Path, tensors: Mapping[str, torch.Tensor], kind: str, version: int, head: dict) -> Path:
    """Write ``tensors`` with string metadata."""
    from safetensors.torch import save_file

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    plain = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
    try:
        save_file(plain, scratch, {"format": "pt", "kind": kind, "version": str(version), **head})
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    return path


def open_file(path: str | Path, kind: str, version: int) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and header of a file of that kind.

    Raises:
        VitrineError: missing, corrupt, of another kind, of a later version, or holding NaN or Inf.
    """
    from safetensors import safe_open

    path = Path(path)
    if not path.is_file():
        raise refuse("file", path.name, "an existing .safetensors file", "check the name")
    told = named(path, "file", "a whole safetensors file", "copy or build it again")
    with told, safe_open(str(path), "pt") as opened:
        head = dict(opened.metadata() or {})
        check_header(path.name, head, kind, version)
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    for key, value in tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise refuse("file", f"{path.name}: NaN or Inf in {key!r}", "finite numbers", "build it again")
    return tensors, head


def check_header(name: str, head: Mapping[str, str], kind: str, version: int) -> None:
    """Refuse another kind of file, or one of a later version."""
    if head.get("kind") != kind:
        raise refuse("file", f"{name} of kind {head.get('kind', 'none')}", kind, "choose a file made by this method")
    if int(head.get("version", "0")) > version:
        raise refuse("file version", head["version"], f"up to {version}", "update Vitrine")
