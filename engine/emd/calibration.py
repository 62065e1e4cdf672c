"""Calibration of the step size of z, by how far drifts move z along a chain."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from ..errors import refuse
from ..io.number_checks import integer
from ..runtime.progress import Progress, silent
from .chain import EStepConfig, Joint, NoiseLike, e_step
from .losses import z_drifts

GZ_SHARE = 0.25
"""Largest automatic gz relative to ge: the cancelled direction is unbiased only if z is slow compared with eps."""
MOVED = 0.15
"""Target RMS distance that a chain's drifts move z, over batch rows and noise levels, in standard deviations of z.

On the mixture of ``vitrine reproduce emd.mixture``, where the best gz is known, the best students come from chains that
move z by 0.10 to 0.12 at one noise level and by 0.20 to 0.30 at four, whether K is 2, 4 or 8; below 0.06 the minor mode
is lost at one level, as with z frozen. No command reproduces that sweep of gz.
"""
LONGEST_STEP = 0.2
"""Bound on gz times a drift by the clip: no single step moves z further."""
Batches = Any
"""Batches of a run, of any type."""
Starts = Iterable[tuple[Joint, torch.Tensor, torch.Tensor]]
_LEAST, _TOLERANCE, _TRIES = 1e-5, 0.05, 10
_BLOCKS = 6
"""Most blocks of score updates before the chains are measured."""


class Calibration(NamedTuple):
    """The result of a calibration.

    Attributes:
        gz, clip: step size of z, and the largest RMS of its drift.
        moved: RMS distance that drifts moved z with them.
        wanted: target of that distance.
    """

    gz: float
    clip: float
    moved: float
    wanted: float = MOVED

    @property
    def reached(self) -> bool:
        """Whether a gz in range reaches the target distance."""
        return abs(self.moved / self.wanted - 1) <= 2 * _TOLERANCE

    def __str__(self) -> str:
        size = f"a chain moves z by {self.moved:.2g}"
        if self.reached:
            return f"gz {self.gz:.3g}: {size}"
        end = "the largest allowed" if self.moved < self.wanted else "the smallest allowed"
        return f"gz {self.gz:.3g}, {end}: {size}, and {self.wanted:g} cannot be reached"


def calibrate_gz(moved: Callable[[float, float], torch.Tensor], ge: float, wanted: float = MOVED) -> Calibration:
    """The gz at which drifts move z by ``wanted``, by false position on one set of chains.

    Args:
        moved: (gz, clip) -> (N,) ``moved`` of the chains, with the same starts and noise in every call.
        ge: of the chains; gz is at most a quarter of it.

    Returns:
        The result; the largest or the smallest gz if ``wanted`` cannot be reached.
    """
    if not wanted > 0:
        raise refuse("wanted", wanted, "a positive number", f"{MOVED} suits short and long chains")

    def at(gz: float) -> float:
        size = float(moved(gz, LONGEST_STEP / gz).double().square().mean().sqrt())
        return size if math.isfinite(size) else math.inf

    low, gz = _LEAST, GZ_SHARE * ge
    high, size = gz, at(gz)
    for _ in range(_TRIES):
        if abs(size / wanted - 1) <= _TOLERANCE or (gz == GZ_SHARE * ge and size < wanted):
            break
        low, high = (gz, high) if size < wanted else (low, gz)
        guess = gz * wanted / size  # drifts add up, so the distance is nearly proportional to gz
        gz = guess if low < guess < high else math.sqrt(low * high)
        size = at(gz)
    return Calibration(gz, LONGEST_STEP / gz, size, wanted)


@dataclass
class CalibrationState:
    """How far a calibration has come: with the weights and the random state, all that resuming it needs.

    Attributes:
        block: score updates between measurements of the drift.
        count: batches of each measurement.
        blocks, updates: finished blocks, and the score updates since.
        drift: the largest drift measured.
        settled: whether the drift has stopped growing.
        sizes: gz -> RMS distance that chains with it move z; None if it is not finite.
    """

    block: int = 10
    count: int = 4
    blocks: int = 0
    updates: int = 0
    drift: float = 0.0
    settled: bool = False
    sizes: dict[float, float | None] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON, for a run's state."""
        return asdict(self) | {"sizes": list(self.sizes.items())}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> CalibrationState:
        """Of :meth:`to_dict`."""
        counts = {name: integer(facts[name], name) for name in ("block", "count", "blocks", "updates")}
        return cls(**counts, drift=facts["drift"], settled=facts["settled"], sizes=dict(map(tuple, facts["sizes"])))

    def done(self, chain_steps: int) -> int:
        """Evaluated batches so far, a chain counted by its steps; blocks that were not needed count as done."""
        blocks = _BLOCKS if self.settled else self.blocks
        return blocks * (self.block + self.count) + self.updates + len(self.sizes) * self.count * chain_steps

    def total(self, chain_steps: int) -> int:
        """The most that :meth:`done` can reach."""
        return _BLOCKS * (self.block + self.count) + (_TRIES + 1) * self.count * chain_steps


class CalibratedRun(NamedTuple):
    """What a run offers to its calibration.

    Attributes:
        update: one score update on a new batch.
        new_batches: samples that many new batches.
        starts: density and start points of chains: (density, z, eps) of each batch.
        random: generator of the noise of starts and chains.
        noise_like: samples the noise of the chains.
        gather: (n,) of this process -> (N,) of all.
        save: saves weights, random state and the calibration's own state.
    """

    update: Callable[[], None]
    new_batches: Callable[[int], Batches]
    starts: Callable[[Batches], Starts]
    random: torch.Generator
    noise_like: NoiseLike
    gather: Callable[[torch.Tensor], torch.Tensor]
    save: Callable[[], None]


def calibrated(
    chain: EStepConfig, run: CalibratedRun, state: CalibrationState, progress: Progress = silent
) -> Calibration:
    """Calibrates gz and clip for the networks of a run, from where ``state`` is; it saves after each measurement."""
    total = state.total(chain.steps)

    def drifts() -> torch.Tensor:
        rows = []
        for start in run.starts(run.new_batches(state.count)):
            rows.append(z_drifts(*start))
            progress(state.done(chain.steps) + len(rows), total)
        return run.gather(torch.cat(rows))

    settle(state, run, drifts, lambda: progress(state.done(chain.steps), total))
    begun = run.random.get_state()
    batches = run.new_batches(state.count)
    noise = after = run.random.get_state()

    def measure(gz: float, clip: float) -> torch.Tensor:
        nonlocal after
        run.random.set_state(noise)  # the same noise for every gz
        rows, done = [], state.done(chain.steps)
        for rho, z, eps in run.starts(batches):
            rows.append(e_step(rho, z, eps, chain.with_gz(gz, clip), run.noise_like).moved)
            progress(done + len(rows) * chain.steps, total)
        after = run.random.get_state()
        return run.gather(torch.cat([part for part in rows if part is not None]))

    def moved(gz: float, clip: float) -> torch.Tensor:
        if gz not in state.sizes:
            with _as_before(run, begun):
                size = float(measure(gz, clip).double().square().mean().sqrt())
                state.sizes[gz] = size if math.isfinite(size) else None
        known = state.sizes[gz]
        return torch.tensor([math.inf if known is None else known], dtype=torch.float64)

    result = calibrate_gz(moved, chain.ge)
    if after is noise:  # everything was measured before a kill: the random state is that after a measurement
        with _as_before(run, begun):
            measure(result.gz, result.clip)
    run.random.set_state(after)
    progress(total, total)
    return result


@contextmanager
def _as_before(run: CalibratedRun, random_state: torch.Tensor) -> Iterator[None]:
    """Saves after a measurement, also an interrupted one, with the random state from before it."""
    try:
        yield
    finally:
        run.random.set_state(random_state)
        run.save()


def settle(
    state: CalibrationState,
    run: CalibratedRun,
    drifts: Callable[[], torch.Tensor],
    report: Callable[[], None] = lambda: None,
) -> None:
    """Runs score updates until the drift of z stops growing, since both scores start as one network.

    Args:
        drifts: (N,) RMS of z's drift, on new batches.
        report: called after each update.
    """
    while not state.settled:
        while state.updates < state.block:
            run.update()
            state.updates += 1
            try:
                report()
            except BaseException:  # interrupted between two updates, where the state is consistent
                run.save()
                raise
        before = run.random.get_state()
        try:
            now = float(drifts().double().square().mean().sqrt())
        except BaseException:
            run.random.set_state(before)
            run.save()
            raise
        state.blocks, state.updates = state.blocks + 1, 0
        state.settled = now < 1.1 * state.drift or state.blocks == _BLOCKS
        state.drift = max(state.drift, now)
        run.save()
