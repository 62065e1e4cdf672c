"""Output of commands: any terminal width and encoding, closed pipes, and library messages."""

from __future__ import annotations

import codecs
import contextlib
import io
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from os import environ

NARROWEST = 40
"""Fewest columns of a help page: tyro's layout does not terminate below six."""

CLOSED_PIPE = 141
"""Exit status after a closed pipe, as in a shell: 128 + SIGPIPE."""

NOISE = (
    ("transformers.utils.import_utils", "requires torchvision (not installed)"),
    ("diffusers.models.modeling_utils", "should be kept in float32: []"),
    ("diffusers.loaders.lora_base", "No LoRA keys associated to"),
)
"""(logger, part of a message) that is irrelevant to users: about an optional package that another one replaces,
an empty list of modules, or a LoRA without keys for the text encoders."""


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


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Suppresses the messages in :data:`NOISE` without importing a library."""
    filters = [(logging.getLogger(name), _Without(part)) for name, part in NOISE]
    for logger, without in filters:
        logger.addFilter(without)
    try:
        yield
    finally:
        for logger, without in filters:
            logger.removeFilter(without)


class _Without(logging.Filter):
    """A filter that drops messages that contain a text."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part

    def filter(self, record: logging.LogRecord) -> bool:
        return self.part not in record.getMessage()


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
