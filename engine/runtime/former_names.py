"""Names that were changed: the former ones still import for one release, with a warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def former_names(module: str, renamed: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's ``__getattr__`` (PEP 562) for renamed functions and classes.

    Args:
        module: name of the module that has the new names.
        renamed: former name -> new name.

    Example:
        >>> __getattr__ = former_names(__name__, {"walk": "sampling_loop"})
    """

    def find(name: str) -> Any:
        if name not in renamed:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        message = f"{module}.{name} is now called {renamed[name]}; the former name will be removed"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], renamed[name])

    return find


def former_argument(arguments: dict[str, Any], old: str, new: str, value: Any) -> Any:
    """The value of a renamed argument, which may still come under its former name.

    Args:
        arguments: by keyword; the former name is taken out.
        value: what was given under the new name, None for nothing.
    """
    if old not in arguments:
        return value
    warnings.warn(f"{old}= is now called {new}=; the former name will be removed", DeprecationWarning, stacklevel=3)
    former = arguments.pop(old)
    return former if value is None else value
