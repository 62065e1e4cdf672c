"""Whether the installed libraries still have the names inside them that the engine uses."""

from __future__ import annotations

import importlib
import logging
import sys

LIBRARIES = ("torch", "accelerate", "diffusers", "peft")
"""Each has a module ``compat_*`` with a ``probe``, which is imported only when it is asked."""


def missing_names(libraries: tuple[str, ...] = LIBRARIES) -> list[str]:
    """Names that the installed versions do not have; libraries that are not installed lack none."""
    probes = [importlib.import_module(f".compat_{library}", __package__).probe for library in libraries]
    return [name for probe in probes for name in probe()]


def warn_of_missing_names() -> None:
    """One line in the log where a library that is loaded has changed; nothing is imported for it."""
    lost = missing_names(tuple(name for name in LIBRARIES if name in sys.modules))
    if lost:
        logging.getLogger("vitrine").warning(
            "the installed libraries no longer have %s: what needs them fails when it is used; install older versions",
            ", ".join(lost),
        )
