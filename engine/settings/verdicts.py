"""The one rule of verdicts: what was asked, what was measured, and of how much; nothing is fine by default."""

from __future__ import annotations

from collections.abc import Collection

FINE, LOOK, BAD, OPEN = "fine", "look", "bad", "not measured"
COPIES_BAD = 0.25
"""Share of samples that copy a training picture; one copy already asks for a look."""
WORDS = {
    FINE: "every part was measured, and is fine",
    LOOK: "a part asks for a look, or was not measured",
    BAD: "a part is bad",
    OPEN: "no part was measured",
}
"""Word -> what makes it, of a verdict over parts."""


def word_of(verdicts: Collection[str]) -> str:
    """The verdict over parts: bad where one is, fine only where every part was measured and is fine.

    Example:
        >>> word_of(["fine", "fine"]), word_of(["fine", "not measured"]), word_of(["not measured"])
        ('fine', 'look', 'not measured')
    """
    if BAD in verdicts:
        return BAD
    if not set(verdicts) - {OPEN}:
        return OPEN
    return FINE if set(verdicts) == {FINE} else LOOK


def verdict_of(verdicts: Collection[str], of: str = "") -> str:
    """The word, and how many of the parts were measured.

    Example:
        >>> verdict_of(["fine", "not measured", "fine"])
        'look: 2 of 3 measured'
    """
    return counted(word_of(verdicts), sum(verdict != OPEN for verdict in verdicts), len(verdicts), of)


def counted(word: str, measured: int, asked: int, of: str = "") -> str:
    """A verdict's word, and how much of what was asked it is made of.

    Example:
        >>> counted("memorized", 2, 4, "samples")
        'memorized: 2 of 4 samples measured'
    """
    return f"{word}: {measured} of {asked} {of}{' ' if of else ''}measured"


def with_missing(verdict: str, missing: Collection[object]) -> str:
    """A part's verdict, of which some of what was asked is missing: then it is not fine."""
    return LOOK if verdict == FINE and missing else verdict
