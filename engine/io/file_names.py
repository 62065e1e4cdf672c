"""Names of files, given by people or by other people's files: those that every system can hold, without a path."""

from __future__ import annotations

import re

from ..errors import printable, refuse

LONGEST = 200
"""Bytes of a name in UTF-8: file systems hold 255, endings and temporary files take some."""
_FORBIDDEN = set('<>:"/\\|?*')
"""Separators, and what Windows forbids or reads as a stream, a drive or a pattern."""
_DEVICES = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9\u00b9\u00b2\u00b3])\s*(\..*)?", re.IGNORECASE)
"""Names that Windows gives to devices, with any ending."""


def safe_name(name: str, what: str = "file name") -> str:
    """The name itself, where every system can have a file of that name in a folder.

    Args:
        what: to call it in the error.

    Raises:
        VitrineError: If it is empty, too long, hidden, a device, ends in a dot or a blank, or has separators,
            wildcards, control characters or marks that turn the direction of reading.
    """
    if not isinstance(name, str):
        raise refuse(what, name, "a text", "give it a name")
    problem = _problem(name)
    if problem:
        shown = f"{printable(name[:80])} ({problem})"
        raise refuse(what, shown, "letters without folders, e.g. portrait-t50", "choose another name")
    return name


def _problem(name: str) -> str:
    if not name.strip():
        return "empty"
    if len(name.encode("utf-8", "replace")) > LONGEST:
        return f"longer than {LONGEST} bytes"
    strange = next((c for c in name if c in _FORBIDDEN or printable(c) != c), None)
    if strange is not None:
        return f"{ascii(strange)} is in it"
    if name.startswith((".", " ", "~")) or name.endswith((".", " ")):
        return "a dot, a blank or ~ at its beginning or end"
    return "the name of a device" if _DEVICES.fullmatch(name) else ""


def as_name(text: str) -> str:
    """A text, such as a label in another's file, as a file's name: what no name may have becomes ``-``.

    Raises:
        VitrineError: If it is still none.
    """
    kept = ("-" if c in _FORBIDDEN or printable(c) != c else c for c in text)
    return safe_name("".join(kept).strip(" ."))
