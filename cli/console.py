"""Output of commands: any terminal width and encoding, closed pipes, and library messages."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import re
import shutil
import sys
from collections.abc import Iterator
from os import environ
from pathlib import Path
from typing import Any

from ..engine.settings.setting_checks import Writes, marked

NARROWEST = 40
"""Fewest columns of a help page: tyro's layout does not terminate below six."""

CLOSED_PIPE = 141
"""Exit status after a closed pipe, as in a shell: 128 + SIGPIPE."""


@contextlib.contextmanager
def wide_enough() -> Iterator[None]:
    """Lays out help pages for at least :data:`NARROWEST` columns."""
    before = environ.get("COLUMNS")
    environ["COLUMNS"] = str(max(NARROWEST, shutil.get_terminal_size().columns))
    try:
        yield
    finally:
        del environ["COLUMNS"]
        if before is not None:
            environ["COLUMNS"] = before


@contextlib.contextmanager
def any_letters() -> Iterator[None]:
    """Prints characters that stdout cannot encode as escapes, and bullets as asterisks."""
    codecs.register_error("vitrine", _replacement)
    stdout = sys.stdout
    if stdout is None:  # closed by the parent process
        with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
            yield
        return
    if not isinstance(stdout, io.TextIOWrapper):
        yield
        return
    before = stdout.errors
    stdout.reconfigure(errors="vitrine")
    try:
        yield
    finally:
        stdout.reconfigure(errors=before)


def _replacement(error: UnicodeError) -> tuple[str | bytes, int]:
    if isinstance(error, UnicodeEncodeError) and error.object[error.start] == "\N{BULLET}":
        return "*", error.start + 1
    return codecs.backslashreplace_errors(error)


def announce(arguments: list[str]) -> None:
    """The first line of a command, on stderr: importing PyTorch and loading a model are silent and take seconds."""
    if environ.get("RANK", "0") == "0":  # the first of the processes that a launcher starts
        words = [word for word in arguments[:2] if re.fullmatch("[a-z][a-z0-9-]*", word)]
        print(f"{' '.join(words)}: loading", file=sys.stderr, flush=True)


def link_written(command: Any) -> None:
    """On a terminal, the last line is a link to what a command wrote: its page if there is one, else file or folder."""
    if sys.stdout is None or not sys.stdout.isatty():
        return
    outputs = [Path(value) for _, value, mark in marked(command) if isinstance(mark, Writes) and value is not None]
    written = next((path for path in outputs if path.exists()), None)
    if written is not None:
        pages = sorted(written.glob("*.html")) if written.is_dir() else []
        print((pages[0] if pages else written).resolve().as_uri())


def flush_failed() -> OSError | None:
    """Flushes stdout; returns the error if that fails, after which nothing more is written."""
    try:
        sys.stdout.flush()
    except OSError as error:
        drop_stdout()
        return error
    return None


def drop_stdout() -> None:
    """Discards further output: the interpreter would report the closed pipe again at exit."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a file cannot be redirected
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
