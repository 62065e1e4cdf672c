"""Settings: frozen dataclasses that check themselves when made, and go to plain values and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from .errors import refuse

C = TypeVar("C", bound="Config")


class Config:
    """What a settings class inherits: ``from_dict(to_dict())`` gives an equal object, through JSON too."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for headers and JSON files; tuples become lists."""
        return {name: _changed(getattr(self, name), tuple, list) for name in self.__dataclass_fields__}

    @classmethod
    def from_dict(cls: type[C], values: Mapping[str, Any]) -> C:
        """The inverse of :meth:`to_dict`; what is left out takes its default.

        Raises:
            VitrineError: no table, an unknown setting, or a value the class refuses.
        """
        known = sorted(cls.__dataclass_fields__)
        strange = sorted(map(str, set(values) - set(known))) if isinstance(values, Mapping) else values
        if strange or not isinstance(values, Mapping):
            raise refuse(cls.__name__, strange, known, "remove unknown settings")
        try:
            return cls(**{name: _changed(value, list, tuple) for name, value in values.items()})
        except TypeError as error:  # a number where a text belongs
            raise refuse(cls.__name__, str(error), "a value of each setting's type", "see the class") from error


def _changed(value: Any, old: Any, new: Any) -> Any:
    return new(_changed(v, old, new) for v in value) if isinstance(value, old) else value
