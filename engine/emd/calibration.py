"""Calibration of the step size of z, by how far drifts move z along a chain."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ..errors import refuse
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


def calibrated(
    chain: EStepConfig, update: Callable[[], None], new_batches: Callable[[], Batches],
    starts: Callable[[Batches], Starts], random: torch.Generator, noise_like: NoiseLike,
    gather: Callable[[torch.Tensor], torch.Tensor], block: int = 10,
) -> Calibration:  # fmt: skip
    """Calibrates gz and clip for the networks of a run.

    Args:
        update: one score update on a new batch.
        new_batches: samples new batches.
        starts: density and start points of chains: (density, z, eps) of each batch.
        random: generator of the noise of starts and chains.
        noise_like: samples the noise of the chains.
        gather: (n,) of this process -> (N,) of all.
        block: score updates between measurements of the drift.
    """
    settle(update, lambda: gather(torch.cat([z_drifts(*start) for start in starts(new_batches())])), block)
    batches = new_batches()
    state = random.get_state()

    def moved(gz: float, clip: float) -> torch.Tensor:
        random.set_state(state)  # the same noise for every gz
        ends = [e_step(rho, z, eps, chain.with_gz(gz, clip), noise_like).moved for rho, z, eps in starts(batches)]
        return gather(torch.cat([rows for rows in ends if rows is not None]))

    return calibrate_gz(moved, chain.ge)


def settle(update: Callable[[], None], drifts: Callable[[], torch.Tensor], block: int = 10, most: int = 6) -> int:
    """Runs score updates until the drift of z stops growing, since both scores start as one network.

    Args:
        update: one score update on a new batch.
        drifts: (N,) RMS of z's drift, on new batches.
        block: updates between measurements.
        most: most blocks of updates.

    Returns:
        The number of updates.
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
