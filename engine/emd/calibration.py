"""The step size of z, chosen by how far it lets a chain's drifts move z."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ..errors import refuse
from .chain import Draw, Joint, e_step
from .chain_config import EStepConfig
from .losses import z_drifts

GZ_SHARE = 0.25
"""Largest automatic gz, as a share of ge: the cancelled direction is unbiased only where z is slow beside eps."""
MOVED = 0.15
"""How far a chain's drifts should move z, RMS over rows and noise levels, in standard deviations of z.

On the mixture of ``vitrine reproduce emd.mixture``, where the best gz is known, the best students come of chains that
move z by 0.10 to 0.12 at one noise level and by 0.20 to 0.30 at four, whether K is 2, 4 or 8; below 0.06 the minor mode
is lost at one level, as with z frozen. That sweep of gz is no claim of the pack: no command prints it.
"""
LONGEST_STEP = 0.2
"""What the clip leaves of gz times a drift: no single step moves z by more."""
Batches = Any
"""Batches of a run, whatever they hold."""
Starts = Iterable[tuple[Joint, torch.Tensor, torch.Tensor]]
_LEAST, _TOLERANCE, _TRIES = 1e-5, 0.05, 10


class Calibration(NamedTuple):
    """What was measured.

    Attributes:
        gz, clip: step size of z, and the largest RMS of its drift.
        moved: how far chains with them moved z, RMS.
        wanted: how far they should.
    """

    gz: float
    clip: float
    moved: float
    wanted: float = MOVED

    @property
    def reached(self) -> bool:
        """Whether some gz in its range moves z as far as wanted."""
        return abs(self.moved / self.wanted - 1) <= 2 * _TOLERANCE

    def __str__(self) -> str:
        size = f"a chain moves z by {self.moved:.2g}"
        if self.reached:
            return f"gz {self.gz:.3g}: {size}"
        end = "the largest" if self.moved < self.wanted else "the smallest"
        return f"gz {self.gz:.3g}, {end} there may be: {size}, and {self.wanted:g} cannot be reached"


def calibrate_gz(moved: Callable[[float, float], torch.Tensor], ge: float, wanted: float = MOVED) -> Calibration:
    """The gz with which chains move z as far as wanted, by false position on one set of chains.

    Args:
        moved: gz and clip to the (N,) ``moved`` of chains with them; the same starts and noise every time.
        ge: of the chains; gz is at most a quarter of it.

    Returns:
        Where even that moves z less, that and how far it did; where the smallest moves it more, that.

    Raises:
        VitrineError: ``wanted`` is not a positive number.
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
        guess = gz * wanted / size  # drifts add up, so that it is nearly proportional
        gz = guess if low < guess < high else math.sqrt(low * high)
        size = at(gz)
    return Calibration(gz, LONGEST_STEP / gz, size, wanted)


def calibrated(
    chain: EStepConfig, update: Callable[[], None], draws: Callable[[], Batches], starts: Callable[[Batches], Starts],
    random: torch.Generator, draw: Draw, gather: Callable[[torch.Tensor], torch.Tensor], block: int = 10,
) -> Calibration:  # fmt: skip
    """What suits the networks of a run.

    Args:
        update: one score update on a fresh draw.
        draws: fresh batches.
        starts: what chains walk, and where they begin: (density, z, eps) of each batch.
        random: where the noise of starts and chains comes from.
        draw: noise of the chains.
        gather: (n,) of this process to (N,) of all.
        block: score updates between looks at what they did to the drift.
    """
    settle(update, lambda: gather(torch.cat([z_drifts(*start) for start in starts(draws())])), block)
    batches = draws()
    state = random.get_state()

    def moved(gz: float, clip: float) -> torch.Tensor:
        random.set_state(state)  # one set of noise for every gz
        ends = [e_step(rho, z, eps, chain.with_gz(gz, clip), draw).moved for rho, z, eps in starts(batches)]
        return gather(torch.cat([rows for rows in ends if rows is not None]))

    return calibrate_gz(moved, chain.ge)


def settle(update: Callable[[], None], drifts: Callable[[], torch.Tensor], block: int = 10, most: int = 6) -> int:
    """Score updates until the drift of z no longer grows: at the start both scores are one network.

    Args:
        update: one score update on a fresh draw.
        drifts: (N,) RMS of z's drift, on fresh draws.
        block: updates between looks.
        most: blocks.

    Returns:
        Updates made.
    """
    largest = 0.0
    for done in range(1, most + 1):
        for _ in range(block):
            update()
        now = float(drifts().double().square().mean().sqrt())
        if now < 1.1 * largest:
            return done * block
        largest = max(largest, now)
    return most * block
