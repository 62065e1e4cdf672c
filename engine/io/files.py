"""Atomic writes with one kind of header, and reading of untrusted files with one kind of error.

Everything Vitrine saves is safetensors or JSON. Opening a pickle can run code, so pickles are never read here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..errors import VitrineError, printable, refuse
from .number_checks import all_finite, integer
from .temporary_files import TEMPORARY, sweep, temporary_path

if TYPE_CHECKING:
    import torch

KEY = "vitrine"
"""The safetensors metadata key of our JSON header."""

LONGEST_NAME = 255
"""Most bytes of a name in common file systems."""

LARGEST_HEADER = 100_000_000
"""Bytes of a safetensors header that the library reads; it writes larger ones too."""

PICKLES = (".pt", ".pth", ".ckpt", ".bin", ".pkl")


# --- writing ------------------------------------------------------------------------------------------------------
def write_whole(path: str | Path, write: Callable[[str], None]) -> Path:
    """Writes atomically: ``write`` fills a temporary file in the same folder, which is then renamed to ``path``.

    An error leaves no file. The mode follows the umask, whatever the writing library sets.

    Raises:
        VitrineError: If a name in the path is longer than 255 bytes.
        OSError: If the disk is full, or the folder cannot be written to.
    """
    path = Path(path)
    refuse_long_names(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = temporary_path(path)
    try:
        with _disk_errors(path):
            scratch.touch()
            mode = stat.S_IMODE(scratch.stat().st_mode)
            write(str(scratch))
            scratch.chmod(mode)
            with open(scratch, "rb+") as handle:
                os.fsync(handle.fileno())
            os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    return path


def refuse_long_names(path: str | Path, what: str = "file") -> None:
    """Refuses a path with a name that is too long for common file systems."""
    for name in Path(path).parts:
        if len(os.fsencode(name)) > LONGEST_NAME:
            shown = f"a name of {len(os.fsencode(name))} bytes, {name[:40]}..."
            raise refuse(what, shown, f"at most {LONGEST_NAME} bytes", "choose a shorter name")


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Adds the target's name to write errors, and converts those of safetensors to ``OSError``."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except Exception as error:
        code = re.search(r"(?:os error|code:) (\d+)", str(error))
        if type(error).__name__ != "SafetensorError" or code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error


def write_text(path: str | Path, text: str) -> Path:
    """Writes a UTF-8 text file atomically."""
    return write_whole(path, lambda scratch: _write_text(scratch, text))


def _write_text(path: str, text: str) -> None:
    Path(path).write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> Path:
    """Writes a JSON file atomically."""
    return write_text(path, json.dumps(value, indent=1))


def write_folder(folder: str | Path, write: Callable[[Path], None]) -> Path:
    """Lets ``write`` fill a new folder, whose entries then replace those of ``folder``; an error keeps the old ones.

    Other files in ``folder`` stay. Modes follow the umask.
    """
    import shutil

    folder = Path(folder)
    refuse_long_names(folder, "folder")
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder)
    scratch = temporary_path(folder / folder.name)
    scratch.mkdir()
    try:
        fresh = scratch / "fresh"
        with _disk_errors(folder):
            write(fresh)
            _follow_umask(fresh)
        for entry in fresh.iterdir():
            target = folder / entry.name
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            entry.replace(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _follow_umask(folder: Path) -> None:
    """Gives each file below ``folder`` the mode of a new one."""
    probe = folder / TEMPORARY
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def save_safetensors(
    path: str | Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> Path:
    """Writes a safetensors file atomically. Tensors may be views, share memory, and be on any device.

    Equal contents are equal bytes. Temporary files of the same target that a killed process left are deleted.
    """
    from safetensors.torch import save_file

    if Path(path).parent.is_dir():
        sweep(Path(path).parent, Path(path).name)
    plain: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        storage = own.untyped_storage()
        # copied only where the library requires it: a copy of a large tensor doubles the memory
        plain[name] = own if storage.nbytes() == own.nbytes and storage.data_ptr() not in seen else own.clone()
        seen.add(storage.data_ptr())

    def write(scratch: str) -> None:
        save_file(plain, scratch, {"format": "pt", **(metadata or {})})
        _sort_metadata(scratch)

    return write_whole(path, write)


def _sort_metadata(path: str) -> None:
    """Rewrites a header in place: the library writes metadata in the random order of a hash table."""
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        if size > LARGEST_HEADER:
            shown = f"a header of {size / 1e6:.0f} MB"
            raise refuse("file to write", shown, f"{LARGEST_HEADER / 1e6:.0f} MB, which safetensors reads", "name less")
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= size:
            file.seek(8)
            file.write(text.ljust(size))


def save_artefact(
    path: str | Path,
    tensors: Mapping[str, torch.Tensor],
    kind: str,
    version: int,
    header: Mapping[str, Any],
    check: Callable[[dict[str, torch.Tensor], dict[str, Any]], object],
) -> Path:
    """Writes a Vitrine artefact: safetensors with the kind, the version and ``header`` as JSON metadata.

    Args:
        check: what the reader calls with tensors and header. It sees them before the file is touched, so that nothing
            is written that cannot be read again.
    """
    text = json.dumps({"kind": kind, "version": version, **header})
    with named(path, "file to write", f"a {kind} file that can be read again", "change what it is made of"):
        check_tensors({key: value for key, value in tensors.items() if value.is_floating_point()})
        check(dict(tensors), parse_table(text))
    return save_safetensors(path, tensors, {KEY: text})


def save_table(path: str | Path, table: Mapping[str, Any], check: Callable[[dict[str, Any]], object]) -> Path:
    """Writes an artefact that is a JSON file, after the reader's ``check``, as :func:`save_artefact` does."""
    with named(path, "file to write", "a table that can be read again", "change what it is made of"):
        check(parse_table(json.dumps(table)))
    return write_json(path, table)


# --- reading ------------------------------------------------------------------------------------------------------
def read_safetensors(path: str | Path, device: str = "cpu") -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file. Raises the library's errors; call it inside :class:`named`."""
    from safetensors import safe_open

    with safe_open(str(path), "pt", device=device) as file:
        return {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118


def open_artefact(path: str | Path, kind: str, version: int) -> tuple[Any, dict[str, Any]]:
    """Memory-maps a Vitrine artefact: its ``safe_open`` handle and its checked header."""
    from safetensors import safe_open

    path = Path(path)
    refuse_pickle(path, f"{kind} file")
    if not path.is_file():
        raise refuse("file", path.name, f"an existing {kind} file", "check the path")
    with named(path, "file", "a whole safetensors file", "copy it, or write it again"):
        handle = safe_open(str(path), framework="pt")
        return handle, _checked(path, _header(handle.metadata() or {}), kind, version)


def read_artefact(path: str | Path, kind: str, version: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All tensors of a Vitrine artefact, checked to be finite, and its header."""
    handle, header = open_artefact(path, kind, version)
    with named(path, "file", "a whole safetensors file", "copy it, or write it again"):
        tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
        check_tensors({key: value for key, value in tensors.items() if value.is_floating_point()})
    return tensors, header


def _header(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The header of an artefact; {} if it has none."""
    try:
        return parse_table(metadata.get(KEY, "{}"))
    except ValueError:
        return {}


def _checked(path: Path, header: dict[str, Any], kind: str, version: int) -> dict[str, Any]:
    actual = header.get("kind")
    if actual != kind:
        shown = f"{path.name} ({f'kind {actual}' if actual else 'no readable Vitrine header'})"
        raise refuse("file", shown, f"a file of kind {kind}", "choose a file that this tool wrote")
    integer(header.get("version"), f"format version of {kind}", 1, version, "update Vitrine")
    return header


def refuse_pickle(path: str | Path, what: str) -> None:
    """Refuses a file whose suffix says that opening it may run code."""
    if Path(path).suffix.lower() in PICKLES:
        accepted = "a .safetensors file"
        raise refuse(what, Path(path).name, accepted, "pickles can run code: convert it to safetensors first")


# --- untrusted files ----------------------------------------------------------------------------------------------
_POINTER = b"version https://git-lfs"


def check_regular(path: str | Path, most: int | None = None) -> Path:
    """The path, if it is a regular file of at most ``most`` bytes; a pipe would be waited for, a device has no end.

    Raises:
        OSError: If there is no such file.
        ValueError: If it is not a regular file, is larger, or is a Git LFS pointer, which says the remedy.
    """
    path = Path(path)
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")
    if most is not None and status.st_size > most:
        raise ValueError(f"{status.st_size} bytes, more than {most}")
    if status.st_size < 1024 and path.read_bytes().startswith(_POINTER):
        remedy = "run git lfs pull in its repository"
        raise refuse("file", f"{path.name}, a Git LFS pointer", "the file itself", remedy)
    return path


class named:
    """Context manager around reading one file: any exception inside becomes an error that names the file.

    ::

        with named(path, "space", "a whole safetensors file", "build it again"), safe_open(path, "pt") as opened: ...
    """

    def __init__(self, path: str | Path, what: str, accepted: str, remedy: str) -> None:
        self.name, self.what, self.accepted, self.remedy = printable(Path(path).name), what, accepted, remedy

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, VitrineError):
            if self.name not in str(error):
                raise VitrineError(f"{self.name}: {error}") from error
        elif isinstance(error, Exception):  # each library raises its own errors on malformed bytes
            shown = f"{self.name} ({type(error).__name__}: {error})"
            raise refuse(self.what, shown, self.accepted, self.remedy) from error


def parse_json(text: str) -> Any:
    """``json.loads`` that raises ``ValueError`` on every failure.

    Raises:
        ValueError: If the text is not JSON, or is nested too deeply for Python's stack.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def parse_table(text: str) -> dict[str, Any]:
    """Parses a JSON object.

    Raises:
        ValueError: If the text is not a JSON object.
    """
    table = parse_json(text)
    if not isinstance(table, dict):
        raise ValueError(f"expected a JSON object, not a {type(table).__name__}")
    return table


def check_tensors(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuses tensors that are not finite floating-point numbers."""
    for key, value in tensors.items():
        if not value.is_floating_point():
            raise refuse(f"tensor {key!r}", str(value.dtype), "floating-point numbers", "write the file again")
        if not all_finite(value):
            raise refuse(f"tensor {key!r}", "NaN or Inf", "finite numbers", "make the file again")
