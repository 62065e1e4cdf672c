"""The plan of a transfer, computed before anything is changed; shared by nodes and pipelines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..diffusion.schedule import NoiseSchedule
from ..errors import refuse
from .posembed import Grid, StoredGrid, rebuilt_table
from .receptive import LEAST, MEASURED, steps_of
from .rope import DYNAMIC, PATENT, ROPE_MODES
from .shift import Size, flux_shift, scaled_guidance, shift_grid, size_ratio
from .transfer_config import ResolutionTransferConfig, TrainedSchedule

_TABLES = ("keep", "grid", "extrapolate")
_OFFERED = {
    "none": ("keep",),
    "unknown": ("keep",),
    "sincos": _TABLES,
    "stored": _TABLES,
    "learned": ("keep",),
    "rope": ("keep", *ROPE_MODES),
    "computed": ("keep", "grid", "extrapolate"),
}
_AUTO = {"sincos": "grid", "stored": "grid", "rope": "rope_pi", "computed": "grid"}


@dataclass(frozen=True)
class Positions:
    """Position encoding of a model.

    Attributes:
        kind: ``none``, ``unknown`` (refused unless kept), ``sincos`` (a table that the model computes), ``stored`` (a
            sin-cos table kept in the weights), ``learned`` (any other table), ``rope``, ``computed`` (from the
            latent size in each call, with a divisor that can be set).
        base: tokens per side of a computed table, in the model as loaded.
        scale: ``interpolation_scale`` for the training size.
        size: tokens per side of a stored table.
        table: that table, (1, size size, dim).
        grid: the grid recovered from the table.
    """

    kind: str = "none"
    base: int = 0
    scale: float = 1.0
    size: int = 0
    table: torch.Tensor | None = None
    grid: StoredGrid | None = None


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model that a plan depends on.

    Attributes:
        name: its class name, for the summary.
        schedule: its noise schedule.
        train_size: (width, height) in pixels that it was trained at; None if unknown.
        factor: image pixels per latent position, along one side.
        patch: latent positions per token, along one side.
        shift: a flow model's shift; at its training size if it depends on the size.
        dynamic: parameters of FLUX's linear law (base, most, low, high), if the model uses it.
        convolutional: a UNet, whose receptive field matters.
        counting: name of a scheduler over integer timesteps, whose grid cannot be moved.
        set_before: a node has already changed the schedule, perhaps for the new size.
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
        """(height, width) in tokens of an image (width, height) in pixels."""
        step = self.factor * self.patch
        if size[0] % step or size[1] % step:
            raise refuse("picture size", size, f"multiples of {step}", "round both sides")
        return size[1] // step, size[0] // step


@dataclass(frozen=True)
class Plan:
    """The decisions of a transfer.

    Attributes:
        ratio: r.
        schedule: ``none``, ``resample`` or ``relabel``; ``none`` whenever r is 1.
        positions: ``keep``, or the mode to apply.
        guidance: the guidance scale to use; None leaves it to the caller.
        shift: a flow model's total shift, r x its own; None for others.
        train, target: (height, width) in tokens.
        lines: lines of the summary.
        step: dilation (rows, columns) of a UNet's inner convolutions; (1, 1) is unchanged.
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
        """A description for users, one line per part."""
        return "\n".join(self.lines)

    @property
    def scales(self) -> tuple[float, float]:
        """New / trained tokens along rows and columns."""
        return self.target[0] / self.train[0], self.target[1] / self.train[1]

    def table(self, positions: Positions, dim: int) -> torch.Tensor:
        """The new position table (1, H W, dim) of a model that has one."""
        if positions.kind == "sincos":
            return rebuilt_table(dim, self.target, self.train, self.positions, positions.scale)
        assert positions.grid is not None
        return positions.grid.table(self.target, self.train, self.positions)


def plan_transfer(
    facts: ModelFacts, config: ResolutionTransferConfig, metadata: Mapping[str, Any] | None = None
) -> Plan:
    """Decides every part of the transfer for this model and target.

    Args:
        metadata: of the checkpoint's safetensors header; relabel needs it.
    """
    train = config.train_size or facts.train_size
    if train is None:
        raise refuse("train size", "none, and the model has none", "(width, height)", "give it in pixels")
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
        raise refuse("schedule", "relabel on a checkpoint without it in its header", "one trained relabelled", remedy)
    if abs(trained.ratio / ratio - 1) > 1e-3:
        raise refuse("relabel ratio", f"{ratio:.4g}", f"{trained.ratio:.4g}, as trained", remedy)


def _positions(facts: ModelFacts, config: ResolutionTransferConfig, train: Grid, target: Grid) -> str:
    positions = facts.positions
    offered = _OFFERED[positions.kind]
    if config.pos_embed == "auto" and positions.kind == "unknown" and train != target:
        remedy = "keep, to change only the noise schedule"
        raise refuse("positions", f"those of {facts.name}, which are unknown", "a known family", remedy)
    mode = _AUTO.get(positions.kind, "keep") if config.pos_embed == "auto" else config.pos_embed
    if mode not in offered:
        mismatch = f"{mode} on a model with {positions.kind} positions"
        raise refuse("pos_embed", mismatch, ("auto", *offered), "auto takes what suits the model")
    if mode.endswith(DYNAMIC) and facts.schedule.kind != "flow":
        remedy = "take a mode without _dynamic"
        raise refuse("pos_embed", f"{mode} on a {facts.schedule.kind} model", "a flow model", remedy)
    # A model built for another size than its training size spreads its table over the wrong number of tokens.
    built_wrong = positions.kind == "sincos" and train != (positions.base, positions.base)
    if train == target and not built_wrong:
        return "keep"
    if mode == "keep" and positions.kind in ("stored", "learned") and max(target) > positions.size:
        raise refuse("tokens", target, f"at most {positions.size} a side with keep", "use grid or extrapolate")
    if positions.kind == "computed" and mode == "extrapolate" and target[0] * train[1] != target[1] * train[0]:
        remedy = "this model's positions have one divisor for both axes; use grid"
        raise refuse("pos_embed", f"extrapolate from {train} to {target} tokens", "one ratio for both axes", remedy)
    return mode


def _step(facts: ModelFacts, plan: Plan) -> Grid:
    field = plan.config.receptive_field
    if field == "none" or (field == "auto" and not facts.convolutional):
        return 1, 1
    if not facts.convolutional:
        remedy = "auto or none: a transformer sees the whole picture at any size"
        raise refuse("receptive_field", f"{field} on {facts.name}", "a UNet", remedy)
    return steps_of(plan.scales, LEAST[field])


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
            "the trained size; if it was meant for the new size, choose schedule none"
        )
    return lines


def _moved_lines(facts: ModelFacts, plan: Plan) -> list[str]:
    if plan.schedule == "none":
        return ["schedule: unchanged" + (" (r = 1)" if plan.ratio == 1 else "")]
    if facts.schedule.kind == "flow":
        return _flow_lines(facts, plan)
    ends = [math.exp(float(facts.schedule.log_sigmas[i])) for i in (0, -1)]
    if plan.schedule == "relabel":
        text = "relabel: each timestep means r x its sigma; right only for weights trained so"
        new = [plan.ratio * e for e in ends]
    else:
        moved = "more" if plan.ratio > 1 else "less"
        text = f"resample: steps move to {moved} noise, the network gets the true level"
        new = shift_grid(torch.tensor(ends), plan.ratio, ends[1]).tolist()
    lines = [f"schedule: {text}; sigma {ends[0]:.4g} .. {ends[1]:.4g} -> {new[0]:.4g} .. {new[1]:.4g}"]
    if plan.schedule == "resample" and facts.counting:
        lines.append(f"schedule: Euler replaces {facts.counting}; its step equals DDIM with eta 0")
    return lines


def _flow_lines(facts: ModelFacts, plan: Plan) -> list[str]:
    source = "the shift set by a node before this one" if facts.set_before else "the model's own"
    lines = [f"schedule: resample: shift {facts.shift:.4g} -> {plan.shift:.4g} (r x {source})"]
    if facts.dynamic:
        rows, columns = plan.target
        law = flux_shift(rows * columns, *facts.dynamic)
        lines.append(f"schedule: the model's linear law would give {law:.4g} here; the r law replaces it")
    return lines


def _position_line(facts: ModelFacts, plan: Plan) -> str:
    positions, grids = facts.positions, f"{plan.train} -> {plan.target} tokens (rows, columns)"
    if positions.kind in ("none", "unknown"):
        return f"positions: {positions.kind}" + "; unchanged" * (positions.kind == "unknown")
    if plan.positions == "keep":
        return f"positions: {positions.kind}, kept; {grids}"
    text = f"positions: {positions.kind}, {plan.positions}; {grids}"
    if plan.positions.endswith(DYNAMIC):
        text += f"; {PATENT}"
    if positions.kind == "sincos" and plan.train != (positions.base, positions.base):
        text += f"; pinned to {max(plan.train)}: this model is built for {positions.base} and would extrapolate"
    return text


def _guidance_line(plan: Plan) -> str:
    if plan.guidance is None:
        return "guidance: not changed"
    if plan.config.guidance_law:
        return f"guidance: {plan.config.guidance:g} -> {plan.guidance:.4g} (1 + r (scale - 1), Eq. 4)"
    return f"guidance: {plan.guidance:g}, unchanged"


def _limits(facts: ModelFacts, plan: Plan) -> list[str]:
    if not facts.convolutional:
        return []
    field, largest = plan.config.receptive_field, max(plan.scales)
    if plan.step != (1, 1):
        taps = f"taps of the inner convolutions {plan.step[0]} x {plan.step[1]} cells (rows, columns) apart"
        reach = f"receptive field: {taps}, so that the receptive field covers as much of the picture as in training"
        return [f"{reach}{'; none turns this off' if field == 'auto' else ''}", _measured()]
    if field == "dilate" and plan.ratio != 1:
        return [f"receptive field: unchanged, neither side is {LEAST[field]:g} times the trained one"]
    if plan.ratio <= 1:
        return []
    remedy = "its receptive field is unchanged"
    if largest >= LEAST["dilate"]:
        remedy = "receptive_field dilate prevents them"
        remedy += f" (auto does it from {LEAST['auto']:g} times the side)" if field == "auto" else ""
    return [f"limits: the noise schedule does not prevent a UNet from repeating objects; {remedy}"]


def _measured() -> str:
    (few, many), (heads, head) = MEASURED["attributes"], MEASURED["heads"]
    shown = f"{few:g} of the prompt's attributes are seen without it, {many:g} with it; heads {heads:g}, then {head:g}"
    return f"measured on the shipped portraits at twice the side: {shown}"


# --- the plan in one sentence, for users without technical background ------------------------------------------
def sentence(
    ratio: float, schedule: str, positions: str, guidance: tuple[float, float] | None, spread: bool = False
) -> str:
    """What was changed, why, and what is unchanged.

    Args:
        ratio: r.
        schedule, positions: of the plan.
        guidance: before and after, if Eq. 4 changed it.
        spread: whether a UNet's inner convolutions are dilated.
    """
    changed = [*_schedule_words(ratio, schedule), *_position_words(positions)]
    if spread:
        changed.append("the network sees as much of the picture as in training, so that it draws objects only once")
    if guidance and guidance[0] != guidance[1]:
        turn = "raised" if guidance[1] > guidance[0] else "lowered"
        changed.append(f"guidance is {turn} from {guidance[0]:g} to {guidance[1]:.4g}")
    kept = ["the weights", "your prompt"]
    kept += ["the noise schedule"] * (schedule == "none") + ["the positions"] * (positions == "keep")
    left = f"unchanged: {', '.join(kept)}"
    if not changed:
        why = "this is the trained area" if ratio == 1 else "no change was requested"
        return f"in short: {why}, so nothing is changed"
    area = "of the trained area" if ratio == 1 else f"with {ratio**2:.3g} times the trained area"
    return f"in short: for a picture {area}, {'; '.join(changed)}; {left}"


def _schedule_words(ratio: float, schedule: str) -> list[str]:
    if schedule == "none":
        return []
    more, why = ("more", "large shapes show through") if ratio > 1 else ("less", "small pictures drown in it sooner")
    if schedule == "relabel":
        return [f"each timestep means {more} noise, as these weights were trained, for {why}"]
    return [f"sampling spends its steps at {more} noise, for {why}"]


def _position_words(positions: str) -> list[str]:
    mode = positions.removesuffix(DYNAMIC)
    text = {
        "grid": "token positions are fitted into the range that the model was trained on",
        "rope_pi": "token positions are fitted into the range that the model was trained on",
        "extrapolate": "token positions continue at the trained step, beyond the trained range",
        "rope_ntk": "low position frequencies are fitted into the trained range and high ones hardly change",
        "rope_yarn": "low position frequencies are fitted into the trained range and high ones stay",
    }.get(mode)
    if text is None:
        return []
    return [text + (", which fades as the noise falls, since layout settles first" if mode != positions else "")]
