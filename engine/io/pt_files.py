"""Published ``.pt`` files, read by import commands only, without unpickling code and with sizes checked."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

MAPPED = 1 << 30
"""Files of at least this many bytes are memory-mapped."""


def read_pt(path: str | Path) -> Any:
    """Tensors and plain values that ``torch.save`` wrote. Raises the library's errors; call it inside ``named``.

    Raises:
        ValueError: If the file is not an archive of ``torch.save``, is compressed, or has a tensor that is larger than
            its storage.
    """
    path = Path(path)
    if not zipfile.is_zipfile(path):
        raise ValueError("no archive: written by PyTorch before 1.6, or by something else")
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    size = path.stat().st_size
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or sum(e.file_size for e in entries) > size:
        raise ValueError(f"a compressed archive of {size} bytes; torch.save does not compress")
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=size > MAPPED)
    for tensor in _tensors(content):
        plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not plain or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ValueError(f"a tensor {tuple(tensor.shape)} that is larger than its storage, or not a plain tensor")
    return content


def _tensors(content: Any, depth: int = 0) -> list[torch.Tensor]:
    if isinstance(content, torch.Tensor):
        return [content]
    if depth > 10:
        raise ValueError("nested too deeply")
    inner = content.values() if isinstance(content, dict) else content if isinstance(content, (list, tuple)) else ()
    return [tensor for part in inner for tensor in _tensors(part, depth + 1)]
