"""Validation of file names from users or from downloaded files: portable to every system, without a path."""

from __future__ import annotations

import re

from ..errors import printable, refuse

LONGEST = 200
"""Most bytes of a name in UTF-8: file systems allow 255, of which suffixes and temporary files take some."""
_FORBIDDEN = set('<>:"/\\|?*')
"""Separators, and what Windows forbids or reads as a stream, a drive or a pattern."""
_DEVICES = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9\u00b9\u00b2\u00b3])\s*(\..*)?", re.IGNORECASE)
"""Device names of Windows, with any suffix."""


def safe_name(name: str, what: str = "file name") -> str:
    """The name itself, if every system allows a file of that name.

    Args:
        what: how the error calls it.
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
    """Turns a text, such as a label in a downloaded file, into a file name: forbidden characters become ``-``."""
    kept = ("-" if c in _FORBIDDEN or printable(c) != c else c for c in text)
    return safe_name("".join(kept).strip(" ."))
