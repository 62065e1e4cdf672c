"""Where one activation is found inside a backbone, in one library's layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

Columns = tuple[int, int]
"""(start, length) of a slice of the last axis."""


@dataclass(frozen=True)
class Stream:
    """Where one stream of tokens gets its queries and keys for an attention map.

    Attributes:
        query, key: module paths of the projections.
        columns, key_columns: slices of fused projections, as in :class:`ModuleSite`.
        norm_query, norm_key: paths of the norms, or "".
        whole_norm: the norms act on all heads together, not on each.
    """

    query: str
    key: str
    columns: Columns | None = None
    key_columns: Columns | None = None
    norm_query: str = ""
    norm_key: str = ""
    whole_norm: bool = False


@dataclass(frozen=True)
class AdaLN:
    """How a block modulates what its first norm gives (adaLN): f = (1 + scale) norm(x) + shift.

    Attributes:
        path: module that gives the modulation: (B, parts C), of T frames (B, T, parts C), with ``rows`` (B, parts, C).
        shift, scale: which of so many ``parts`` of equal width they are; no shift where it is None.
        table: name of a parameter of parts x C numbers that is added to it, or "".
        plus: module that has run before, whose output (the last element of a tuple) is added to it, or "".
        rms: the norm does not subtract the mean.
        weight: name of the norm's own weight (C,), or ""; ``above_one`` where it counts from 1.
        eps: the norm's.
    """

    path: str
    shift: int | None = 0
    scale: int = 1
    parts: int = 6
    rows: bool = False
    table: str = ""
    plus: str = ""
    rms: bool = False
    weight: str = ""
    above_one: bool = False
    eps: float = 1e-6


@dataclass(frozen=True)
class ModuleSite:
    """A tensor that a module takes in or gives out.

    Attributes:
        address: the canonical name.
        path: dotted module path inside the backbone.
        kind: ``"spatial"`` (B, C, h, w), ``"tokens"`` (image tokens, presented as (B, C, h, w), or (B, C, T, h, w) of
            a video), ``"text"`` (text tokens, (B, N, C)) or ``"adaln"`` (:func:`adaln_site`).
        before: read the module's input instead of its output.
        element: index into an output that is a tuple.
        columns: (start, length) of the slice of the last axis that is meant (fused q, k, v).
        joint: the tensor holds image and text tokens; those of ``kind`` are meant.
        flat_batch: the batch is folded into the token axis (ComfyUI's PixArt cross-attention).
        grid: module whose input carries (h, w): the path of the enclosing spatial transformer, or ``""`` for the
            backbone itself with ``patch``; None for text.
        patch: pixels of the latent for one token, with ``grid == ""``.
        adaln: of a block's input (that of its first norm): how the block modulates it.
    """

    address: str
    path: str
    kind: str = "spatial"
    before: bool = False
    element: int | None = None
    columns: Columns | None = None
    joint: bool = False
    flat_batch: bool = False
    grid: str | None = None
    patch: int = 1
    adaln: AdaLN | None = None


@dataclass(frozen=True)
class MapSite:
    """Attention probabilities (B, heads, queries, keys), recomputed from the projections' outputs.

    Attributes:
        address: the canonical name.
        path: dotted path of the attention module.
        query, key: module paths of the projections; of a map with streams, ``key`` is the projection that runs last.
        heads: number of heads of the queries; keys may have fewer, each shared by several.
        columns, key_columns: slices of fused projections for queries and keys, as in :class:`ModuleSite`.
        flat_batch: the batch is folded into the keys' token axis.
        text_keys: the keys are text tokens, which a mask may hide.
        streams: the streams of the token sequence in its own order, where norms or positions act on queries and keys.
        joint: the sequence holds image and text tokens; image tokens are kept as queries, keys are text, then image.
        rope: module among whose arguments the rotary embedding is, or "".
        rotary: (that module's arguments by place, by name) -> :class:`~vitrine.engine.tracing.joint_maps.Rope`.
        patch: pixels of the latent for one image token, of a joint map.
    """

    address: str
    path: str
    query: str = ""
    key: str = ""
    heads: int = 0
    columns: Columns | None = None
    key_columns: Columns | None = None
    flat_batch: bool = False
    text_keys: bool = False
    streams: tuple[Stream, ...] = ()
    joint: bool = False
    rope: str = ""
    rotary: Callable[[tuple, dict[str, Any]], Any] | None = field(default=None, compare=False)
    patch: int = 2

    kind: ClassVar[str] = "map"


Site = ModuleSite | MapSite


def adaln_site(site: ModuleSite) -> ModuleSite | None:
    """Where the modulation of a block's input is read, (B, 2, C): what f takes instead of (0, 1); None of others."""
    if site.adaln is None:
        return None
    return ModuleSite(f"{site.address}/adaln", site.adaln.path, "adaln", adaln=site.adaln)
