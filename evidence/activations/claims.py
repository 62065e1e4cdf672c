"""Claims about the Activation Tap, for ``vitrine reproduce activations.*``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...engine.progress import Progress, silent
from ..registry import ClaimResult, claim
from . import filter_claims as _filter  # noqa: F401  registers gdf.filter and gdf.properties
from . import matching_claims as _matching  # noqa: F401  registers the other gdf.*

if TYPE_CHECKING:
    from ...engine.activations.container import Activations
    from ...engine.portraits import Portraits

PAPER = "GDF (arXiv 2410.03558)"
PICTURES = 48
SEEDS = tuple(range(4))
TIMESTEP = 50.0
FIRST_IDENTITY = 7_000_000
"""Identities that training never saw."""


def _tap(
    portraits: Portraits, addresses: list[str], progress: Progress, variance: bool = False
) -> tuple[Activations, torch.Tensor]:
    """Taps of held-out renders at t = 50, and the parts that the renderer says are where."""
    from ...engine.activations.config import TapConfig
    from ...engine.activations.images import encode_pixels
    from ...engine.activations.tap import tap_latents
    from ...engine.condition import Condition
    from ...engine.denoiser import Denoiser
    from ...engine.portraits import caption, render, sample_scenes

    scenes = sample_scenes(range(FIRST_IDENTITY, FIRST_IDENTITY + PICTURES))
    pictures = render(scenes)
    with torch.no_grad():
        cond = Condition(text=portraits.encode(caption(scenes)))
    latents = encode_pixels(portraits.vae, pictures.images * 2 - 1)
    config = TapConfig(tuple(addresses), TIMESTEP, SEEDS, variance=variance)
    return tap_latents(Denoiser.from_diffusers(portraits.pipeline()), latents, cond, config, progress), pictures.parts


def _untrained(portraits: Portraits) -> Portraits:
    """The same VAE and text encoder with a UNet of fresh random weights: what the architecture alone gives."""
    from dataclasses import replace

    from ...engine.portraits import build_models

    return replace(portraits, unet=build_models(seed=0).unet)


def _interval(differences: torch.Tensor) -> tuple[float, float]:
    """95 % interval of a mean over pictures."""
    half = 1.96 * differences.std().item() / len(differences) ** 0.5
    return round(differences.mean().item() - half, 4), round(differences.mean().item() + half, 4)


@claim(
    "activations.places",
    paper=PAPER,
    figure="Table 1's order (here: nearest features in other pictures that lie on the same part, all at 16 x 16)",
    target="best address of `portraits` beats the best of `portraits-legacy`, and itself in an untrained UNet (95 %)",
)
def places(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Does a place inside a transformer carry more about the parts of a face than the places used before GDF?

    The best addresses are chosen on the first half of the pictures and measured on the second.
    """
    from ...engine.activations.presets import PRESETS
    from ...engine.portraits import load_portraits
    from .page import part_agreement_by_picture

    portraits = load_portraits(model)
    ours, legacy = PRESETS["portraits"].addresses, PRESETS["portraits-legacy"].addresses
    addresses = list(dict.fromkeys(ours + legacy))
    half = PICTURES // 2
    scores = []
    for network in (portraits, _untrained(portraits)):
        taps, parts = _tap(network, addresses, progress)
        scores.append({a: part_agreement_by_picture(taps[a].tensor, parts) for a in taps})
    trained, untrained = scores
    best_ours = max((a for a in ours if a not in legacy), key=lambda a: trained[a][:half].mean())
    best_legacy = max(legacy, key=lambda a: trained[a][:half].mean())
    gain = trained[best_ours][half:] - trained[best_legacy][half:]
    learned = trained[best_ours][half:] - untrained[best_ours][half:]
    interval = _interval(gain)
    return ClaimResult(
        value=round(gain.mean().item(), 4),
        interval=interval,
        holds=interval[0] > 0 and _interval(learned)[0] > 0,
        details={
            "best": {"portraits": best_ours, "portraits-legacy": best_legacy},
            "agreement": {a: round(s[half:].mean().item(), 4) for a, s in trained.items()},
            "agreement, untrained UNet": {a: round(s[half:].mean().item(), 4) for a, s in untrained.items()},
            "gain over untrained, 95 %": _interval(learned),
        },
    )


@claim(
    "activations.noise",
    paper=PAPER,
    figure="4.1, asymmetric noise: strong at the start of the down stage, weak early in the up stage, back late",
    target="noise share at the start of down and at the end of up > 1.5 x that of the early up stage",
)
def noise(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """The share of an activation's variance that changes with the noise seed, along the network."""
    from ...engine.portraits import load_portraits

    portraits = load_portraits(model)
    shares = [_noise_shares(p, progress) for p in (portraits, _untrained(portraits))]
    ratios = []
    for share in shares:
        down, _, early, late = share.values()
        ratios.append(round(min(down, late) / max(early, 1e-12), 3))
    return ClaimResult(
        value=ratios[0],
        interval=None,
        holds=ratios[0] > 1.5,
        details={
            "noise share": shares[0],
            "noise share, untrained UNet": shares[1],
            "ratio, untrained UNet": ratios[1],
        },
    )


def _noise_shares(portraits: Portraits, progress: Progress) -> dict[str, float]:
    """Variance over seeds / (variance over seeds + variance of the mean over positions), mean over pictures."""
    addresses = [
        "down-level0-repeat0-res-out",
        "mid-vit-out",
        "up-level0-repeat0-vit-block0-cross-q",
        "up-level1-repeat1-vit-out",
    ]
    taps, _ = _tap(portraits, addresses, progress, variance=True)
    shares = {}
    for address in addresses:
        seeds = taps.variance[address].mean((1, 2, 3))
        places = taps[address].tensor.var((2, 3)).mean(1)
        shares[address] = round((seeds / (seeds + places)).mean().item(), 4)
    return shares
