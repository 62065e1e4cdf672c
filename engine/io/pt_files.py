"""Published ``.pt`` files, which explicit import commands open: nothing is unpickled, or larger than it says."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

MAPPED = 1 << 30
"""Bytes from which a file's tensors are mapped instead of read."""


def read_pt(path: str | Path) -> Any:
    """What ``torch.save`` wrote, of tensors and plain values. Errors are the library's; call it under ``named``.

    Raises:
        ValueError: If the file is no archive of ``torch.save``, is compressed, or holds a tensor larger than its
            numbers.
    """
    path = Path(path)
    if not zipfile.is_zipfile(path):
        raise ValueError("no archive: written by PyTorch before 1.6, or by something else")
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    size = path.stat().st_size
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or sum(e.file_size for e in entries) > size:
        raise ValueError(f"a compressed archive of {size} bytes; torch.save stores as it is")
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=size > MAPPED)
    for tensor in _tensors(content):
        plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not plain or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ValueError(f"a tensor {tuple(tensor.shape)} that is larger than its numbers, or no plain one")
    return content


def _tensors(content: Any, depth: int = 0) -> list[torch.Tensor]:
    if isinstance(content, torch.Tensor):
        return [content]
    if depth > 10:
        raise ValueError("nested too deeply")
    inner = content.values() if isinstance(content, dict) else content if isinstance(content, (list, tuple)) else ()
    return [tensor for part in inner for tensor in _tensors(part, depth + 1)]
