"""Node inputs made from the options of a settings class, and the settings made from what a node is given."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from typing import Any, TypeVar

from comfy_api.latest import io

from ..engine.settings.option import Option, Options, Setting, chosen, settings_of

O = TypeVar("O", bound=Options)  # noqa: E741


def inputs_of(config: type[Options], *names: str, without: Sequence[str] = (), **changes: Any) -> list[Any]:
    """One input for each named option, in this order: saved workflows load widgets by position.

    Args:
        names: of the class's options; none: all that nodes show.
        without: those left out then.
        changes: what these inputs have instead, such as ``advanced=True``.
    """
    settings = chosen(config, names, without)
    hidden = [setting.name for setting in settings if names and not setting.option.node]
    if hidden:
        raise ValueError(f"{hidden} of {config.__name__}: declared with node=False")
    return [_input(setting, changes) for setting in settings if setting.option.node]


def input_of(config: type[Options], name: str, id: str | None = None, **changes: Any) -> Any:
    """The input of one option; ``id`` where the node calls it otherwise."""
    (made,) = inputs_of(config, name, **changes)
    made.id = id or name
    return made


def with_values(id: str, choices: Sequence[str], below: Mapping[str, Sequence[Any]], **changes: Any) -> Any:
    """A choice, some of whose options have inputs of their own: the page shows those of the option that is chosen.

    Args:
        choices: the first is the default.
        below: option -> its inputs, ``id.name`` in a prompt. ``execute`` is given ``{id: option, name: value, ...}``.
    """
    options = [io.DynamicCombo.Option(choice, list(below.get(choice, ()))) for choice in choices]
    return io.DynamicCombo.Input(id, options=options, **changes)


def settings_from(config: type[O], values: Mapping[str, Any], **others: Any) -> O:
    """The settings with those of a node's values that the class has; an option's ``unset`` becomes None."""
    return config(**values_of(config, values) | others)


def values_of(config: type[Options], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a node's values that are options of the class which nodes show; an option's ``unset`` becomes None."""
    own = [setting for setting in settings_of(config) if setting.option.node and setting.name in values]
    return {s.name: None if _is_unset(s.option, values[s.name]) else values[s.name] for s in own}


def _is_unset(option: Option, value: Any) -> bool:
    return option.unset is not None and value == option.unset


def _input(setting: Setting, changes: dict[str, Any]) -> Any:
    name, annotation, default, option = setting
    kind = next(t for t in (typing.get_args(annotation) or (annotation,)) if t is not type(None))
    shared: dict[str, Any] = {
        "default": option.unset if default in (None, MISSING) else default,
        "tooltip": tooltip_of(option),
        "advanced": option.advanced,
    }
    if option.choices:
        return io.Combo.Input(name, **{"options": list(option.choices)} | shared | changes)
    if kind is bool:
        return io.Boolean.Input(name, **shared | changes)
    if kind is str:
        return io.String.Input(name, **shared | changes)
    shared |= {"min": _lowest(option, option.step or 1), "max": option.le if option.top is None else option.top}
    shared |= {"step": option.step}
    return io.Int.Input(name, **shared | changes) if kind is int else io.Float.Input(name, **shared | changes)


def _lowest(option: Option, step: float) -> float | None:
    """Start of the slider: the least accepted number, one step above the bound, or the widget's value for None."""
    start = option.bottom if option.bottom is not None else option.ge if option.gt is None else option.gt + step
    return min(option.unset, start) if isinstance(option.unset, (int, float)) and start is not None else start


def tooltip_of(option: Option) -> str:
    """The option's sentences, and what the widget's value for None does."""
    shown = f"{option.unset:g}" if isinstance(option.unset, (int, float)) else "empty"
    return option.doc if option.unset is None else f"{option.doc} {shown}: {option.unset_doc}."
