"""What a transfer will do to one model, decided before anything is touched; nodes and pipelines share it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..diffusion.schedule import NoiseSchedule
from ..errors import refuse
from .plan_sentence import sentence
from .posembed import Grid, StoredGrid, centre_crop, rebuilt_table, resized_table
from .receptive import steps_of
from .rope import DYNAMIC, PATENT, ROPE_MODES
from .shift import Size, flux_shift, scaled_guidance, shift_grid, size_ratio
from .transfer_config import ResolutionTransferConfig, TrainedSchedule

_TABLES = ("keep", "grid", "extrapolate", "bicubic")
_OFFERED = {
    "none": ("keep",), "unknown": ("keep",), "sincos": _TABLES, "stored": _TABLES, "learned": ("keep", "bicubic"),
    "rope": ("keep", *ROPE_MODES), "computed": ("keep", "grid", "extrapolate"),
}  # fmt: skip
_AUTO = {"sincos": "grid", "stored": "grid", "rope": "rope_pi", "computed": "grid"}


@dataclass(frozen=True)
class Positions:
    """How a model knows where its tokens are.

    Attributes:
        kind: ``none``, ``unknown`` (refused unless kept), ``sincos`` (a table the model can compute), ``stored`` (a
            sin-cos table kept in the weights), ``learned`` (any other table), ``rope``, ``computed`` (from the
            latent's size at each call, with a divisor that can be set).
        base: tokens a side that a computed table is spread over, as the model stands.
        scale: ``interpolation_scale`` that goes with the training size.
        size: tokens a side of a stored table.
        table: that table, (1, size size, dim).
        grid: what the table was recovered as.
    """

    kind: str = "none"
    base: int = 0
    scale: float = 1.0
    size: int = 0
    table: torch.Tensor | None = None
    grid: StoredGrid | None = None


@dataclass(frozen=True)
class ModelFacts:
    """What a plan has to know of a model.

    Attributes:
        name: of its class, for the summary.
        schedule: its noise schedule.
        train_size: (width, height) in pixels that it was made for; None if unknown.
        factor: pixels to a latent, a side.
        patch: latents to a token, a side.
        shift: a flow model's own shift, at its training size where that depends on the size.
        dynamic: the numbers of FLUX's linear law (base, most, low, high), if the model follows it.
        convolutional: a UNet, whose receptive field is part of the problem.
        counting: name of a scheduler that counts timesteps, so that its grid cannot be moved.
        set_before: the schedule is not the model's own: someone has set it, perhaps for the new size already.
    """

    name: str
    schedule: NoiseSchedule
    train_size: Size | None = None
    factor: int = 8
    patch: int = 1
    shift: float = 1.0
    dynamic: tuple[int, int, float, float] | None = None
    positions: Positions = Positions()
    convolutional: bool = False
    counting: str = ""
    set_before: bool = False

    def tokens(self, size: Size) -> Grid:
        """(rows, columns) of a picture (width, height).

        Raises:
            VitrineError: If a side is not a whole number of tokens.
        """
        step = self.factor * self.patch
        if size[0] % step or size[1] % step:
            raise refuse("picture size", size, f"multiples of {step}", "round both sides")
        return size[1] // step, size[0] // step


@dataclass(frozen=True)
class Plan:
    """The decisions.

    Attributes:
        ratio: r.
        schedule: ``none``, ``resample`` or ``relabel``; ``none`` whenever r is 1.
        positions: ``keep``, or the mode that is applied.
        guidance: the scale to sample with; None where the caller decides.
        shift: a flow model's total shift r x its own; None for others.
        train, target: (rows, columns) in tokens.
        lines: of the summary.
        step: (rows, columns) between the taps of a UNet's inner convolutions; (1, 1) leaves them.
    """

    config: ResolutionTransferConfig
    ratio: float
    schedule: str
    positions: str
    guidance: float | None
    shift: float | None
    train: Grid
    target: Grid
    lines: tuple[str, ...] = ()
    step: Grid = (1, 1)

    @property
    def summary(self) -> str:
        """What will be done, for people; one line for each part."""
        return "\n".join(self.lines)

    @property
    def scales(self) -> tuple[float, float]:
        """New / trained tokens of rows and columns; both the shorter side's with ``isotropic``."""
        if self.config.aspect == "isotropic":
            return (min(self.target) / min(self.train),) * 2
        return self.target[0] / self.train[0], self.target[1] / self.train[1]

    def table(self, positions: Positions, dim: int) -> torch.Tensor:
        """(1, H W, dim) the new table of a model with one."""
        settings = (self.target, self.train, self.positions, self.config.align, self.config.aspect)
        if positions.kind == "sincos":
            return rebuilt_table(dim, *settings, scale=positions.scale)
        if self.positions == "bicubic":
            assert positions.table is not None
            trained = centre_crop(positions.table, positions.size, self.train)
            return resized_table(trained, self.train, self.target)
        assert positions.grid is not None
        return positions.grid.table(*settings)


def plan_transfer(
    facts: ModelFacts, config: ResolutionTransferConfig, metadata: Mapping[str, Any] | None = None
) -> Plan:
    """Decide every part of the transfer for this model and target, with a summary of it.

    Args:
        metadata: of the checkpoint's safetensors header; relabel needs it.

    Raises:
        VitrineError: If the training size is unknown, the model does not support a mode, or relabel is asked of weights
            that were not trained for it.
    """
    train = config.train_size or facts.train_size
    if train is None:
        raise refuse("train size", "none, and the model does not say", "(width, height)", "give it in pixels")
    ratio = size_ratio(train, config.target_size)
    grids = facts.tokens(train), facts.tokens(config.target_size)
    schedule = config.schedule if ratio != 1 else "none"
    if schedule == "relabel":
        _check_relabel(facts, config, ratio, TrainedSchedule.from_metadata(metadata))
    positions = _positions(facts, config, *grids)
    guidance = config.guidance
    if config.guidance_law and guidance is not None:
        guidance = scaled_guidance(guidance, ratio)
    flow = facts.schedule.kind == "flow"
    shift = facts.shift * (ratio if schedule == "resample" else 1) if flow else None
    plan = Plan(config, ratio, schedule, positions, guidance, shift, *grids)
    plan = replace(plan, step=_step(facts, plan))
    lines = (_size_line(facts, train, plan), *_schedule_lines(facts, plan), _position_line(facts, plan))
    scales = (config.guidance, guidance) if config.guidance is not None and guidance is not None else None
    short = sentence(ratio, schedule, positions, scales, plan.step != (1, 1))
    return replace(plan, lines=(short, *lines, _guidance_line(plan), *_limits(facts, plan)))


def _check_relabel(
    facts: ModelFacts, config: ResolutionTransferConfig, ratio: float, trained: TrainedSchedule | None
) -> None:
    if facts.schedule.kind == "flow":
        raise refuse("schedule", "relabel on a flow model", "resample or none", "a flow model has no table to relabel")
    if config.override:
        return
    remedy = "use resample, or override if you trained it so"
    if trained is None or trained.mode != "relabel":
        raise refuse("schedule", "relabel on a checkpoint that does not say so", "one trained relabelled", remedy)
    if abs(trained.ratio / ratio - 1) > 1e-3:
        raise refuse("relabel ratio", f"{ratio:.4g}", f"{trained.ratio:.4g}, as trained", remedy)


def _positions(facts: ModelFacts, config: ResolutionTransferConfig, train: Grid, target: Grid) -> str:
    positions = facts.positions
    offered = _OFFERED[positions.kind]
    if config.pos_embed == "auto" and positions.kind == "unknown" and train != target:
        remedy = "keep, to change the noise schedule alone"
        raise refuse("positions", f"those of {facts.name}, which are not known here", "a known family", remedy)
    wanted = _AUTO.get(positions.kind, "keep") if config.pos_embed == "auto" else config.pos_embed
    if wanted not in offered:
        mismatch = f"{wanted} on a model with {positions.kind} positions"
        raise refuse("pos_embed", mismatch, ("auto", *offered), "auto takes what fits the model")
    if wanted.endswith(DYNAMIC) and facts.schedule.kind != "flow":
        remedy = "take a mode without _dynamic"
        raise refuse("pos_embed", f"{wanted} on a {facts.schedule.kind} model", "a flow model", remedy)
    # A model built for another size than that of its training spreads its table over the wrong number of tokens.
    built_wrong = positions.kind == "sincos" and train != (positions.base, positions.base)
    if train == target and not built_wrong:
        return "keep"
    if wanted == "keep" and positions.kind in ("stored", "learned") and max(target) > positions.size:
        raise refuse("tokens", target, f"at most {positions.size} a side with keep", "use grid or extrapolate")
    if positions.kind == "computed" and wanted == "extrapolate" and target[0] * train[1] != target[1] * train[0]:
        remedy = "this model's positions have one divisor for both axes; use grid"
        raise refuse("pos_embed", f"extrapolate from {train} to {target} tokens", "one ratio for both axes", remedy)
    return wanted


def _step(facts: ModelFacts, plan: Plan) -> Grid:
    if plan.config.receptive_field == "none":
        return 1, 1
    if not facts.convolutional:
        remedy = "none: a transformer sees the whole picture at any size"
        raise refuse("receptive_field", f"{plan.config.receptive_field} on {facts.name}", "a UNet", remedy)
    return steps_of(plan.scales)


# --- the summary --------------------------------------------------------------------------------------------------
def _size_line(facts: ModelFacts, train: Size, plan: Plan) -> str:
    (w, h), (w2, h2) = train, plan.config.target_size
    moved = f"r = {plan.ratio:.4f}, log-SNR {-2 * math.log(plan.ratio):+.4f}"
    return f"size: {facts.name}, {w} x {h} -> {w2} x {h2} pixels; {moved}"


def _schedule_lines(facts: ModelFacts, plan: Plan) -> list[str]:
    lines = _moved_lines(facts, plan)
    if facts.set_before and plan.schedule != "none":
        lines.append(
            "schedule: set by a node before this one (ModelSamplingFlux, ModelSamplingSD3 ...), and taken as meant for "
            "the trained size; if it was meant for the new size, take schedule none"
        )
    return lines


def _moved_lines(facts: ModelFacts, plan: Plan) -> list[str]:
    if plan.schedule == "none":
        return ["schedule: unchanged" + (" (r = 1)" if plan.ratio == 1 else "")]
    if facts.schedule.kind == "flow":
        return _flow_lines(facts, plan)
    ends = [math.exp(float(facts.schedule.log_sigmas[i])) for i in (0, -1)]
    if plan.schedule == "relabel":
        text = "relabel: each timestep stands for r x its sigma; right only for weights trained so"
        new = [plan.ratio * e for e in ends]
    else:
        moved = "more" if plan.ratio > 1 else "less"
        text = f"resample ({plan.config.top}): steps move to {moved} noise, the network is told the true level"
        new = shift_grid(torch.tensor(ends), plan.ratio, ends[1], plan.config.top).tolist()
    lines = [f"schedule: {text}; sigma {ends[0]:.4g} .. {ends[1]:.4g} -> {new[0]:.4g} .. {new[1]:.4g}"]
    if plan.schedule == "resample" and facts.counting:
        lines.append(f"schedule: Euler takes the place of {facts.counting}; the step is that of DDIM with eta 0")
    return lines


def _flow_lines(facts: ModelFacts, plan: Plan) -> list[str]:
    whose = "what a node before this one has set" if facts.set_before else "the model's own"
    lines = [f"schedule: resample: shift {facts.shift:.4g} -> {plan.shift:.4g} (r x {whose})"]
    if facts.dynamic:
        rows, columns = plan.target
        law = flux_shift(rows * columns, *facts.dynamic)
        lines.append(f"schedule: the model's linear law alone would give {law:.4g} here; the r law replaces it")
    return lines


def _position_line(facts: ModelFacts, plan: Plan) -> str:
    positions, grids = facts.positions, f"{plan.train} -> {plan.target} tokens (rows, columns)"
    if positions.kind in ("none", "unknown"):
        return f"positions: {positions.kind}" + "; as they are" * (positions.kind == "unknown")
    if plan.positions == "keep":
        return f"positions: {positions.kind}, kept; {grids}"
    placing = f"{plan.config.align}, {plan.config.aspect}" if plan.positions == "grid" else plan.config.aspect
    text = f"positions: {positions.kind}, {plan.positions} ({placing}); {grids}"
    if plan.positions.endswith(DYNAMIC):
        text += f"; {PATENT}"
    if positions.kind == "sincos" and plan.train != (positions.base, positions.base):
        text += f"; pinned to {max(plan.train)}: this model is built for {positions.base} and would extrapolate"
    return text


def _guidance_line(plan: Plan) -> str:
    if plan.guidance is None:
        return "guidance: left to you"
    if plan.config.guidance_law:
        return f"guidance: {plan.config.guidance:g} -> {plan.guidance:.4g} (1 + r (scale - 1), Eq. 4)"
    return f"guidance: {plan.guidance:g}, unchanged"


def _limits(facts: ModelFacts, plan: Plan) -> list[str]:
    if not facts.convolutional:
        return []
    if plan.step != (1, 1):
        taps = f"taps of the inner convolutions {plan.step[0]} x {plan.step[1]} cells (rows, columns) apart"
        return [f"receptive field: {taps}, so that they reach as far across the picture as in training"]
    if plan.config.receptive_field != "none" and plan.ratio != 1:
        return ["receptive field: unchanged, neither side is 1.5 times the trained one"]
    if plan.ratio <= 1:
        return []
    remedy = "receptive_field dilate cures them" if max(plan.scales) >= 1.5 else "its receptive field stays as it was"
    return [f"limits: the noise schedule does not cure repeated objects of a UNet; {remedy}"]
