"""Where one activation is found inside a backbone, in one library's layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Stream:
    """Where one stream of tokens gets its queries and keys for a joint attention map.

    Attributes:
        query, key: module paths of the projections.
        columns, key_columns: slices of fused projections, as in :class:`ModuleSite`.
        norm_query, norm_key: paths of the norms on each head, or "".
    """

    query: str
    key: str
    columns: tuple[int, int] | None = None
    key_columns: tuple[int, int] | None = None
    norm_query: str = ""
    norm_key: str = ""


@dataclass(frozen=True)
class ModuleSite:
    """A tensor that a module takes in or gives out.

    Attributes:
        address: the canonical name.
        path: dotted module path inside the backbone.
        kind: ``"spatial"`` (B, C, h, w), ``"tokens"`` (image tokens, presented as (B, C, h, w)) or ``"text"`` (text
            tokens, (B, N, C)).
        before: read the module's input instead of its output.
        element: index into an output that is a tuple.
        columns: (i, n): the i-th of n equal slices of the last axis (fused q, k, v).
        width: channels of one slice when ``columns`` does not divide the axis evenly, else 0.
        skip_text: the token stream starts with the text tokens, which are cut off.
        flat_batch: the batch is folded into the token axis (ComfyUI's PixArt cross-attention).
        grid: module whose input carries (h, w): the path of the enclosing spatial transformer, or ``""`` for the
            backbone itself with ``patch``; None for text.
        patch: pixels of the latent for one token, with ``grid == ""``.
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


@dataclass(frozen=True)
class MapSite:
    """Attention probabilities (B, heads, queries, keys), recomputed from the projections' outputs.

    Attributes:
        address: the canonical name.
        path: dotted path of the attention module.
        query, key: module paths of the projections; of a joint map, ``key`` is the projection that runs last.
        heads: number of heads.
        columns, key_columns: slices of fused projections for queries and keys, as in :class:`ModuleSite`.
        width: channels of one slice when ``columns`` does not divide the axis evenly, else 0.
        flat_batch: the batch is folded into the keys' token axis.
        text_keys: the keys are text tokens, which a mask may hide.
        streams: of a joint map, in the order text, image; empty for an ordinary one.
        skip_text: only image tokens are kept as queries.
        rope: module among whose arguments the rotary embedding is, or "".
    """

    address: str
    path: str
    query: str = ""
    key: str = ""
    heads: int = 0
    columns: tuple[int, int] | None = None
    key_columns: tuple[int, int] | None = None
    width: int = 0
    flat_batch: bool = False
    text_keys: bool = False
    streams: tuple[Stream, ...] = ()
    skip_text: bool = False
    rope: str = ""

    kind: ClassVar[str] = "map"


Site = ModuleSite | MapSite
