"""Whether the installed libraries still have the names inside them that the engine uses."""

from __future__ import annotations

import logging
import sys

from . import compat_accelerate, compat_diffusers, compat_peft, compat_torch

PROBES = {
    "torch": compat_torch.probe, "accelerate": compat_accelerate.probe, "diffusers": compat_diffusers.probe,
    "peft": compat_peft.probe,
}  # fmt: skip


def missing_names(libraries: tuple[str, ...] = tuple(PROBES)) -> list[str]:
    """Names that the installed versions do not have; libraries that are not installed lack none."""
    return [name for library in libraries for name in PROBES[library]()]


def warn_of_missing_names() -> None:
    """One line in the log where a library that is loaded has changed; nothing is imported for it."""
    lost = missing_names(tuple(name for name in PROBES if name in sys.modules))
    if lost:
        logging.getLogger("vitrine").warning(
            "the installed libraries no longer have %s: what needs them fails when it is used; install older versions",
            ", ".join(lost),
        )
