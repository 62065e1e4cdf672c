"""The registry of claims that ``vitrine reproduce`` measures. Subpackages have theirs in ``claims``."""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..engine.errors import refuse

T = TypeVar("T")

SUBPACKAGES = ("portraits", "activations", "nemo", "w2w", "control", "resolution", "emd")
"""Subpackages in the order in which their claims are listed."""


@dataclass(frozen=True)
class Curves:
    """Lines of one chart: name -> (x, y) points."""

    title: str
    x_label: str
    y_label: str
    series: dict[str, list[tuple[float, float]]]


OURS, RIVAL, TRIVIAL, REFERENCE = ROLES = ("ours", "rival", "trivial", "reference")
"""The role of an arm: the method, another method, a trivial baseline, or a reference such as the teacher."""
Span = tuple[float, float] | None


@dataclass(frozen=True)
class Arm:
    """One arm of a measurement, in the claim's metric; ``interval`` is (low, high) at 95 %."""

    name: str
    value: float
    interval: Span = None
    role: str = RIVAL

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise refuse("role", self.role, ROLES, "say what the arm is")


def arms(
    values: Mapping[str, float], roles: Mapping[str, str], spans: Mapping[str, Sequence[float]] | None = None
) -> tuple[Arm, ...]:
    """The measured arms of ``roles``, in its order; ``spans`` are their intervals."""
    known = {name: (span[0], span[1]) for name, span in (spans or {}).items()}
    return tuple(Arm(name, values[name], known.get(name), role) for name, role in roles.items() if name in values)


@dataclass(frozen=True)
class Table:
    """Further figures of a claim; the first column names a row."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class ClaimResult:
    """The outcome of a measurement.

    Attributes:
        value: the judged figure: ours, or the difference to a baseline.
        interval: (low, high) at 95 %, or None without one.
        holds: whether the figure reaches the claim's target.
        details: further figures, for the JSON file.
        curves: charts that ``vitrine reproduce`` renders.
        arms: ours and every baseline, in one metric.
        n: number of images, prompts, people or neurons in the figure.
        seeds: number of seeds of sampling, search or training.
        parts: condition of the target -> whether it is met. If only some are, the verdict is "partly".
        tables: further figures, for the claim's page.
    """

    value: float
    interval: Span
    holds: bool
    details: dict[str, Any] = field(default_factory=dict)
    curves: tuple[Curves, ...] = ()
    arms: tuple[Arm, ...] = ()
    n: int | None = None
    seeds: int = 1
    parts: dict[str, bool] = field(default_factory=dict)
    tables: tuple[Table, ...] = ()

    @property
    def verdict(self) -> str:
        """``pass``, ``partly`` or ``fail``."""
        return "pass" if self.holds else "partly" if any(self.parts.values()) else "fail"


@dataclass(frozen=True)
class Claim:
    """A named claim.

    Attributes:
        name: ``subpackage.name``.
        paper: the paper that claims it.
        figure: what is measured.
        target: the target value.
        measure: ``measure(model=None, progress=silent, quick=False) -> ClaimResult``.
        minutes: duration of the full measurement on two CPU cores; printed before it starts.
        quick_minutes: duration of ``quick`` on one core, with fewer samples, steps or seeds and a wider interval.
        options: further options of the command, if any.
    """

    name: str
    paper: str
    figure: str
    target: str
    measure: Callable[..., ClaimResult]
    minutes: float = 1.0
    quick_minutes: float = 0.5
    options: str = ""


_CLAIMS: dict[str, Claim] = {}


def claim(
    name: str, *, paper: str, figure: str, target: str, minutes: float = 1.0, quick_minutes: float = 0.5
) -> Callable[[Callable[..., ClaimResult]], Callable]:
    """Register ``measure(model=None, progress=silent, quick=False) -> ClaimResult``; see :class:`Claim`."""

    def register(measure: Callable[..., ClaimResult]) -> Callable[..., ClaimResult]:
        _CLAIMS[name] = Claim(name, paper, figure, target, measure, minutes, quick_minutes)
        return measure

    return register


def all_claims() -> dict[str, Claim]:
    """Every registered claim by name, after importing the claim modules of all subpackages."""
    for name in SUBPACKAGES:
        importlib.import_module(f"{__package__}.{name}.claims")
    return dict(_CLAIMS)


def pick_claims(names: list[str]) -> list[Claim]:
    """Claims by name or glob (``portraits.*``); all of them for an empty list."""
    return named_in(all_claims(), names)


def named_in(table: dict[str, T], names: Sequence[str]) -> list[T]:
    """Entries of a registry by name or glob, each once; all of them without names."""
    picked: dict[str, T] = {}
    for name in names or ["*"]:
        matches = fnmatch.filter(table, name)
        if not matches:
            raise refuse("claim", name, sorted(table), "take one of them, or a glob such as 'nemo.*'")
        picked.update({n: table[n] for n in matches})
    return list(picked.values())
