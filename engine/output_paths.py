"""Where a command or a configuration writes: marked in the type, checked before any work.

::

    @dataclass
    class Report:
        out: OutFile = Path("report.html")

    refuse_unwritable_outputs(Report(Path(".")))   # VitrineError: out: given . ...
"""

from __future__ import annotations

import dataclasses
import tempfile
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from .errors import refuse
from .files import refuse_long_names

Kind = Literal["file", "folder"]


@dataclass(frozen=True)
class Writes:
    """Marks a setting as the path of an output.

    Attributes:
        kind: a file, or a folder that receives files.
        otherwise: name of the setting that holds the path where this one is None; "" where nothing is written then.
    """

    kind: Kind
    otherwise: str = ""


OutFile = Annotated[Path, Writes("file")]
OutFolder = Annotated[Path, Writes("folder")]


def refuse_unwritable_outputs(settings: Any) -> None:
    """Checks every output of a dataclass, nested ones included.

    Raises:
        VitrineError: As :func:`refuse_unwritable`.
    """
    for name, path, kind in outputs_of(settings):
        refuse_unwritable(path, kind, name)


def outputs_of(settings: Any) -> Iterator[tuple[str, Path, Kind]]:
    """(name, path, kind) of each output of a dataclass, nested ones included; those that are None are left out."""
    types = typing.get_type_hints(type(settings), include_extras=True)
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from outputs_of(value)
            continue
        marker = next(_markers(types[field.name]), None)
        if marker is None:
            continue
        if value is None and marker.otherwise:
            value = getattr(settings, marker.otherwise)
        if value is not None:
            yield field.name, Path(value), marker.kind


def _markers(annotation: Any) -> Iterator[Writes]:
    yield from (entry for entry in getattr(annotation, "__metadata__", ()) if isinstance(entry, Writes))
    for member in typing.get_args(annotation):
        yield from _markers(member)


def refuse_unwritable(path: str | Path, kind: Kind, what: str = "out") -> None:
    """Refuses an output that could not be written once the work is done. Leaves nothing behind.

    Raises:
        VitrineError: If ``path`` is a folder where a file is wanted or the other way round, a file is in its way, a
            name in it is too long, or its folder cannot be written to.
    """
    path = Path(path)
    refuse_long_names(path, what)
    if kind == "file" and path.is_dir():
        raise refuse(what, path, "a file", f"name a file in that folder, such as {path / 'result'}")
    if kind == "folder" and path.exists() and not path.is_dir():
        raise refuse(what, path, "a folder", "choose another name")
    folder = path if path.is_dir() else next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise refuse(what, f"{path}, where {folder.name} is a file", "a path through folders", "choose another path")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        shown = f"{path} ({folder}: {error.strerror})"
        raise refuse(what, shown, "a folder that can be written to", "choose another path") from error
