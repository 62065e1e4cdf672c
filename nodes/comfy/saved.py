"""Files the Save nodes wrote below ComfyUI's output folder, and the examples of them that ship with the pack."""

from __future__ import annotations

import os
from pathlib import Path

import folder_paths

from ...engine.errors import refuse

SHIPPED = Path(__file__).parents[2] / "engine" / "portraits" / "weights" / "examples"
_MARK = " (shipped)"


def plain_name(name: str) -> str:
    """A file name without any path.

    Raises:
        VitrineError: The name is empty, has separators, or begins with a dot.
    """
    if not name or name != os.path.basename(name) or "\\" in name or name.startswith(".") or "\0" in name:
        raise refuse("file name", name, "letters without folders, e.g. portrait-t50", "leave out / and leading dots")
    return name


def folder(kind: str) -> Path:
    """output/<kind>."""
    return Path(folder_paths.get_output_directory()) / kind


def listed(kind: str, ending: str) -> list[str]:
    """Names in output/<kind>, then the shipped example, so that a Load node has something to load at once."""
    names = sorted(p.name for p in folder(kind).glob(f"*{ending}"))
    return [*names, *(f"{p.name}{_MARK}" for p in sorted((SHIPPED / kind).glob(f"*{ending}")))]


def path_of(kind: str, name: str) -> Path:
    """Where an entry of :func:`listed` lies.

    Raises:
        VitrineError: The name leaves the folder.
    """
    shipped = name.endswith(_MARK)
    root = SHIPPED / kind if shipped else folder(kind)
    return root / plain_name(name.removesuffix(_MARK) if shipped else name)


def changed(kind: str, name: str) -> float:
    """When the file was last written; 0 if it is not there."""
    path = path_of(kind, name)
    return path.stat().st_mtime if path.is_file() else 0.0
