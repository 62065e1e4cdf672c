"""Checks that the installed libraries still have the private names that the engine uses."""

from __future__ import annotations

import importlib
import logging
import sys

LIBRARIES = ("torch", "accelerate", "diffusers", "peft")
"""Each has a module ``compat_*`` with a ``probe``, imported on demand."""


def missing_names(libraries: tuple[str, ...] = LIBRARIES) -> list[str]:
    """Names that are missing from the installed versions; libraries that are not installed are skipped."""
    probes = [importlib.import_module(f".compat_{library}", __package__).probe for library in libraries]
    return [name for probe in probes for name in probe()]


def warn_of_missing_names() -> None:
    """Logs one line if a loaded library lacks a name; imports no library."""
    lost = missing_names(tuple(name for name in LIBRARIES if name in sys.modules))
    if lost:
        logging.getLogger("vitrine").warning(
            "the installed libraries no longer have %s: what needs them fails when it is used; install older versions",
            ", ".join(lost),
        )
