"""One printable name for every place that has an activation, the same on diffusers and ComfyUI models.

The names are those of the official code of GDF ("Not All Diffusion Model Activations Have Been Evaluated as
Discriminative Features", NeurIPS 2024): ``up-level1-repeat1-vit-block0-cross-q``. Index 0 runs first, so up-level0 has
the *lowest* resolution. Where GDF has no name, its grammar is extended: ``-self-out``, ``-cross-out``, ``-ffn-out``,
``-cross-k``, ``-cross-v``, and for transformers ``vit-block{b}-q``, ``-ctx-q``, ``-attn-out`` ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from ..families import layout_of
from ..network.site import ModuleSite, Site
from ..network.structure import once
from .address_patterns import AUTO, matching, split_patterns

__all__ = ["AUTO", "resolve", "sites_of", "split_patterns", "usual"]


def sites_of(backbone: nn.Module) -> dict[str, Site]:
    """Every address of a backbone in execution order. Needs no forward and works on the meta device.

    Raises:
        VitrineError: If no known family fits the backbone.
    """
    return dict(once(_table, backbone))


def _table(backbone: nn.Module) -> dict[str, Site]:
    return {site.address: site for site in layout_of(backbone)}


def resolve(backbone: nn.Module, patterns: str | Sequence[str]) -> list[Site]:
    """The sites that match addresses or globs (``up-level*-cross-q``), each once, in execution order.

    A string may hold several patterns, separated by commas or spaces; ``auto`` stands for :func:`usual`.

    Raises:
        VitrineError: If a pattern matches nothing; the message names the nearest valid addresses.
    """
    table = once(_table, backbone)
    default = usual(table) if AUTO in split_patterns(patterns) else ""
    return [table[address] for address in matching(table, default, patterns)]


def usual(table: Mapping[str, Site]) -> str:
    """A place that every model has, for who names none: queries of image tokens, three fifths of the way through.

    They are those of the cross-attention where there is one; there GDF's selections and DIFT's place lie, too.
    """
    places = [a for a, s in table.items() if isinstance(s, ModuleSite) and s.kind == "tokens" and a.endswith("-q")]
    queries = [a for a in places if a.endswith("-cross-q")] or places or list(table)
    return queries[3 * len(queries) // 5]
