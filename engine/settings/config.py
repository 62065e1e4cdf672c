"""Settings: frozen dataclasses that validate themselves and convert to plain values and back."""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, ClassVar, TypeVar

from ..errors import refuse

C = TypeVar("C", bound="Config")

_ENDLESS = {math.inf: "inf", -math.inf: "-inf"}


class Config:
    """Base of settings classes: ``from_dict(to_dict())`` gives an equal object, also through JSON.

    A setting may be a Config itself. One called ``advanced`` has rarely changed settings; a dict may also have them at
    the top level. When an object is made, numbers are checked before the class's own
    checks: an int must be an int, and a float finite, unless its default is infinite.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__post_init__" in vars(cls):
            cls.__post_init__ = _after_numbers(cls.__post_init__)  # type: ignore[method-assign, assignment]

    def __post_init__(self) -> None:
        check_numbers(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for headers and JSON files, which have no infinity.

        Tuples become lists, nested settings become dicts, an infinite default becomes None, and any other infinity
        "inf" or "-inf".
        """
        table = self.__dataclass_fields__.items()
        return {name: _to_plain(_none_for_endless(getattr(self, name), field)) for name, field in table}

    @classmethod
    def from_dict(cls: type[C], values: Mapping[str, Any]) -> C:
        """The inverse of :meth:`to_dict`; missing settings take their defaults."""
        names = sorted(cls.__dataclass_fields__)
        if not isinstance(values, Mapping):
            raise refuse(cls.__name__, values, names, "remove unknown settings")
        kinds, known = _annotations(cls), cls.__dataclass_fields__
        values = _nest(values, kinds)
        unknown = sorted(map(str, set(values) - set(names)))
        if unknown:
            raise refuse(cls.__name__, unknown, names, "remove unknown settings")
        values = {n: known[n].default if v is None and _endless(known[n]) else v for n, v in values.items()}
        plain = {name: _from_plain(value, kinds[name]) for name, value in values.items()}
        for name, value in plain.items():
            if not _fits(value, kinds[name]):
                raise refuse(f"{cls.__name__} {name}", _shown(value), _kinds(kinds[name]), "see the class")
        try:
            return cls(**plain)
        except TypeError as error:  # a number instead of a text
            raise refuse(cls.__name__, str(error), "a value of each setting's type", "see the class") from error


def _after_numbers(own: Callable[[Any], None]) -> Callable[[Any], None]:
    """A ``__post_init__`` that runs once the numbers are checked."""

    @functools.wraps(own)
    def checked(settings: Any) -> None:
        check_numbers(settings)
        own(settings)

    return checked


def check_numbers(settings: Any) -> None:
    """Checks the fields of a dataclass that hold numbers."""
    kinds = _annotations(type(settings))
    for field in fields(settings):
        value, kind = getattr(settings, field.name), kinds[field.name]
        numbers, inner = list(_floats(value)), _elements(kind) if isinstance(value, tuple) else kind
        numeric = inner is not None and set(_members(inner)) <= _NUMBERS
        several = isinstance(value, (tuple, list, dict)) and set(_members(kind)) <= set(_PLAIN)  # where one is wanted
        fits = not several and not any(map(math.isnan, numbers)) and (not numeric or _fits(value, kind))
        if not fits or any(map(math.isinf, numbers)) and not any(map(math.isinf, _floats(field.default))):
            large = isinstance(value, int) and abs(value) >= _TOO_LARGE
            accepted = "a finite number" if fits else "a number below 2**64" if large else _kinds(kind)
            raise refuse(f"{type(settings).__name__} {field.name}", _shown(value), accepted, "see the class")


_NUMBERS = {bool, int, float, type(None)}


_HINTS: dict[type, tuple[dict[str, Any], dict[str, Any]]] = {}


def hints_of(cls: type) -> dict[str, Any]:
    """The annotations of a class as types, with what ``Annotated`` adds to them."""
    return _both(cls)[0]


def _annotations(cls: type) -> dict[str, Any]:
    return _both(cls)[1]


def _both(cls: type) -> tuple[dict[str, Any], dict[str, Any]]:
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls, include_extras=True), typing.get_type_hints(cls)
    return _HINTS[cls]


def _floats(value: Any) -> Iterator[float]:
    """Those in a value, also within tuples."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, tuple):
        for entry in value:
            yield from _floats(entry)


def _nest(values: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with the settings of ``advanced`` moved there, if they are at the top level."""
    fields = getattr(_config_in(types.get("advanced")), "__dataclass_fields__", {})
    flat = {name: value for name, value in values.items() if name in fields and name not in types}
    if not flat:
        return dict(values)
    nested = values.get("advanced", {})
    nested = nested.to_dict() if isinstance(nested, Config) else nested
    others = {name: value for name, value in values.items() if name not in flat}
    return others | {"advanced": {**nested, **flat} if isinstance(nested, Mapping) else nested}


def _endless(field: Any) -> bool:
    return isinstance(field.default, float) and math.isinf(field.default)


def _none_for_endless(value: Any, field: Any) -> Any:
    return None if _endless(field) and value == field.default else value


def _to_plain(value: Any) -> Any:
    if isinstance(value, Config):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_to_plain(v) for v in value]
    return _ENDLESS.get(value, value) if isinstance(value, float) else value


def _from_plain(value: Any, annotation: Any) -> Any:
    nested = _config_in(annotation)
    if nested is not None and isinstance(value, Mapping):
        return nested.from_dict(value)
    if nested is not None and not isinstance(value, (Config, list, tuple, type(None))):
        raise refuse(nested.__name__, value, sorted(nested.__dataclass_fields__), "write its settings as an object")
    if isinstance(value, list):
        return tuple(_from_plain(v, annotation) for v in value)
    if isinstance(value, str) and value in _ENDLESS.values() and _holds(annotation, float):
        return float(value)
    return value


_TOO_LARGE = 1 << 64
"""Smallest whole number that does not fit into a tensor or a seed."""
_PLAIN = (bool, int, float, str, type(None))


def _fits(value: Any, annotation: Any) -> bool:
    """Whether a plain value fits the annotation; other annotations are checked by the class.

    Integers are accepted as floats; NaN and integers beyond 64 bits are never accepted.
    """
    if isinstance(value, float) and math.isnan(value) or isinstance(value, int) and abs(value) >= _TOO_LARGE:
        return False
    if isinstance(value, tuple):
        inner = _elements(annotation)
        return inner is None or all(_fits(entry, inner) for entry in value)
    if not isinstance(value, _PLAIN):
        return True
    kinds = _members(annotation)
    kind = next(kind for kind in _PLAIN if isinstance(value, kind))  # numpy's float64 is a float
    whole = kind is int and float in kinds or isinstance(value, float) and value.is_integer() and int in kinds
    return kind in kinds or whole or not set(kinds) <= {*_PLAIN, tuple}


def _members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself; containers without their element types."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(kind for member in typing.get_args(annotation) for kind in _members(member))
    return (typing.get_origin(annotation) or annotation,)


def _elements(annotation: Any) -> Any:
    """The element type of a tuple of any length; None for other annotations."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next(filter(None, map(_elements, typing.get_args(annotation))), None)
    args = typing.get_args(annotation)
    return args[0] if typing.get_origin(annotation) is tuple and len(args) == 2 and args[1] is Ellipsis else None


def _kinds(annotation: Any) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "nothing"}
    if typing.get_origin(annotation) is tuple:
        return f"each {' or '.join(names.get(kind, str(kind)) for kind in typing.get_args(annotation)[:1])}"
    return " or ".join(names.get(kind, getattr(kind, "__name__", str(kind))) for kind in _members(annotation))


def _shown(value: Any) -> str:
    return f"{value!r}"[:80]


def _config_in(annotation: Any) -> type[Config] | None:
    """The settings class that an annotation such as ``EStepConfig | None`` names, if any."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation if issubclass(annotation, Config) else None
    return next(filter(None, map(_config_in, typing.get_args(annotation))), None)


def _holds(annotation: Any, kind: type) -> bool:
    return annotation is kind or any(_holds(member, kind) for member in typing.get_args(annotation))
