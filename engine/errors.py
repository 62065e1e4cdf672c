"""Every error has the same shape: what was given, what is accepted, what to do."""

from __future__ import annotations


class VitrineError(ValueError):
    """Bad input, refused before any work is done. The message has the given value, the accepted ones and a remedy."""


def refuse(what: str, given: object, accepted: object, remedy: str) -> VitrineError:
    """Builds the error for the caller to raise.

    Example:
        >>> raise refuse("timestep", 1000, "0 <= t < 1000", "use 999 for pure noise")
    """
    shown = given if isinstance(given, str) else repr(given)
    return VitrineError(f"{what}: given {shown}; accepted: {accepted}. {remedy}")
