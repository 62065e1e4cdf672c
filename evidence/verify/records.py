"""Plain records of a verification: published and measured figures, the data they need, what they will take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Published:
    """A figure as printed in a paper.

    Attributes:
        key: of the measured figure that stands beside it.
        figure: what it is, in words.
        value, spread: as printed; the spread is what stands behind the +-.
        model, data: it was measured on.
        source: paper and table.
        note: what the source leaves open.
        anywhere: whether it holds for any model and data, so that the shipped models are compared with it too.
    """

    key: str
    figure: str
    value: float
    spread: float | None
    model: str
    data: str
    source: str
    note: str = ""
    anywhere: bool = False


@dataclass(frozen=True)
class Need:
    """Data that is not ours to ship.

    Attributes:
        file: name of the file or folder that is looked for.
        what: it holds.
        where_published: by its authors; never fetched from here.
        licence: as its authors state it.
        others: names that serve as well.
        optional: without it a part of the figures is left out.
        option: of the command, where it is not looked for in the data folder.
    """

    file: str
    what: str
    where_published: str
    licence: str
    others: tuple[str, ...] = ()
    optional: bool = False
    option: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """All names that serve, the published one first."""
        return (self.file, *self.others)

    @property
    def short(self) -> str:
        """What to name where the long text stands elsewhere."""
        return f"--{self.option}" if self.option else self.file

    def text(self) -> str:
        """For a person: what to get, from whom, under which licence."""
        place = f"--{self.option} FILE" if self.option else "the --data folder"
        return f"{self.file} ({self.what}): {self.where_published}; licence: {self.licence}; put into {place}"


@dataclass(frozen=True)
class Estimate:
    """What a check will take.

    Attributes:
        rows: that go through the network, one picture and one branch of guidance each.
        seconds: in all, from the timed forward.
        bytes: held at the peak beyond the weights.
        why: how the rows were counted.
    """

    rows: float
    seconds: float
    bytes: float
    why: str = ""


@dataclass(frozen=True)
class Figure:
    """A measured figure: its 95 % interval, if there is one, over how many, and their spread as papers print it."""

    what: str
    value: float
    interval: tuple[float, float] | None
    n: int
    spread: float | None = None


@dataclass(frozen=True)
class Measured:
    """The outcome of a check.

    Attributes:
        figures: by key; those with a :class:`Published` of that key stand beside it.
        differs: every way in which this measurement is not the published one.
        missing: figures that were not measured here, and why.
        details: further numbers, for the JSON file.
    """

    figures: dict[str, Figure]
    differs: tuple[str, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
