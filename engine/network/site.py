"""Activation sites: where an activation is inside a backbone, in one library's layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

Columns = tuple[int, int]
"""(start, length) of a slice of the last axis."""


@dataclass(frozen=True)
class Stream:
    """The projections of one token stream that give queries and keys of an attention map.

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
    """How a block modulates the output of its first norm (adaLN): f = (1 + scale) norm(x) + shift.

    Attributes:
        path: module whose output is the modulation: (B, parts C), of T frames (B, T, parts C), with ``rows`` (B,
            parts, C).
        shift, scale: their index among ``parts`` chunks of equal width; shift is None if there is none.
        table: name of a parameter (parts, C) that is added to it, or "".
        plus: module that runs before, whose output (the last element of a tuple) is added to it, or "".
        rms: the norm does not subtract the mean.
        weight: name of the norm's weight (C,), or ""; with ``above_one`` the factor is 1 + weight.
        eps: of the norm.
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
    """A tensor that is a module's input or output.

    Attributes:
        address: canonical name of the site.
        path: dotted module path inside the backbone.
        kind: ``"spatial"`` (B, C, h, w), ``"tokens"`` (image tokens, presented as (B, C, h, w), or (B, C, T, h, w) of
            a video), ``"text"`` (text tokens, (B, N, C)) or ``"adaln"`` (:func:`adaln_site`).
        before: read the module's input instead of its output.
        element: index into an output that is a tuple.
        columns: (start, length) of the site's slice of the last axis (fused q, k, v).
        joint: the tensor has image and text tokens; the site is those of ``kind``.
        flat_batch: the batch is folded into the token axis (ComfyUI's PixArt cross-attention).
        grid: module whose input has the size (h, w): the path of the enclosing spatial transformer, or ``""`` for the
            backbone itself with ``patch``; None for text.
        patch: latent pixels per token, with ``grid == ""``.
        adaln: for a block's input (that of its first norm), how the block modulates it.
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
    """Attention probabilities (B, heads, queries, keys), recomputed from the outputs of the projections.

    Attributes:
        address: canonical name of the site.
        path: dotted path of the attention module.
        query, key: module paths of the projections; with streams, ``key`` is the projection that runs last.
        heads: number of heads of the queries; keys may have fewer, each shared by several.
        columns, key_columns: slices of fused projections for queries and keys, as in :class:`ModuleSite`.
        flat_batch: the batch is folded into the keys' token axis.
        text_keys: the keys are text tokens, which a mask may hide.
        streams: the streams in the order of the token sequence, if norms or positions act on queries and keys.
        joint: the sequence has image and text tokens; queries are image tokens, keys are text, then image.
        rope: module that receives the rotary embedding as an argument, or "".
        rotary: (that module's positional arguments, keyword arguments) ->
            :class:`~vitrine.engine.tracing.joint_maps.Rope`.
        patch: latent pixels per image token, for a joint map.
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
    """The site of the modulation (shift, factor) of a block's input, (B, 2, C); None if it is not modulated."""
    if site.adaln is None:
        return None
    return ModuleSite(f"{site.address}/adaln", site.adaln.path, "adaln", adaln=site.adaln)
