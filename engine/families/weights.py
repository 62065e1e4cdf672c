"""The name of a weight in both libraries, from a family's table of fragments."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple


class ComfyUIName(NamedTuple):
    """The name of a diffusers module or parameter in ComfyUI.

    Attributes:
        name: its dotted name.
        part: index of its block of rows in a fused weight, negative from the end; None if it is not fused.
        swap: ``"swap"``: its two halves of rows are exchanged; ``"swap pair"``: only if its rows are a scale and a
            shift, twice as many as its inputs.
    """

    name: str
    part: int | None = None
    swap: str = ""

    def swapped(self, shape: tuple[int, int]) -> bool:
        """Whether the halves of a weight of that shape (out, in) are exchanged."""
        return self.swap == "swap" or self.swap == "swap pair" and shape[0] == 2 * shape[1]

    def rows(self, total: int, own: int) -> tuple[int, int]:
        """(start, length) of its ``own`` rows among ``total``."""
        if self.part is None:
            return 0, total
        return (self.part * own if self.part >= 0 else total + self.part * own), own


def comfyui_name(weights: Mapping[str, str], name: str) -> ComfyUIName:
    """ComfyUI's name of a diffusers module or parameter; names without a fragment are equal in both.

    Args:
        weights: a family's table, :attr:`~vitrine.engine.families.Family.weights`.
    """
    part, swap = None, ""

    def other(match: re.Match) -> str:
        nonlocal part, swap
        numbers = re.findall(r"(?<=\.)\d+(?=\.)", match[0])
        known = match[0] if match[0] in weights else re.sub(r"(?<=\.)\d+(?=\.)", "*", match[0])
        fragment, _, note = weights[known].partition("|")
        swap, part = (note, part) if note.startswith("swap") else (swap, int(note) if note else part)
        for number in numbers if "*" in known else ():
            fragment = fragment.replace("*", number, 1)
        return fragment

    renamed = _pattern(tuple(weights)).sub(other, name) if weights else name
    return ComfyUIName(renamed, part, swap)


def diffusers_names(weights: Mapping[str, str], name: str) -> Iterator[tuple[str, ComfyUIName]]:
    """Every diffusers name of a ComfyUI module, with its ComfyUI name: several if the module is fused."""
    back: dict[str, list[str]] = {}
    for ours, theirs in weights.items():
        back.setdefault(theirs.partition("|")[0], []).append(ours)
    for names in _all(back, name):
        other = comfyui_name(weights, names)
        if other.name == name:
            yield names, other


def _all(back: Mapping[str, list[str]], name: str) -> Iterator[str]:
    """``name`` with every alternative for each of its fragments."""
    match = _pattern(tuple(back)).search(name) if back else None
    if match is None:
        yield name
        return
    numbers = re.findall(r"(?<=\.)\d+(?=\.)", match[0])
    known = match[0] if match[0] in back else re.sub(r"(?<=\.)\d+(?=\.)", "*", match[0])
    for fragment in back[known]:
        for number in numbers if "*" in known else ():
            fragment = fragment.replace("*", number, 1)
        for tail in _all(back, name[match.end() :].lstrip(".")) if match.end() < len(name) else ("",):
            yield name[: match.start()] + fragment + ("." + tail if tail else "")


@functools.cache
def _pattern(fragments: tuple[str, ...]) -> re.Pattern:
    longest_first = "|".join(re.escape(f).replace(r"\*", r"\d+") for f in sorted(fragments, key=len, reverse=True))
    return re.compile(rf"(?<![^.])(?:{longest_first})(?![^.])")


# --- LoRA files -----------------------------------------------------------------------------------------------------
PREFIXES = ("", "transformer.", "diffusion_model.", "base_model.model.", "base_model.model.transformer.")
UNDERSCORED = ("lora_unet_", "lora_transformer_", "lycoris_")
"""Prefixes that trainers put before a module's name, with and without dots."""


def spellings(weights: Mapping[str, str], name: str, shape: tuple[int, int]) -> dict[str, tuple[int, int] | None]:
    """Every name of a ComfyUI linear layer in LoRA files -> (start, length) of its rows, None for all.

    Args:
        shape: (out, in) of its weight.
    """
    rows_of: dict[str, tuple[int, int] | None] = {name: None}
    candidates = {ours: theirs for ours, theirs in diffusers_names(weights, name) if not theirs.swapped(shape)}
    parts = {theirs.part for theirs in candidates.values() if theirs.part is not None}
    ahead = sum(part >= 0 for part in parts) * shape[1]  # counted from the start: blocks as wide as the layer's input
    behind = (shape[0] - ahead) // max(1, sum(part < 0 for part in parts))
    for ours, theirs in candidates.items():
        own = shape[0] if theirs.part is None else shape[1] if theirs.part >= 0 else behind
        rows_of[ours] = None if theirs.part is None else theirs.rows(shape[0], own)
    dotted = {prefix + n: rows for n, rows in rows_of.items() for prefix in PREFIXES}
    return dotted | {prefix + n.replace(".", "_"): rows for n, rows in rows_of.items() for prefix in UNDERSCORED}
