"""Site names: one printable name per activation site, equal on diffusers and ComfyUI models.

The names are those of the official code of GDF ("Not All Diffusion Model Activations Have Been Evaluated as
Discriminative Features", NeurIPS 2024): ``up-level1-repeat1-vit-block0-cross-q``. Index 0 runs first, so up-level0 has
the *lowest* resolution. Its grammar is extended to sites that GDF does not name: ``-self-out``, ``-cross-out``,
``-ffn-out``, ``-cross-k``, ``-cross-v``, and for transformers ``vit-block{b}-q``, ``-ctx-q``, ``-attn-out`` ...
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
    """Site name -> site of a backbone, in execution order. Needs no forward and works on the meta device."""
    return dict(once(_table, backbone))


def _table(backbone: nn.Module) -> dict[str, Site]:
    return {site.address: site for site in layout_of(backbone)}


def resolve(backbone: nn.Module, patterns: str | Sequence[str]) -> list[Site]:
    """The sites that match names or globs (``up-level*-cross-q``), each once, in execution order.

    A string may have several patterns, separated by commas or spaces; ``auto`` is :func:`usual`.
    """
    table = once(_table, backbone)
    default = usual(table) if AUTO in split_patterns(patterns) else ""
    return [table[address] for address in matching(table, default, patterns)]


def usual(table: Mapping[str, Site]) -> str:
    """Default site: image-token queries about 60 % through the network.

    Cross-attention queries if the model has them, where GDF's selections and DIFT's site are, too.
    """
    sites = [a for a, s in table.items() if isinstance(s, ModuleSite) and s.kind == "tokens" and a.endswith("-q")]
    queries = [a for a in sites if a.endswith("-cross-q")] or sites or list(table)
    return queries[3 * len(queries) // 5]
