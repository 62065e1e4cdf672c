"""What is applied to a ComfyUI MODEL on top of its checkpoint: LoRAs, replaced objects, patches, wrappers, hooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from ...engine.errors import refuse
from ...engine.network.patches import ActivePatch
from .own_patches import owner_of
from .running import RUN

_ATTENTION = "optimized_attention_override"
"""Core's option with a function that computes all attention instead."""
_OTHER_TOKENS = {"hypertile": "HyperTile", "tomesd": "Patch Token Merging"}
"""Part of the name of a module of core's -> its node, which changes the tokens that self-attention sees."""


def patches_of(model: Any) -> list[ActivePatch]:
    """Every change that sampling this MODEL would apply, in the order ComfyUI applies them.

    Reads the patcher only; nothing is loaded, patched or moved.
    """
    options = model.model_options
    inner = options.get("transformer_options", {})
    return [
        *_weights(model),
        *[ActivePatch("object", name, 1, owner_of(patch)) for name, patch in model.object_patches.items()],
        *_functions("sampling function", ((k, v) for k, v in options.items() if k != "transformer_options")),
        *_functions("attention or block patch", inner.get("patches", {}).items()),
        *_functions("replaced attention", [(k, v) for k, v in inner.items() if k == _ATTENTION]),
        *_functions("replaced attention", ((k, v.values()) for k, v in inner.get("patches_replace", {}).items())),
        *_keyed("wrapper", model.wrappers),
        *_keyed("callback", model.callbacks),
        *[ActivePatch("timed hook", type(h).__name__, len(v), owner_of(h)) for h, v in model.hook_patches.items()],
        *[ActivePatch("injection", key, len(v), owner_of(v[0])) for key, v in model.injections.items() if v],
    ]


def refuse_other_tokens(model: Any, addresses: Iterable[str]) -> None:
    """Refuses to read self-attention where a node has merged or tiled its tokens.

    Args:
        addresses: that are to be read.
    """
    patches = model.model_options.get("transformer_options", {}).get("patches", {}).get("attn1_patch", [])
    merging = sorted({node for patch in patches for name, node in _OTHER_TOKENS.items() if name in owner_of(patch)})
    inside = next((address for address in addresses if "-self-" in address), None)
    if merging and inside is not None:
        shown, accepted = (
            f"{inside} behind {' and '.join(merging)}",
            "layers outside self-attention, or the MODEL before it",
        )
        raise refuse("layers", shown, accepted, "that node runs self-attention on other tokens")


def replaced_attention(model: Any, addresses: Iterable[str]) -> str:
    """A line for a report, where attention maps are read of a MODEL whose attention another node computes; else empty.

    Args:
        addresses: that are read.
    """
    inner = model.model_options.get("transformer_options", {})
    replaced = [
        patch for name in ("attn1", "attn2") for patch in inner.get("patches_replace", {}).get(name, {}).values()
    ]
    owners = sorted({owner_of(patch) for patch in (inner.get(_ATTENTION), *replaced) if patch is not None})
    if not owners or not any(address.endswith("-map") for address in addresses):
        return ""
    return f"attention is computed by {', '.join(owners)}: the maps are those of queries and keys, as without it"


def _weights(model: Any) -> Iterable[ActivePatch]:
    """Weight patches, grouped by strength and kind: a LoRA shows as one line, not as its hundreds of keys."""
    groups: Counter[tuple[str, float]] = Counter()
    for patches in model.patches.values():
        for strength, value, *_ in patches:
            groups[_form(value), float(strength)] += 1
    for (kind, strength), count in groups.items():
        yield ActivePatch("weights", f"{kind} at strength {strength:g}", count, "LoRA, merge or edit")


def _form(value: Any) -> str:
    """A tuple is a plain difference or names its form first; everything else is an adapter object."""
    if isinstance(value, tuple):
        return value[0] if isinstance(value[0], str) else "difference"
    return type(value).__name__


def _functions(kind: str, items: Iterable[tuple[str, Any]]) -> Iterable[ActivePatch]:
    for name, entry in items:
        entries = list(entry) if hasattr(entry, "__iter__") else [entry]
        callables = [f for f in entries if callable(f)]
        if callables:
            yield ActivePatch(kind, name, len(callables), ", ".join(sorted({owner_of(f) for f in callables})))


def _keyed(kind: str, table: dict[str, dict[Any, list]]) -> Iterable[ActivePatch]:
    for where, by_key in table.items():
        for key, callables in by_key.items():
            if callables and key != RUN:  # it watches and changes nothing
                yield ActivePatch(kind, where + (f" ({key})" if key else ""), len(callables), owner_of(callables[0]))
