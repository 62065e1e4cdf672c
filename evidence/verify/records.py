"""Plain records of a verification: published and measured figures, the data they need, their cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Published:
    """A figure as printed in a paper.

    Attributes:
        key: of the corresponding measured figure.
        figure: what it is, in words.
        value, spread: as printed; the spread is the number after +-.
        model, data: it was measured on.
        source: paper and table.
        note: what the source does not specify.
        anywhere: whether it applies to any model and data, so that the shipped models are compared with it too.
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
    """Data that is not shipped.

    Attributes:
        file: name of the file or folder to look for.
        what: its contents.
        where_published: the authors' page; never downloaded.
        licence: as stated by its authors.
        others: accepted alternative names.
        optional: without it some figures are omitted.
        option: of the command, for data outside the data folder.
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
        """All accepted names, the published one first."""
        return (self.file, *self.others)

    @property
    def short(self) -> str:
        """The short name, for use where the full text is given elsewhere."""
        return f"--{self.option}" if self.option else self.file

    def text(self) -> str:
        """As text: what to get, its source and its licence."""
        place = f"--{self.option} FILE" if self.option else "the --data folder"
        return f"{self.file} ({self.what}): {self.where_published}; licence: {self.licence}; put into {place}"


@dataclass(frozen=True)
class Estimate:
    """The cost of a check.

    Attributes:
        rows: UNet evaluations, one per picture and guidance branch.
        seconds: in all, from the timed forward.
        bytes: peak memory in addition to the weights.
        why: how the evaluations were counted.
    """

    rows: float
    seconds: float
    bytes: float
    why: str = ""


@dataclass(frozen=True)
class Figure:
    """A measured figure: its 95 % interval, if there is one, the sample size, and the spread as papers print it."""

    what: str
    value: float
    interval: tuple[float, float] | None
    n: int
    spread: float | None = None


@dataclass(frozen=True)
class Measured:
    """The outcome of a check.

    Attributes:
        figures: by key; those with a :class:`Published` of that key are compared with it.
        differs: every difference between this measurement and the published one.
        missing: figures that were not measured, and why.
        details: further numbers, for the JSON file.
    """

    figures: dict[str, Figure]
    differs: tuple[str, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
