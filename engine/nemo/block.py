"""Blocking: value neurons multiplied by a factor while the block is open, row by row (NeMo, section 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import nn

from ..diffusion.schedule import append_dims
from ..errors import refuse
from ..io.number_checks import refuse_unless_finite
from ..network.site import ModuleSite, Site
from ..runtime.stored_weights import as_numbers, is_packed
from ..settings.option import Option, Options
from ..tracing.fingerprint import width_of
from ..tracing.hooks import Edit, edit
from ..tracing.reading import check_rows
from .neurons import LEAST_FACTOR, NeuronSet
from .sites import value_sites


@dataclass(frozen=True)
class BlockConfig(Options):
    """How strongly, and where, neurons are blocked."""

    factor: Annotated[
        float | None,
        Option(
            "What the neurons' activations are multiplied by; 1 is off.",
            ge=LEAST_FACTOR,
            le=1,
            step=0.05,
            unset=0.0,
            unset_doc="the factor that Find Copying Neurons (NEMO) chose; of other lists 0, which blocks",
            details="0 blocks, as published.",
            remedy="0 blocks; positive factors above 0.25 do not cure",
        ),
    ] = None
    branch: Annotated[
        str,
        Option(
            "cond leaves the negative prompt alone.",
            choices=("both", "cond"),
            details="both is the published way.",
            remedy="both is the published way",
        ),
    ] = "both"
    start_percent: Annotated[
        float,
        Option(
            "When blocking begins, as a fraction of the run: 0 is its beginning, 1 its end.",
            ge=0,
            le=1,
            step=0.01,
        ),
    ] = 0.0
    end_percent: Annotated[
        float,
        Option(
            "When blocking ends, as a fraction of the run: 0 is its beginning, 1 its end.",
            ge=0,
            le=1,
            step=0.01,
        ),
    ] = 1.0
    tokens: Annotated[
        tuple[int, ...] | None,
        Option(
            "Positions in the text that the network reads, from 0. Blocking only at the words "
            "that trigger a copy leaves the rest of the prompt its neurons.",
            ge=0,
            unset_doc="everywhere, as published",
            remedy="None blocks at every token",
        ),
    ] = None

    def _check(self) -> None:
        """Some position, and a start that is not after the end."""
        if self.tokens == ():
            raise refuse("tokens", self.tokens, "positions of 0 or more, or None", "None blocks at every token")
        if self.start_percent > self.end_percent:
            fractions = self.start_percent, self.end_percent
            raise refuse("start_percent, end_percent", fractions, "0 <= start <= end <= 1", "use 0 and 1")


PUBLISHED = BlockConfig()


def token_positions(text: str) -> tuple[int, ...] | None:
    """Positions from text: "3-5, 9" -> (3, 4, 5, 9); an empty text -> None, everywhere."""
    positions: set[int] = set()
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        ends = [end.strip() for end in item.split("-")]
        if len(ends) > 2 or not all(e.isdecimal() and len(e) < 6 for e in ends) or int(ends[0]) > int(ends[-1]):
            raise refuse(
                "tokens", item, "positions and ranges such as 3-5, 9", "count from 0; of CLIP's the first word is at 1"
            )
        positions.update(range(int(ends[0]), int(ends[-1]) + 1))
    return tuple(sorted(positions)) or None


@dataclass
class RunningForward:
    """What blocking must know of the forward that is running.

    Attributes:
        active: whether it acts at all.
        rows: (B,) bool, the rows in which it acts; None: in all.
        lengths: (B,) tokens of each row's own prompt, where it was repeated to match a longer one; 0 where it was not.
    """

    active: bool = True
    rows: torch.Tensor | None = None
    lengths: torch.Tensor | None = None

    def update(self, config: BlockConfig, share: float, cond_rows: Callable[[], torch.Tensor]) -> None:
        """Set ``active`` and ``rows``, from how much of the run is over (0 .. 1) and the (B,) rows with the prompt.

        Args:
            cond_rows: called only where it matters.
        """
        self.active = config.start_percent <= share and (share < config.end_percent or config.end_percent == 1)
        self.rows = cond_rows() if config.branch == "cond" and self.active else None


def block(
    backbone: nn.Module,
    neurons: NeuronSet,
    config: BlockConfig = PUBLISHED,
    *,
    rows: torch.Tensor | None = None,
    running: RunningForward | None = None,
    fingerprint: str = "",
) -> Edit:
    """Blocks neurons while the ``with`` block is open; leaving it restores the module bit for bit.

    Args:
        rows: (B,) bool, the rows to change; None changes all.
        running: kept up to date by whoever runs the sampler, for a branch or a part of sampling only.
        fingerprint: of the model, where its modules carry patches at the moment.
    """
    changes: dict[str | Site, Callable] = {}
    for address, site in neurons.check(backbone, value_sites(backbone, "all"), fingerprint).items():
        factors = torch.ones(width_of(backbone, site))
        own = neurons.factors(address) if config.factor is None else [config.factor] * len(neurons.neurons[address])
        factors[list(neurons.neurons[address])] = torch.tensor(own)
        changes[site] = _multiplied(factors, running, config.tokens)
    return edit(backbone, changes, rows=rows)


def block_rows(
    backbone: nn.Module,
    sites: Sequence[ModuleSite],
    sets: Sequence[Mapping[str, Sequence[int]]],
    doses: Sequence[float] | None = None,
) -> Edit:
    """Blocks another set in each row of one batch: ``sets[i]``, address -> neurons, in row i, multiplied by doses[i].

    Args:
        doses: one factor for each row; None multiplies by 0.
    """
    changes: dict[str | Site, Callable] = {}
    for site in sites:
        factors = torch.ones(len(sets), width_of(backbone, site))
        for row, neurons, factor in zip(factors, sets, doses or [0.0] * len(sets), strict=True):
            row[list(neurons.get(site.address, ()))] = factor
        if bool((factors != 1).any()):
            changes[site] = _multiplied(factors)
    return edit(backbone, changes)


def _multiplied(
    factors: torch.Tensor, running: RunningForward | None = None, tokens: Sequence[int] | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The edit of one site's values (B, N, width), by factors (width,) for all rows or (B, width), one for each."""

    placed = factors

    def change(values: torch.Tensor) -> torch.Tensor:
        nonlocal placed
        if running is not None and not running.active:
            return values
        known = running.rows if running is not None and running.rows is not None else None
        if known is not None or placed.ndim == 2:
            check_rows(values, len(placed if known is None else known))
        placed = placed.to(values)  # uploaded once, not once a step
        # NeMo, section 3: v_i <- factor v_i for each neuron i to block, 1 v_i for the others
        blocked = values * placed.unsqueeze(-2)
        if tokens is not None:
            chosen = _at_tokens(tokens, values, None if running is None else running.lengths)
            blocked = torch.where(chosen[..., None], blocked, values)
        if running is not None and running.rows is not None:
            blocked = torch.where(append_dims(running.rows.to(values.device), 3), blocked, values)
        return blocked

    return change


def _at_tokens(tokens: Sequence[int], values: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """(1 or B, N) bool: where the values (B, N, width) are those of the tokens, in every copy of a repeated prompt."""
    count = values.shape[1]
    positions = torch.arange(count)[None]
    if lengths is not None:
        whole = torch.full_like(lengths, count)
        repeated = (lengths > 0) & (count % torch.where(lengths > 0, lengths, whole) == 0)
        positions = positions % torch.where(repeated, lengths, whole)[:, None]
    return torch.isin(positions, torch.tensor(tokens)).to(values.device)


@torch.no_grad()
def bake(
    backbone: nn.Module,
    neurons: NeuronSet,
    factor: float | None = None,
    fingerprint: str = "",
    originals: Mapping[str, torch.Tensor] | None = None,
    as_patch: bool = False,
) -> dict[str, torch.Tensor]:
    """Parameter name -> new value with the neurons' rows (and bias entries) scaled; equals blocking them exactly.

    Nothing is written: load the result with ``load_state_dict(..., strict=False)``, or save it as a patch. Weights of
    8 bits are given in float32.

    Args:
        factor: what they are scaled by; None is the set's own.
        originals: parameter name -> its value in the checkpoint, where the network carries another at the moment.
        as_patch: the result is added to quantised weights by who asks, as ComfyUI does; else these are refused.
    """
    refuse_unless_finite("factor", factor)
    changed: dict[str, torch.Tensor] = {}
    for address, site in neurons.check(backbone, value_sites(backbone, "all"), fingerprint).items():
        if site.joint:
            shown, accepted = f"{address}, whose weights read image tokens too", "values that read text alone"
            raise refuse("neurons to bake", shown, accepted, "block them while sampling instead")
        first = site.columns[0] if site.columns else 0
        index = torch.tensor(neurons.neurons[address]) + first
        own = neurons.factors(address) if factor is None else (factor,) * len(index)
        module = backbone.get_submodule(site.path)
        for name, value in _rows_of_outputs(module, address):
            key = f"{site.path}.{name}"
            if is_packed(value) and not as_patch:
                shown = f"{key}, stored as {type(value).__name__}"
                remedy = "load the model unquantised, or block the neurons while sampling"
                raise refuse("weights to bake", shown, "weights that can be written to", remedy)
            stored = (originals or {}).get(key, value)
            new = changed[key] if key in changed else as_numbers(stored, module).detach().clone()
            scale = append_dims(torch.tensor(own).to(new), new.ndim)
            new[index.to(new.device)] *= scale
            changed[key] = new
    return changed


def _rows_of_outputs(module: nn.Module, address: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of a projection with a row for each of its outputs; those of adapters on it too.

    W + s B A has its rows scaled when those of W and of B are.
    """
    if any(len(getattr(module, name, ())) for name in ("lora_magnitude_vector", "lora_embedding_B")):
        raise refuse("adapter", f"{address} with a DoRA", "plain LoRAs", "fuse it into the weights first")
    for name, value in module.named_parameters():
        adapted = name.startswith("lora_B.") and name.endswith(".weight")
        if adapted or name in ("weight", "bias", "base_layer.weight", "base_layer.bias"):
            yield name, value
