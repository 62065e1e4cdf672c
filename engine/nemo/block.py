"""Blocking: value neurons multiplied by a factor while the block is open, row by row (NeMo, section 3.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..addresses import Site
from ..errors import refuse
from ..hooks import Edit, edit
from .neurons import NeuronSet, width_of
from .sites import value_sites


@dataclass(frozen=True)
class BlockConfig:
    """How strongly, and where, neurons are blocked.

    Attributes:
        factor: what their activations are multiplied by, -1..1: 0 blocks (published), 1 changes nothing.
        branch: ``both`` rows of guidance (published), or ``cond`` only, which leaves the negative prompt alone.
        start, end: part of sampling during which it acts, 0..1.
    """

    factor: float = 0.0
    branch: str = "both"
    start: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        if not -1 <= self.factor <= 1:
            raise refuse("factor", self.factor, "-1 .. 1", "0 blocks; positive factors above 0.25 do not cure")
        if self.branch not in ("both", "cond"):
            raise refuse("branch", self.branch, ("both", "cond"), "both is the published way")
        if not 0 <= self.start <= self.end <= 1:
            raise refuse("start, end", (self.start, self.end), "0 <= start <= end <= 1", "use 0 and 1")


PUBLISHED = BlockConfig()


def factors(
    backbone: nn.Module, sites: Iterable[Site], neurons: Mapping[str, Sequence[int]], factor: float = 0.0
) -> dict:
    """address -> (width,) of ones with ``factor`` at the neurons given."""
    made = {}
    for site in sites:
        if neurons.get(site.address):
            row = torch.ones(width_of(backbone, site))
            row[list(neurons[site.address])] = factor
            made[site.address] = row
    return made


def scaled(scale: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """An edit that multiplies (B, N, width) by (width,) or, row by row, by (B, width)."""

    def change(values: torch.Tensor) -> torch.Tensor:
        wide = scale.to(values)
        return values * (wide if wide.ndim == 1 else wide[:, None])

    return change


def block(
    backbone: nn.Module, neurons: NeuronSet, config: BlockConfig = PUBLISHED, *, rows: torch.Tensor | None = None
) -> Edit:
    """Neurons blocked while the ``with`` block is open; leaving it restores the module bit for bit.

    Args:
        rows: (B,) bool, the rows to change; None changes all.

    Raises:
        VitrineError: a set made for another model, or places this model does not have.
    """
    table = neurons.check(backbone, value_sites(backbone, "all"))
    made = factors(backbone, table.values(), neurons.neurons, config.factor)
    return edit(backbone, {table[a]: scaled(row) for a, row in made.items()}, rows=rows)


def block_rows(backbone: nn.Module, sites: Sequence[Site], sets: Sequence[Mapping[str, Sequence[int]]]) -> Edit:
    """Many sets in one batch: row i has set i blocked."""
    changes = {}
    for site in sites:
        scale = torch.ones(len(sets), width_of(backbone, site))
        for i, neurons in enumerate(sets):
            scale[i, list(neurons.get(site.address, ()))] = 0.0
        if bool((scale == 0).any()):
            changes[site] = scaled(scale)
    return edit(backbone, changes)


@torch.no_grad()
def bake(backbone: nn.Module, neurons: NeuronSet, factor: float = 0.0) -> dict[str, torch.Tensor]:
    """Parameter name -> new value with the neurons' rows (and bias entries) scaled; equals blocking them exactly.

    Nothing is written: load the result with ``load_state_dict(..., strict=False)``, or save it as a patch.

    Raises:
        VitrineError: see :meth:`NeuronSet.check`.
    """
    changed: dict[str, torch.Tensor] = {}
    for address, site in neurons.check(backbone, value_sites(backbone, "all")).items():
        module = backbone.get_submodule(site.path)
        first = site.columns[0] * width_of(backbone, site) if site.columns else 0
        index = torch.tensor(neurons.neurons[address]) + first
        for name, value in module.named_parameters(recurse=False):
            if name in ("weight", "bias"):
                key = f"{site.path}.{name}"
                new = changed.get(key, value.detach().clone())
                new[index.to(new.device)] *= factor
                changed[key] = new
    return changed
