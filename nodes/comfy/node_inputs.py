"""The inputs of a node, checked against its schema.

ComfyUI compares what is typed with its bounds, which NaN passes, and hands on unseen what comes over a link.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from comfy_api.latest import io

from ...engine.errors import refuse

_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "STRING": (str, "a text"),
    "BOOLEAN": (bool, "true or false"),
    "IMAGE": (torch.Tensor, "pictures"),
    "MASK": (torch.Tensor, "masks"),
    "LATENT": (dict, "latents"),
    "CONDITIONING": (list, "a prompt"),
}
_LISTED = 20
"""Options that a refusal names."""


def checked(node: Any) -> Any:
    """The node class, whose ``execute`` refuses what its schema does not allow."""
    execute: Callable[..., Any] = node.execute.__func__

    @functools.wraps(execute)
    def run(cls: Any, *args: Any, **kwargs: Any) -> Any:
        check_inputs(node, inspect.signature(execute).bind_partial(cls, *args, **kwargs).arguments | kwargs)
        return execute(cls, *args, **kwargs)

    node.execute = classmethod(run)
    return node


@functools.cache
def _schema_inputs(node: Any) -> dict[str, Any]:
    return {entry.id: entry for entry in node.define_schema().inputs}


def check_inputs(node: Any, values: Mapping[str, Any]) -> None:
    """Checks what a node is given, by the inputs of its schema; what is not given has its default."""
    _check_entries(node, _schema_inputs(node), values)


def _check_entries(node: Any, entries: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    for name, entry in entries.items():
        if name not in values:
            continue
        value, kind = values[name], entry.io_type
        if isinstance(entry, io.DynamicCombo.Input):
            _check_below(node, name, value, entry)
        elif value is None:
            if not entry.optional:
                raise refuse(
                    name,
                    f"nothing, from the node before ({kind})",
                    f"a {kind}",
                    "its file has none: load it by itself (Load CLIP, Load VAE), or take another file",
                )
        elif kind in ("INT", "FLOAT"):
            _check_number(name, value, entry, kind == "INT")
        elif isinstance(entry, io.Combo.Input):
            _check_choice(node, name, value, entry)
        elif kind in _KINDS and not isinstance(value, _KINDS[kind][0]):
            raise refuse(name, f"{value!r:.60} ({type(value).__name__})", _KINDS[kind][1], "connect another output")


def _check_below(node: Any, name: str, value: Any, entry: Any) -> None:
    """A choice with inputs of its own, which ComfyUI hands on as a dictionary."""
    choice = value.get(name) if isinstance(value, dict) else value
    below = next((option.inputs for option in entry.options if option.key == choice), None)
    if below is None or not isinstance(value, dict):
        accepted = ", ".join(option.key for option in entry.options)
        raise refuse(name, f"{choice!r:.80}", accepted, "choose one on the node")
    missing = [each.id for each in below if each.id not in value and not each.optional]
    if missing:
        raise refuse(name, f"{choice} without {', '.join(missing)}", "a value for each", "choose it anew on the node")
    _check_entries(node, {each.id: each for each in below}, value)


def _check_number(name: str, value: Any, entry: Any, whole: bool) -> None:
    shown = entry.display_name or name
    try:
        number = operator.index(value) if whole else float(value)
        fits = math.isfinite(number) and not isinstance(value, (str, bytes, torch.Tensor))
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        accepted = "a whole number" if whole else "a finite number"
        raise refuse(shown, f"{value!r:.60}", accepted, "look at the node whose output is connected here")
    low, high = entry.min, entry.max
    if (low is not None and number < low) or (high is not None and number > high):
        raise refuse(shown, value, f"{low} to {high}", "look at the node whose output is connected here")


def _check_choice(node: Any, name: str, value: Any, entry: Any) -> None:
    """The list of files is read again where a name is not in it; no name at all is the node's to refuse."""
    if value == "" or value in (entry.options or ()):
        return
    again = {each.id: each.options for each in node.define_schema().inputs if isinstance(each, io.Combo.Input)}
    options = again.get(name, entry.options) or []  # those below a choice are no lists of files
    if value not in options:
        accepted = ", ".join(map(str, options[:_LISTED])) + (" ..." if len(options) > _LISTED else "")
        raise refuse(name, f"{value!r:.80}", accepted, "choose one; R in the page reads the lists of files again")
