"""An option declared once: a field of a frozen dataclass whose annotation says what it does and where it ends.

::

    @dataclass(frozen=True)
    class SearchConfig(Options):
        share: Annotated[float, Option("Fraction of the effect.", gt=0, le=1, step=0.01)] = 0.98

Checks and their messages, the class's ``Attributes:`` (which the command line and the pages of the API read), node
inputs (``nodes/config_inputs.py``) and property tests are made from it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, NamedTuple

from ..errors import readable, refuse
from .config import Config, hints_of


@dataclass(frozen=True)
class Option:
    """What is known of one setting besides its name, type and default.

    Attributes:
        doc: sentences that every interface shows.
        gt, ge, lt, le: bounds of a number, or of each number of a tuple.
        choices: accepted values, of a text.
        bottom, top: ends of the slider, where numbers beyond are accepted too.
        step: of the slider.
        unset: the widget's value for None.
        unset_doc: what None does; with ``unset`` the tooltip's last sentence.
        details: sentences for Python and the command line only.
        advanced: whether the node shows it only on request.
        node: whether nodes show it where they name none; else it is for Python and the command line.
        remedy: end of the error message; by default the message names the default value.
    """

    doc: str = ""
    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    choices: tuple[str, ...] = ()
    bottom: float | None = None
    top: float | None = None
    step: float | None = None
    unset: float | str | None = None
    unset_doc: str = ""
    details: str = ""
    advanced: bool | None = None
    node: bool = True
    remedy: str = ""

    def accepts(self, value: Any) -> bool:
        """Whether a value is None, one of the choices, or within the bounds."""
        if value is None:
            return True
        if isinstance(value, tuple):
            return all(map(self.accepts, value))
        if self.choices:
            return value in self.choices
        above = (self.gt is None or value > self.gt) and (self.ge is None or value >= self.ge)
        return above and (self.lt is None or value < self.lt) and (self.le is None or value <= self.le)

    @property
    def accepted(self) -> str:
        """The choices or bounds in words; empty where anything is accepted."""
        if self.choices:
            return ", ".join(map(str, self.choices))
        low = f"above {self.gt:g}" if self.gt is not None else "" if self.ge is None else f"{self.ge:g} or more"
        high = f"below {self.lt:g}" if self.lt is not None else "" if self.le is None else f"{self.le:g} or less"
        return f"{self.ge:g} to {self.le:g}" if None not in (self.ge, self.le) else ", ".join(filter(None, (low, high)))


class Setting(NamedTuple):
    """One field of a dataclass with its option."""

    name: str
    annotation: Any
    default: Any
    option: Option


_SETTINGS: dict[type, tuple[Setting, ...]] = {}


def settings_of(cls: type) -> tuple[Setting, ...]:
    """The fields of a dataclass that are options, in order."""
    if cls not in _SETTINGS:
        _SETTINGS[cls] = tuple(_read(cls))
    return _SETTINGS[cls]


def chosen(cls: type, names: Sequence[str], without: Sequence[str] = ()) -> list[Setting]:
    """The options of these names, in their order; without names all but those of ``without``."""
    settings = {setting.name: setting for setting in settings_of(cls)}
    return [settings[name] for name in names or (name for name in settings if name not in without)]


def _read(cls: Any) -> Iterator[Setting]:
    hints = hints_of(cls)
    for field in fields(cls):
        hint = hints[field.name]
        marks = [mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Option)]
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if marks:
            yield Setting(field.name, hint.__origin__, default, marks[0])


def check_options(values: Any) -> None:
    """Refuses a value of a dataclass that its option does not accept."""
    for name, _, default, option in settings_of(type(values)):
        value = getattr(values, name)
        if not option.accepts(value):
            usual = "leave it out" if default in (None, MISSING) else f"the default is {readable(default)}"
            raise refuse(name, value, option.choices or option.accepted, option.remedy or usual)


class Options(Config):
    """Base of settings whose fields are options; ``_check`` is for what concerns several of them."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__doc__ = with_attributes(cls)

    def __post_init__(self) -> None:
        check_options(self)
        self._check()

    def _check(self) -> None:
        """Refuses values that do not fit each other."""


def help_of(option: Option) -> str:
    """All that is said of an option where there is room: what it does, what None does, what is accepted."""
    nothing = f"None: {option.unset_doc}." if option.unset_doc else ""
    accepted = f"Accepted: {option.accepted}." if option.accepted else ""
    return " ".join(filter(None, (option.doc, option.details, nothing, accepted)))


def with_attributes(cls: type) -> str:
    """A class's docstring with a section ``Attributes:`` made from its options."""
    lines = [(cls.__doc__ or "").rstrip(), "", "    Attributes:"]
    for name, hint in hints_of(cls).items():
        for option in getattr(hint, "__metadata__", ()):
            if isinstance(option, Option) and option.doc:
                text = f"{name}: {help_of(option)}"
                lines += textwrap.wrap(text, 116, initial_indent=" " * 8, subsequent_indent=" " * 12)
    return "\n".join([*lines, "    "]) if len(lines) > 3 else cls.__doc__ or ""
