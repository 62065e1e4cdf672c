"""The neurons that NeMo searches: outputs of the cross-attention value projections (section 3.1, Appendix C).

They have canonical addresses, so one list of neurons serves diffusers and ComfyUI modules alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from ..diffusion.denoiser import Denoiser
from ..errors import refuse
from ..network.condition import Condition
from ..network.site import ModuleSite
from ..runtime.compat_torch import module_at
from ..runtime.placement import device_of, dtype_of, onloaded
from ..tracing.addresses import sites_of
from ..tracing.hooks import capture

SCOPES = ("down+mid", "all")
R = TypeVar("R")


def value_sites(backbone: nn.Module, scope: str = "down+mid") -> list[ModuleSite]:
    """The value sites in the order they run; ``down+mid`` is the paper's choice, 7 layers on SD1.x.

    UNets (SD1.x, SD2.x, SDXL) are what the paper and its followers tested. For transformers, where there is no
    published evidence, all blocks are taken; treat their results as experimental. Where image and text tokens share a
    projection (Z-Image, Krea 2), a site is its text rows.
    """
    if scope not in SCOPES:
        raise refuse("scope", scope, SCOPES, "down+mid is the paper's")
    table = sites_of(backbone)
    values = [s for s in table.values() if isinstance(s, ModuleSite) and s.address.endswith(("-cross-v", "-ctx-v"))]
    if scope == "down+mid" and any(s.address.startswith("up-") for s in values):
        values = [s for s in values if not s.address.startswith("up-")]
    if not values:
        raise refuse("backbone", type(backbone).__name__, "a model with text attention", "use a text-to-image model")
    return values


def text_only(site: ModuleSite) -> bool:
    """True where the activation is a projection of the text embedding itself: no latent, timestep or forward needed.

    PixArt's depends on the text alone too, but behind a caption projection, so it takes a forward.
    """
    unet = site.address.startswith(("down-", "mid-", "up-"))
    return unet and site.address.endswith("-cross-v") and site.columns is None and not site.flat_batch


@torch.no_grad()
def value_activations(
    denoiser: Denoiser,
    cond: Condition,
    sites: Sequence[ModuleSite],
    latents: torch.Tensor | None = None,
    t: float = 961.0,
) -> list[torch.Tensor]:
    """a_i = mean over tokens of |W_v y|_i for each site: a list of (B, width) float32 (NeMo, section 3.2).

    Where the text alone decides, the projection is called on the text embedding, which gives the very numbers of a
    forward. Not in ComfyUI, where LoRAs, hooks and other nodes on a MODEL act in its forwards alone: there, and for
    other families, one forward of ``latents`` (B, C, h, w) at timestep ``t`` is captured and stopped early.
    """
    return each_value(denoiser, cond, sites, _mean_magnitude, latents, t)


def _mean_magnitude(values: torch.Tensor) -> torch.Tensor:
    # NeMo, section 3.2: a_i = mean over tokens of |(W_v y)_i|
    return values.float().abs().mean(1)


@torch.no_grad()
def each_value(
    denoiser: Denoiser,
    cond: Condition,
    sites: Sequence[ModuleSite],
    reduce: Callable[[torch.Tensor], R],
    latents: torch.Tensor | None = None,
    t: float = 961.0,
) -> list[R]:
    """``reduce`` of each site's values (B, T, width), otherwise as :func:`value_activations`; one site's at a time."""
    if cond.text is None:
        raise refuse("condition", "no text", "text states (B, T, C)", "encode the prompt first")
    if denoiser.made_of is None and all(text_only(s) for s in sites):
        modules: list[Any] = [module_at(denoiser.backbone, s.path) for s in sites]
        text = cond.text.to(device_of(denoiser.backbone), dtype_of(denoiser.backbone))
        with onloaded(denoiser.backbone):
            return [reduce(m(text)) for m in modules]
    if latents is None:
        raise refuse("latents", None, "(B, C, h, w) for this model family", "its values depend on latent and timestep")
    with capture(denoiser.backbone, list(sites), early_exit=True) as taps:
        denoiser.forward(latents, t, cond)
    return [reduce(taps[s.address].tensor) for s in sites]
