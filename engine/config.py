"""Settings: frozen dataclasses that check themselves when made, and go to plain values and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field
from typing import Any, ClassVar, TypeVar

from .errors import refuse

C = TypeVar("C", bound="Config")

ADVANCED = "advanced"
"""The field that holds the settings which rarely change, where a class has many."""


class Config:
    """What a settings class inherits: ``from_dict(to_dict())`` gives an equal object, through JSON too.

    A field whose default is a Config is nested. The settings of a nested ``advanced`` may also stand beside it, as
    they do in files written before they were split off.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for headers and JSON files; tuples become lists, and a default that is infinite None."""
        return {name: _plain(getattr(self, name), field) for name, field in self.__dataclass_fields__.items()}

    @classmethod
    def from_dict(cls: type[C], values: Mapping[str, Any]) -> C:
        """The inverse of :meth:`to_dict`; what is left out takes its default.

        Raises:
            VitrineError: ``values`` is no table, a setting is unknown, or the class refuses a value.
        """
        fields = cls.__dataclass_fields__
        inner = _advanced(fields)
        if not isinstance(values, Mapping):
            raise refuse(cls.__name__, values, sorted({*fields, *inner}), "remove unknown settings")
        strange = sorted(map(str, set(values) - set(fields) - inner))
        if strange:
            raise refuse(cls.__name__, strange, sorted({*fields, *inner}), "remove unknown settings")
        values = _gathered(values, inner)
        try:
            return cls(**{name: _restored(value, fields[name]) for name, value in values.items()})
        except TypeError as error:  # a number where a text belongs
            raise refuse(cls.__name__, str(error), "a value of each setting's type", "see the class") from error


def _advanced(fields: dict[str, Field]) -> set[str]:
    """The settings that may stand flat or in ``advanced``."""
    nested = _default(fields[ADVANCED]) if ADVANCED in fields else None
    return set(nested.__dataclass_fields__) - set(fields) if isinstance(nested, Config) else set()


def _gathered(values: Mapping[str, Any], inner: set[str]) -> dict[str, Any]:
    """``values`` with the flat settings of ``advanced`` moved into it."""
    flat = {name: value for name, value in values.items() if name in inner}
    if not flat or not isinstance(values.get(ADVANCED, {}), Mapping):
        return dict(values)
    outer = {name: value for name, value in values.items() if name not in inner}
    return outer | {ADVANCED: {**outer.get(ADVANCED, {}), **flat}}


def _default(field: Field) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _endless(field: Field) -> bool:
    return isinstance(field.default, float) and math.isinf(field.default)


def _plain(value: Any, field: Field) -> Any:
    if isinstance(value, Config):
        return value.to_dict()
    if _endless(field) and value == field.default:
        return None  # JSON has no infinity
    return _changed(value, tuple, list)


def _restored(value: Any, field: Field) -> Any:
    if value is None and _endless(field):
        return field.default
    default = _default(field)
    if isinstance(default, Config) and not isinstance(value, Config):
        return type(default).from_dict(value)
    return _changed(value, list, tuple)


def _changed(value: Any, old: Any, new: Any) -> Any:
    return new(_changed(v, old, new) for v in value) if isinstance(value, old) else value
