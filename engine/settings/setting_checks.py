"""Annotations of settings that are checked before any work: output paths, file names, lower bounds and picture sizes.

::

    @dataclass
    class Report:
        out: OutFile = Path("report.html")
        side: Side = 64

    check_settings(Report(Path(".")))   # VitrineError: out: given .; accepted: a file ...
"""

from __future__ import annotations

import dataclasses
import tempfile
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from ..errors import refuse
from ..io.file_names import safe_name
from ..io.files import refuse_long_names
from .config import check_numbers
from .option import Option
from .sizes import check_sides

Kind = Literal["file", "folder", "either"]


@dataclass(frozen=True)
class Writes:
    """Marks a setting as the path of an output.

    Attributes:
        kind: a file, a folder for files, or either.
        otherwise: name of the setting with the path if this one is None; "" if nothing is written then.
    """

    kind: Kind
    otherwise: str = ""


@dataclass(frozen=True)
class Pixels:
    """Marks a number, or each of a tuple of numbers, as a side of a picture.

    Attributes:
        own: whether 0 is allowed, which means the model's own.
    """

    own: bool = False


@dataclass(frozen=True)
class NamesFile:
    """Marks a text that becomes a part of a file's or a folder's name."""


Mark = Writes | Option | Pixels | NamesFile
OutFile = Annotated[Path, Writes("file")]
OutFolder = Annotated[Path, Writes("folder")]
Count = Annotated[int, Option(ge=1)]
"""A number of images, steps ..."""
FileName = Annotated[str, NamesFile()]
Side = Annotated[int, Pixels()]
OwnSide = Annotated[int, Pixels(own=True)]
"""Side of a picture; 0 is the model's default."""


def check_settings(settings: Any) -> None:
    """Checks numbers and marked settings of a dataclass, nested ones included; None is skipped."""
    check_numbers(settings)
    for name, value, mark in marked(settings):
        if isinstance(mark, Writes):
            refuse_unwritable(value, mark.kind, name)
            continue
        if isinstance(mark, NamesFile):
            safe_name(value, name)
            continue
        if isinstance(mark, Pixels):
            numbers = value if isinstance(value, tuple) else (value,)
            check_sides(name, *(n for n in numbers if n or not mark.own))
        elif not mark.accepts(value):
            raise refuse(name, value, mark.choices or mark.accepted, mark.remedy or "leave it out")


def marked(settings: Any) -> Iterator[tuple[str, Any, Mark]]:
    """(name, value, mark) of each marked setting that is not None."""
    types = typing.get_type_hints(type(settings), include_extras=True)
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            check_numbers(value)
            yield from marked(value)
            continue
        for mark in _marks(types[field.name]):
            fallback = mark.otherwise if isinstance(mark, Writes) and value is None else ""
            value = getattr(settings, fallback) if fallback else value
            if value is not None:
                yield field.name, value, mark


def _marks(annotation: Any) -> Iterator[Mark]:
    known = (Writes, Option, Pixels, NamesFile)
    yield from (mark for mark in getattr(annotation, "__metadata__", ()) if isinstance(mark, known))
    for member in typing.get_args(annotation):
        yield from _marks(member)


def refuse_unwritable(path: str | Path, kind: Kind, what: str = "out") -> None:
    """Refuses an output path that could not be written after the work. Creates nothing."""
    path = Path(path)
    refuse_long_names(path, what)
    if kind == "file" and (path.name in ("", "..") or path.exists() and not path.is_file()):
        raise refuse(what, str(path), "a file", "name a new file, or one that may be replaced")
    if kind == "folder" and path.exists() and not path.is_dir():
        raise refuse(what, str(path), "a folder", "choose another name")
    folder = path if path.is_dir() else next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise refuse(what, f"{path}, where {folder.name} is a file", "a path through folders", "choose another path")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        shown = f"{path} ({folder}: {error.strerror})"
        raise refuse(what, shown, "a folder that can be written to", "choose another path") from error
