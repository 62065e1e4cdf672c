"""What commands print: pages that fit any terminal and encoding, a closed pipe, and libraries without their noise."""

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
"""Columns of a help page at least: tyro's layout never ends below six."""

CLOSED_PIPE = 141
"""Exit status of a program whose reader has gone away, as a shell reports it: 128 + SIGPIPE."""

NOISE = (
    ("transformers.utils.import_utils", "requires torchvision (not installed)"),
    ("diffusers.models.modeling_utils", "should be kept in float32: []"),
    ("diffusers.loaders.lora_base", "No LoRA keys associated to"),
)
"""(logger, part of a message) that says nothing to whoever runs a command: of an optional package whose place another
takes, of an empty list of modules, of a LoRA for the network alone that has no keys for the text encoders."""


@contextlib.contextmanager
def wide_enough() -> Iterator[None]:
    """Help pages are laid out for :data:`NARROWEST` columns or more."""
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
    """Letters that the encoding of stdout lacks are printed as escapes, and bullets as asterisks."""
    codecs.register_error("vitrine", _replacement)
    stdout = sys.stdout
    if stdout is None:  # closed by whoever started the command
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
    """Leaves out the messages in :data:`NOISE`; no library is imported for it."""
    filters = [(logging.getLogger(name), _Without(part)) for name, part in NOISE]
    for logger, without in filters:
        logger.addFilter(without)
    try:
        yield
    finally:
        for logger, without in filters:
            logger.removeFilter(without)


class _Without(logging.Filter):
    """Lets all messages pass but those that contain a text."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part

    def filter(self, record: logging.LogRecord) -> bool:
        return self.part not in record.getMessage()


def flush_failed() -> OSError | None:
    """Writes what stdout holds back; where that fails, why. Nothing is written there any more then."""
    try:
        sys.stdout.flush()
    except OSError as error:
        drop_stdout()
        return error
    return None


def drop_stdout() -> None:
    """Sends what is still printed nowhere: the interpreter would complain of a closed pipe once more as it ends."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a file cannot be redirected
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
