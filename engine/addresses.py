"""One printable name for every place that has an activation, on diffusers and ComfyUI models alike.

The names are those of GDF ("Not All Diffusion Model Activations Have Been Evaluated as Discriminative Features",
NeurIPS 2024, official code): ``up-level1-repeat1-vit-block0-cross-q``. Index 0 is what runs first, so up-level0 is the
*lowest* resolution. Where GDF has no name, ours extend its grammar: ``-self-out``, ``-cross-out``, ``-ffn-out``,
``-cross-k``, ``-cross-v``, and for transformers ``vit-block{b}-q``, ``-ctx-q``, ``-attn-out`` ...
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from .errors import refuse


@dataclass(frozen=True)
class Stream:
    """Where one stream of tokens gets its queries and keys for a joint attention map.

    Attributes:
        query, key: module paths of the projections.
        columns, key_columns: slices of fused projections, as in :class:`Site`.
        norm_query, norm_key: paths of norms on each head, or "".
    """

    query: str
    key: str
    columns: tuple[int, int] | None = None
    key_columns: tuple[int, int] | None = None
    norm_query: str = ""
    norm_key: str = ""


@dataclass(frozen=True)
class Site:
    """Where one activation is found, in one layout.

    Attributes:
        address: the canonical name.
        path: dotted module path inside the backbone; for a map, the attention module.
        kind: ``"spatial"`` (B, C, h, w), ``"tokens"`` (image tokens, given as (B, C, h, w)), ``"text"`` (text tokens,
            (B, N, C)) or ``"map"`` (attention probabilities (B, heads, queries, keys)).
        before: read the module's input instead of its output.
        element: index into an output that is a tuple.
        columns: (i, n): the i-th of n equal slices of the last axis (fused q, k, v).
        width: channels of one slice when ``columns`` does not divide the axis evenly, else 0.
        skip_text: the token stream starts with the text tokens, which are cut off.
        flat_batch: the batch is folded into the token axis (ComfyUI's PixArt cross-attention).
        grid: module whose input carries (h, w): the path of the enclosing spatial transformer, or ``""`` for the
            backbone itself with ``patch``; None for text.
        patch: pixels of the latent for one token, with ``grid == ""``.
        query, key: module paths of to_q and to_k, for maps.
        heads: number of heads, for maps.
        key_columns: like ``columns`` for the keys of a map, whose ``columns`` are those of its queries.
        text_keys: the keys of a map are text tokens, which a mask may hide.
        streams: of a joint map, in the order text, image; ``key`` is then the projection that runs last.
        rope: module among whose arguments the rotary embedding is, or "".
    """

    address: str
    path: str
    kind: str = "spatial"
    before: bool = False
    element: int | None = None
    columns: tuple[int, int] | None = None
    width: int = 0
    skip_text: bool = False
    flat_batch: bool = False
    grid: str | None = None
    patch: int = 1
    query: str = ""
    key: str = ""
    heads: int = 0
    key_columns: tuple[int, int] | None = None
    text_keys: bool = False
    streams: tuple[Stream, ...] = ()
    rope: str = ""


def sites_of(backbone: nn.Module) -> dict[str, Site]:
    """Every address of a backbone in execution order. Needs no forward and works on the meta device.

    Raises:
        VitrineError: the family is not recognised.
    """
    from .layouts import layout_of

    return {site.address: site for site in layout_of(backbone)}


def resolve(backbone: nn.Module, patterns: str | Sequence[str]) -> list[Site]:
    """The sites that match addresses or globs (``up-level*-cross-q``), each once, in execution order.

    A comma- or space-separated string is taken as several patterns.

    Raises:
        VitrineError: a pattern matches nothing; the message names the nearest valid addresses.
    """
    table = sites_of(backbone)
    wanted: set[str] = set()
    names = split_patterns(patterns)
    if not names:
        raise refuse("addresses", patterns, "one address or glob at least", f"e.g. {next(iter(table))!r}")
    for pattern in names:
        found = fnmatch.filter(table, pattern)
        if not found:
            raise refuse("address", pattern, f"{len(table)} addresses of this model", _hint(pattern, list(table)))
        wanted.update(found)
    return [site for address, site in table.items() if address in wanted]


def split_patterns(patterns: str | Sequence[str]) -> list[str]:
    """A string with commas, spaces or newlines -> list of patterns; a sequence is taken as it is."""
    if isinstance(patterns, str):
        return patterns.replace(",", " ").split()
    return list(patterns)


def _hint(pattern: str, names: list[str]) -> str:
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
    return "Did you mean " + ", ".join(repr(n) for n in near) + "?"
