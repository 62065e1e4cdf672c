"""The registry of checks, each with its published figures and the data it needs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..registry import named_in
from .context import Context
from .records import Estimate, Measured, Need, Published

MODULES = ("nemo", "blocking", "gdf", "w2w")
"""Modules of checks, in the order they are listed."""


@dataclass(frozen=True)
class Check:
    """A claim that can be verified on a checkpoint.

    Attributes:
        name: ``subpackage.name``.
        paper: the source of the claim.
        families: of models that it can run on, as :func:`~.context.kind_of` names them.
        needs: data from elsewhere.
        published: the paper's figures.
        prepare: ``prepare(context) -> Estimate``, without noticeable work.
        measure: ``measure(context) -> Measured``; resumes where it was stopped.
        fits: ``fits(context) -> str``, why the claim does not apply to this model of a suitable family; empty if it
            does.
    """

    name: str
    paper: str
    families: tuple[str, ...]
    needs: tuple[Need, ...]
    published: tuple[Published, ...]
    prepare: Callable[[Context], Estimate]
    measure: Callable[[Context], Measured]
    fits: Callable[[Context], str]


def _any(context: Context) -> str:
    return ""


_CHECKS: dict[str, Check] = {}


def check(
    name: str,
    *,
    paper: str,
    families: Sequence[str],
    needs: Sequence[Need],
    published: Sequence[Published],
    prepare: Callable[[Context], Estimate],
    fits: Callable[[Context], str] = _any,
) -> Callable[[Callable[[Context], Measured]], Callable[[Context], Measured]]:
    """Register ``measure(context) -> Measured``; see :class:`Check`."""

    def register(measure: Callable[[Context], Measured]) -> Callable[[Context], Measured]:
        _CHECKS[name] = Check(name, paper, tuple(families), tuple(needs), tuple(published), prepare, measure, fits)
        return measure

    return register


def all_checks() -> dict[str, Check]:
    """Every registered check by name, after importing the modules of checks."""
    for name in MODULES:
        importlib.import_module(f"{__package__}.{name}")
    return dict(_CHECKS)


def pick_checks(names: Sequence[str]) -> list[Check]:
    """Checks by name or glob (``nemo.*``); all of them for no names."""
    return named_in(all_checks(), names)
