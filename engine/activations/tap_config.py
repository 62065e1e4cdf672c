"""Settings of a tap."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..errors import refuse
from ..network.attention import MapReduction
from ..settings.config import Config
from ..settings.sizes import is_side
from ..tracing.addresses import split_patterns

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Storage types by the name used in configs and files."""


@dataclass(frozen=True)
class TapConfig(Config):
    """One tap of a diffusion model (GDF, arXiv 2410.03558, section 3): noise to ``timestep``, run, keep ``addresses``.

    Args:
        addresses: site names or globs, ``"up-level1-repeat*-cross-q"``; or one string of several.
        timestep: the network's own timestep, 0 <= t <= 999 for 1000-step models (flow time x 1000 for flow models).
        seeds: one noise for each seed; activations are averaged over them (DIFT's ensemble uses 8).
        dtype: storage type of the result; statistics are float32 whatever it is.
        size: images are resized to ``size x size`` pixels first; None keeps their size.
        early_exit: stop the network after the last requested site. Does not change values.
        posterior: the VAE's ``"mean"`` or one seeded ``"sample"``, as in the official GDF code.
        batch: the most batch rows (images x seeds x timesteps) per forward. Does not change a row's noise.
        variance: also keep the variance over the seeds; needs at least two of them.
        noise: False feeds the clean latent, as CleanDIFT's fine-tuned networks expect.
        map_heads: attention maps per head (``"each"``) or averaged over heads (``"mean"``).
        map_tokens: keys of attention maps to keep, by position; None keeps all.
        modulate: block inputs (``vit-block*-in``) after the block's norm and adaLN modulation (DiTF, arXiv
            2505.18584), which match far better than raw ones.
        discard: channels set to zero, before the norm if there is one: massive ones, see
            :func:`~vitrine.engine.activations.tap.massive_channels`.
    """

    addresses: tuple[str, ...]
    timestep: float = 50.0
    seeds: tuple[int, ...] = (0,)
    dtype: str = "float32"
    size: int | None = None
    early_exit: bool = True
    posterior: str = "mean"
    batch: int = 16
    variance: bool = False
    noise: bool = True
    map_heads: str = "each"
    map_tokens: tuple[int, ...] | None = None
    modulate: bool = False
    discard: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "addresses", tuple(split_patterns(self.addresses)))
        object.__setattr__(self, "seeds", _integers(self.seeds, "seeds", "seeds=(0,) taps once"))
        object.__setattr__(self, "discard", _integers(self.discard, "discard", "discard=(154, 1446) for Flux.1-dev"))
        self._check_addresses()
        self._check_timestep()
        self._check_seeds()
        self._check_choices()

    def _check_addresses(self) -> None:
        if not self.addresses or not all(isinstance(a, str) and a.strip() for a in self.addresses):
            raise refuse(
                "addresses", self.addresses, "one or more layer names or globs", "name a layer or use a preset"
            )

    def _check_timestep(self) -> None:
        t = self.timestep
        if isinstance(t, bool) or not isinstance(t, (int, float)) or not math.isfinite(t) or t < 0:
            raise refuse("timestep", t, "a finite number >= 0", "GDF uses 50, DIFT 261 for semantics")
        object.__setattr__(self, "timestep", float(t))

    def _check_seeds(self) -> None:
        valid = all(isinstance(s, int) and not isinstance(s, bool) and 0 <= s < 2**63 for s in self.seeds)
        if not self.seeds or not valid:
            raise refuse("seeds", self.seeds, "at least one integer in [0, 2**63)", "seeds=(0,) taps once")
        if len(set(self.seeds)) != len(self.seeds):
            raise refuse("seeds", self.seeds, "distinct seeds", "drop the repeated seed, it adds no information")
        if self.variance and len(self.seeds) < 2:
            raise refuse("variance", self.variance, "two or more seeds", "give more seeds or leave variance off")

    @property
    def maps(self) -> MapReduction:
        """The part of attention maps to keep."""
        return MapReduction(self.map_heads, None if self.map_tokens is None else tuple(self.map_tokens))

    def _check_choices(self) -> None:
        object.__setattr__(self, "map_tokens", self.maps.tokens)
        if self.dtype not in DTYPES:
            raise refuse("dtype", self.dtype, sorted(DTYPES), "float16 halves the file, float32 is exact")
        if self.posterior not in ("mean", "sample"):
            raise refuse("posterior", self.posterior, "'mean' or 'sample'", "'sample' is what the GDF code does")
        if self.size is not None and not is_side(self.size):
            raise refuse("size", self.size, "a positive number of pixels or None", "512 for SD 1.5, 1024 for SDXL")
        if any(isinstance(c, bool) or c < 0 for c in self.discard):
            raise refuse("discard", self.discard, "channel numbers from 0", "see massive_channels")
        if self.variance and (self.modulate or self.discard):
            raise refuse("variance", True, "raw activations", "leave variance, or modulate and discard, off")
        if not isinstance(self.batch, int) or self.batch < 1:
            raise refuse("batch", self.batch, "an integer >= 1", "lower it when memory is short")


def _integers(seeds: Iterable | int, what: str, remedy: str) -> tuple[int, ...]:
    """Any integers (a range, a numpy array, one number) as a tuple of Python ints."""
    entries = list(seeds) if isinstance(seeds, Iterable) else [seeds]
    try:
        return tuple(s if isinstance(s, bool) else operator.index(s) for s in entries)
    except TypeError as error:
        raise refuse(what, seeds, "integers in [0, 2**63)", remedy) from error
