"""Blocking: value neurons multiplied by a factor while the block is open, row by row (NeMo, section 3.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..config import Config
from ..errors import refuse
from ..hooks import Edit, edit
from ..site import ModuleSite, Site
from .neurons import NeuronSet, width_of
from .sites import value_sites


@dataclass(frozen=True)
class BlockConfig(Config):
    """How strongly, and where, neurons are blocked.

    Attributes:
        factor: what their activations are multiplied by, -1..1: 0 blocks (published), 1 changes nothing.
        branch: ``both`` rows of guidance (published), or ``cond`` only, which leaves the negative prompt alone.
        start, end: part of sampling during which it acts, 0..1.
        tokens: positions in the prompt where it acts, 0 the start token; None is everywhere (published). Blocking only
            at the words that trigger a copy leaves the rest of the prompt its neurons.
    """

    factor: float = 0.0
    branch: str = "both"
    start: float = 0.0
    end: float = 1.0
    tokens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None and (not self.tokens or min(self.tokens) < 0):
            raise refuse("tokens", self.tokens, "positions of 0 or more, or None", "None blocks at every token")
        if not -1 <= self.factor <= 1:
            raise refuse("factor", self.factor, "-1 .. 1", "0 blocks; positive factors above 0.25 do not cure")
        if self.branch not in ("both", "cond"):
            raise refuse("branch", self.branch, ("both", "cond"), "both is the published way")
        if not 0 <= self.start <= self.end <= 1:
            raise refuse("start, end", (self.start, self.end), "0 <= start <= end <= 1", "use 0 and 1")


PUBLISHED = BlockConfig()


def token_positions(text: str) -> tuple[int, ...] | None:
    """Places from text: "3-5, 9" -> (3, 4, 5, 9); an empty text -> None, everywhere.

    Raises:
        VitrineError: anything but numbers, ranges and commas.
    """
    found: set[int] = set()
    for part in filter(None, (p.strip() for p in text.split(","))):
        ends = [e.strip() for e in part.split("-")]
        if len(ends) > 2 or not all(e.isdecimal() and len(e) < 6 for e in ends) or int(ends[0]) > int(ends[-1]):
            raise refuse("tokens", part, "positions and ranges such as 3-5, 9", "count from 0, the start token")
        found.update(range(int(ends[0]), int(ends[-1]) + 1))
    return tuple(sorted(found)) or None


def factors(
    backbone: nn.Module, sites: Iterable[ModuleSite], neurons: Mapping[str, Sequence[int]], factor: float = 0.0
) -> dict:
    """address -> (width,) of ones with ``factor`` at the neurons given."""
    made = {}
    for site in sites:
        if neurons.get(site.address):
            row = torch.ones(width_of(backbone, site))
            row[list(neurons[site.address])] = factor
            made[site.address] = row
    return made


@dataclass
class Now:
    """What holds during the running forward: whether blocking acts at all, and in which rows (None: in all)."""

    active: bool = True
    rows: torch.Tensor | None = None

    def update(self, config: BlockConfig, t: float, cond_rows: torch.Tensor | None) -> None:
        """Set both from the network's timestep (999 is the start of sampling) and the rows that have the prompt."""
        progress = 1 - t / 999
        self.active = config.start <= progress and (progress < config.end or config.end == 1)
        self.rows = cond_rows if config.branch == "cond" else None


def scaled(
    scale: torch.Tensor, now: Now | None = None, tokens: Sequence[int] | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """An edit that multiplies (B, N, width) by (width,) or, row by row, by (B, width); at ``tokens`` only if given."""

    def change(values: torch.Tensor) -> torch.Tensor:
        if now is not None and not now.active:
            return values
        wide = scale.to(values)
        changed = values * (wide if wide.ndim == 1 else wide[:, None])
        if tokens is not None:
            here = torch.zeros(values.shape[1], dtype=torch.bool, device=values.device)
            here[[i for i in tokens if i < len(here)]] = True
            changed = torch.where(here[:, None], changed, values)
        if now is None or now.rows is None:
            return changed
        return torch.where(now.rows.to(values.device).view(-1, 1, 1), changed, values)

    return change


def block(
    backbone: nn.Module,
    neurons: NeuronSet,
    config: BlockConfig = PUBLISHED,
    *,
    rows: torch.Tensor | None = None,
    now: Now | None = None,
    fingerprint: str = "",
) -> Edit:
    """Neurons blocked while the ``with`` block is open; leaving it restores the module bit for bit.

    Args:
        rows: (B,) bool, the rows to change; None changes all.
        now: whoever runs the sampler keeps it up to date, for a branch or a part of sampling only.
        fingerprint: of the model, where its modules carry patches at the moment.

    Raises:
        VitrineError: a set made for another model, or places this model does not have.
    """
    table = neurons.check(backbone, value_sites(backbone, "all"), fingerprint)
    made = factors(backbone, table.values(), neurons.neurons, config.factor)
    changes: dict[str | Site, Callable] = {table[a]: scaled(row, now, config.tokens) for a, row in made.items()}
    return edit(backbone, changes, rows=rows)


def block_rows(backbone: nn.Module, sites: Sequence[ModuleSite], sets: Sequence[Mapping[str, Sequence[int]]]) -> Edit:
    """Many sets in one batch: row i has set i blocked."""
    changes: dict[str | Site, Callable] = {}
    for site in sites:
        scale = torch.ones(len(sets), width_of(backbone, site))
        for i, neurons in enumerate(sets):
            scale[i, list(neurons.get(site.address, ()))] = 0.0
        if bool((scale == 0).any()):
            changes[site] = scaled(scale)
    return edit(backbone, changes)


@torch.no_grad()
def bake(
    backbone: nn.Module, neurons: NeuronSet, factor: float = 0.0, fingerprint: str = "",
    originals: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Parameter name -> new value with the neurons' rows (and bias entries) scaled; equals blocking them exactly.

    Nothing is written: load the result with ``load_state_dict(..., strict=False)``, or save it as a patch.

    Args:
        originals: parameter name -> its value in the checkpoint, where the network carries another at the moment.

    Raises:
        VitrineError: see :meth:`NeuronSet.check`.
    """
    changed: dict[str, torch.Tensor] = {}
    for address, site in neurons.check(backbone, value_sites(backbone, "all"), fingerprint).items():
        module = backbone.get_submodule(site.path)
        first = site.columns[0] * width_of(backbone, site) if site.columns else 0
        index = torch.tensor(neurons.neurons[address]) + first
        for name, value in module.named_parameters(recurse=False):
            if name in ("weight", "bias"):
                key = f"{site.path}.{name}"
                new = changed.get(key, (originals or {}).get(key, value).detach().clone())
                new[index.to(new.device)] *= factor
                changed[key] = new
    return changed
