"""Entropy rectifying guidance (Berrada et al. 2025, arXiv 2504.13987): guidance away from flattened attention.

Classifier-free guidance moves away from the prediction without a prompt. This moves away from the prediction of a
weakened network for the same prompt: D_weak + w (D - D_weak), which is ``guidance.guide``. The paper reads attention
as an update of a Hopfield energy and weakens it by a temperature. Implemented is I-ERG, which weakens the image
network; C-ERG, which weakens the text encoder, is not. On the portraits plain guidance does better: ``vitrine reproduce
control.entropy``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..diffusion.forward_clock import Timesteps
from ..errors import refuse
from ..network.site import ModuleSite, Site
from ..runtime.forward_hooks import hook_before
from ..settings.config import Config
from ..tracing.addresses import resolve, sites_of
from ..tracing.hooks import edit

_NORMS = ("norm_q", "q_norm", "norm", "qknorm", "ln_q", "q_rms_norm")
"""Names of query norms: in diffusers, in ComfyUI's networks, in its Flux, Krea 2 and SD3, and HiDream in both."""


@dataclass(frozen=True)
class EntropyConfig(Config):
    """Strength of the guidance, and how the network is weakened.

    Attributes:
        scale: w; 1 is none.
        tau: factor on the attention's logits: below 1 flattens, above 1 sharpens, 1 leaves the network unchanged. The
            paper does not give its value; ACE-Step uses 0.01.
        places: names of the weakened query sites, a glob.
        start_timestep: kappa: the network is weakened below this timestep only; 1000 is the whole run.
    """

    scale: float = 1.0
    tau: float = 0.01
    places: str = "*-self-q"
    start_timestep: float = 1000.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise refuse("scale", self.scale, "a finite number", "1.0 is no guidance")
        if not (math.isfinite(self.tau) and self.tau >= 0):
            raise refuse("tau", self.tau, "0 or more", "ACE-Step takes 0.01; 1.0 weakens nothing")
        if not 0 <= self.start_timestep <= 1000:
            raise refuse("start_timestep", self.start_timestep, "0 to 1000", "1000 is the whole run")

    def weakens(self, t: float) -> bool:
        """Whether the network is weakened at timestep ``t`` of 1000."""
        return self.tau != 1 and t < self.start_timestep

    def guides(self, t: float, same_text: bool) -> bool:
        """Whether the weakened network needs a separate evaluation at timestep ``t``.

        Args:
            same_text: both have the same prompt, so that they are equal if nothing is weakened.
        """
        return self.scale != 1 and (self.weakens(t) or not same_text)


def query_sites(backbone: nn.Module, config: EntropyConfig) -> list[Site]:
    """The query sites that the config selects."""
    remedy = "SD1.x, SD2.x, SDXL and PixArt have plain queries"
    sites = _named(backbone, config.places)
    for site in sites:
        if not (isinstance(site, ModuleSite) and site.address.endswith("-q")):
            raise refuse("places", site.address, "queries of attention, *-q", "*-self-q is all of self-attention")
        attention = backbone.get_submodule(site.path.rpartition(".")[0])
        norms = [getattr(attention, name, None) for name in _NORMS]
        if any(norm is not None and not isinstance(norm, nn.Identity) for norm in norms):
            raise refuse("network", f"{type(backbone).__name__}, whose queries are normalised", "plain queries", remedy)
    if config.places == EntropyConfig.places and not any(site.address.endswith("-self-q") for site in sites):
        joint = f"{type(backbone).__name__}, whose attention reads text and picture at once"
        raise refuse("network", joint, "attention of the picture to itself", remedy)
    return sites


def _named(backbone: nn.Module, places: str) -> list[Site]:
    """Sites of a glob; for joint attention without sites of the usual name, its queries, which are then refused."""
    joint = places == EntropyConfig.places and not any(a.endswith("-self-q") for a in sites_of(backbone))
    return resolve(backbone, "*-q" if joint else places)


def weakened(
    backbone: nn.Module, sites: list[Site], tau: float, rows: Callable[[int, torch.device], torch.Tensor]
) -> AbstractContextManager:
    """Flattens the attention of some batch rows while the block is open.

    Args:
        sites: of :func:`query_sites`.
        rows: (batch size B, device) -> (B,) bool there, the weakened batch rows of the running forward; called at each
            site.
    """

    def flat(query: torch.Tensor) -> torch.Tensor:
        mask = rows(len(query), query.device).reshape(-1, *[1] * (query.ndim - 1))
        # Berrada et al. 2025: softmax(tau beta Q K^T) V
        return torch.where(mask, tau * query, query)

    return edit(backbone, {site: flat for site in sites})


@contextmanager
def first_half_weakened(backbone: nn.Module, config: EntropyConfig) -> Iterator[None]:
    """Weakens the batch rows of the negative prompt in diffusers pipelines, below the starting timestep."""
    timesteps, weak = Timesteps(), [False]

    def follow(net: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        t = timesteps.first(args, kwargs)
        weak[0] = t is not None and config.weakens(t)

    handle = hook_before(backbone, follow, with_kwargs=True)
    try:
        with weakened(
            backbone, query_sites(backbone, config), config.tau,
            lambda count, device: (torch.arange(count, device=device) < count // 2) & weak[0],
        ):  # fmt: skip
            yield
    finally:
        handle.remove()
