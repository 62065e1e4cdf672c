"""The files that the nodes before a running node name: a MODEL's patches do not say which LoRA they came from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_ENDS = (".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin", ".gguf")


def files_before(hidden: Any, name: str) -> list[str]:
    """A line for each weight file named before an input of the running node, the nearest first.

    A file has the numbers of its node beside it, such as a LoRA's strength. Nodes may name files that they did not use.

    Args:
        hidden: the node's, with ``prompt`` and ``unique_id``; None where no graph runs it.
        name: of the input.
    """
    graph = getattr(hidden, "prompt", None) or {}
    here = graph.get(str(getattr(hidden, "unique_id", "")), {}).get("inputs", {})
    waiting: list[Any] = [here.get(name)]
    seen: set[str] = set()
    lines: list[str] = []
    while waiting:
        value = waiting.pop(0)
        if not (isinstance(value, list) and len(value) == 2) or str(value[0]) in seen:
            continue
        seen.add(str(value[0]))
        node = graph.get(str(value[0]), {})
        inputs = node.get("inputs", {})
        waiting += inputs.values()
        lines += [f"{line}  [{node.get('class_type', '')}]" for line in _files(inputs)]
    return lines


def _files(inputs: dict[str, Any]) -> Iterator[str]:
    """Of a node; a list of LoRAs has a dictionary for each, with its own strengths and a switch."""
    for value in inputs.values():
        if isinstance(value, dict) and value.get("on", True):
            yield from _files(value)
        elif isinstance(value, str) and value.lower().endswith(_ENDS):
            numbers = {k: v for k, v in inputs.items() if "strength" in k and isinstance(v, (int, float))}
            yield ", ".join([value, *(f"{k} {v:g}" for k, v in numbers.items())])
