"""Settings of a tap."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import torch

from ..errors import refuse
from ..network.attention import HEADS, MapReduction
from ..settings.option import Option, Options
from ..settings.sizes import is_side
from ..tracing.addresses import split_patterns

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Storage types by the name used in configs and files."""


@dataclass(frozen=True)
class TapConfig(Options):
    """One tap of a diffusion model (GDF, arXiv 2410.03558, section 3): noise to ``timestep``, run, keep ``addresses``.

    ``modulate`` and ``discard`` are DiTF's remedy for transformers (arXiv 2505.18584): block inputs match far better
    after the block's norm and adaLN modulation, and without massive channels
    (:func:`~vitrine.engine.activations.tap.massive_channels`).
    """

    addresses: Annotated[
        tuple[str, ...],
        Option(
            'Layer names or globs, ``"up-level1-repeat*-cross-q"``; or one string of several.',
        ),
    ]
    timestep: Annotated[
        float,
        Option(
            "The network's own timestep, 0 to 999 (flow: 1000 x time). 50 in the paper; 261 in DIFT.",
            bottom=0,
            top=1000,
            step=1,
        ),
    ] = 50.0
    seeds: Annotated[
        tuple[int, ...],
        Option(
            "One noise for each seed; activations are averaged over them (DIFT's ensemble uses 8).",
        ),
    ] = (0,)
    dtype: Annotated[
        str,
        Option(
            "Storage type.",
            choices=tuple(sorted(DTYPES)),
            details="Statistics are float32 whatever it is.",
            remedy="float16 halves the file, float32 is exact",
        ),
    ] = "float32"
    size: Annotated[
        int | None,
        Option(
            "Images are resized to this side in pixels first.",
            unset_doc="their own size",
        ),
    ] = None
    early_exit: Annotated[
        bool,
        Option(
            "Stop the network after the last requested layer. Does not change values.",
        ),
    ] = True
    posterior: Annotated[
        str,
        Option(
            "The VAE's mean or one seeded sample, as in the official GDF code.",
            choices=("mean", "sample"),
            remedy="'sample' is what the GDF code does",
        ),
    ] = "mean"
    batch: Annotated[
        int,
        Option(
            "The most batch rows (images x seeds x timesteps) per forward. Does not change a row's noise.",
            ge=1,
            remedy="lower it when memory is short",
        ),
    ] = 16
    variance: Annotated[bool, Option("Also keep the variance over the seeds; needs at least two of them.")] = False
    noise: Annotated[
        bool,
        Option(
            "Without it the clean latent is fed, as CleanDIFT's fine-tuned networks expect.",
        ),
    ] = True
    map_heads: Annotated[str, Option("Attention maps of each head, or their mean.", choices=HEADS)] = "each"
    map_tokens: Annotated[
        tuple[int, ...] | None,
        Option(
            "Keys of attention maps to keep, by position.",
            unset_doc="all",
        ),
    ] = None
    modulate: Annotated[
        bool,
        Option(
            "Transformers' block inputs (vit-block*-in) as the block reads them (DiTF): they match far better.",
        ),
    ] = False
    discard: Annotated[tuple[int, ...], Option("Channels set to zero, before the norm if there is one.")] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "addresses", tuple(split_patterns(self.addresses)))
        object.__setattr__(self, "seeds", _integers(self.seeds, "seeds", "seeds=(0,) taps once"))
        object.__setattr__(self, "discard", _integers(self.discard, "discard", "discard=(154, 1446) for Flux.1-dev"))
        self._check_addresses()
        self._check_timestep()
        self._check_seeds()
        super().__post_init__()
        object.__setattr__(self, "map_tokens", self.maps.tokens)

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

    def _check(self) -> None:
        """Settings that exclude each other."""
        if self.size is not None and not is_side(self.size):
            raise refuse("size", self.size, "a positive number of pixels or None", "512 for SD 1.5, 1024 for SDXL")
        if any(isinstance(c, bool) or c < 0 for c in self.discard):
            raise refuse("discard", self.discard, "channel numbers from 0", "see massive_channels")
        if self.variance and (self.modulate or self.discard):
            raise refuse("variance", True, "raw activations", "leave variance, or modulate and discard, off")


def _integers(seeds: Iterable | int, what: str, remedy: str) -> tuple[int, ...]:
    """Any integers (a range, a numpy array, one number) as a tuple of Python ints."""
    entries = list(seeds) if isinstance(seeds, Iterable) else [seeds]
    try:
        return tuple(s if isinstance(s, bool) else operator.index(s) for s in entries)
    except TypeError as error:
        raise refuse(what, seeds, "integers in [0, 2**63)", remedy) from error
