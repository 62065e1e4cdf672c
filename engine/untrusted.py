"""Files come from strangers: whatever is wrong with one ends in a single kind of error that names it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .errors import VitrineError, refuse

if TYPE_CHECKING:
    import torch


class named:
    """Around the reading of one file: any failure inside becomes an error with the file's name in it.

    ::

        with named(path, "space", "a whole safetensors file", "build it again"), safe_open(path, "pt") as opened: ...

    Raises:
        VitrineError: whatever failed.
    """

    def __init__(self, path: str | Path, what: str, accepted: str, remedy: str) -> None:
        self.name, self.what, self.accepted, self.remedy = Path(path).name, what, accepted, remedy

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, VitrineError):
            if self.name not in str(error):
                raise VitrineError(f"{self.name}: {error}") from error
        elif isinstance(error, Exception):  # foreign bytes fail in each library's own way
            given = f"{self.name} ({type(error).__name__}: {error})"
            raise refuse(self.what, given, self.accepted, self.remedy) from error


def parse_json(text: str) -> Any:
    """``json.loads`` that fails in one way only.

    Raises:
        ValueError: no JSON, or nested deeper than Python's stack.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def parse_table(text: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: anything else.
    """
    found = parse_json(text)
    if not isinstance(found, dict):
        raise ValueError(f"a JSON object is wanted, not a {type(found).__name__}")
    return found


def check_tensors(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that are not finite floating-point numbers.

    Raises:
        VitrineError: another dtype, or NaN or Inf; names the tensor.
    """
    import torch

    for key, value in tensors.items():
        if not value.is_floating_point():
            raise refuse(f"tensor {key!r}", str(value.dtype), "floating-point numbers", "write the file again")
        wide = value.float() if value.element_size() == 1 else value  # isfinite has no 8-bit floats
        if not bool(torch.isfinite(wide).all()):
            raise refuse(f"tensor {key!r}", "NaN or Inf", "finite numbers", "make the file again")
