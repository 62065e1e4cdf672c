"""Claims about the Activation Tap, for ``vitrine reproduce activations.*``."""

from __future__ import annotations

import torch

from ..claims import ClaimResult, claim
from ..progress import Progress, silent

PAPER = "GDF (arXiv 2410.03558)"
PICTURES = 24
SEEDS = tuple(range(4))
TIMESTEP = 50.0


def _taps(model: str | None, addresses: list[str], progress: Progress, **settings: object) -> tuple:
    """Taps of held-out renders at t = 50, and the parts that the renderer says are where."""
    from ..denoiser import Condition, Denoiser
    from ..portraits import caption, load_portraits, render, sample_scenes
    from .config import TapConfig
    from .images import encode_pixels
    from .tap import tap_latents

    portraits, scenes = load_portraits(model), sample_scenes(range(7_000_000, 7_000_000 + PICTURES))
    pictures = render(scenes)
    with torch.no_grad():
        cond = Condition(text=portraits.encode(caption(scenes)))
    latents = encode_pixels(portraits.vae, pictures.images * 2 - 1)
    config = TapConfig(tuple(addresses), **{"timestep": TIMESTEP, "seeds": SEEDS, **settings})
    return tap_latents(Denoiser.from_diffusers(portraits.pipeline()), latents, cond, config, progress), pictures.parts


@claim(
    "activations.places",
    paper=PAPER,
    figure="Table 1's order: places inside transformers beat block outputs (here: part agreement of nearest features)",
    target="best address of the portraits preset > best of portraits-legacy, 95 % interval over pictures above 0",
)
def places(model: str | None = None, progress: Progress = silent) -> ClaimResult:
    """Does a place inside a transformer carry more about the parts of a face than the places used before GDF?"""
    from .presets import PRESETS
    from .report import part_agreement_by_picture

    ours, legacy = PRESETS["portraits"].addresses, PRESETS["portraits-legacy"].addresses
    taps, parts = _taps(model, list(dict.fromkeys(ours + legacy)), progress)
    scores = {a: part_agreement_by_picture(taps[a].tensor, parts) for a in taps}
    fresh = [a for a in ours if a not in legacy]
    best = {"ours": max(fresh, key=lambda a: scores[a].mean()), "legacy": max(legacy, key=lambda a: scores[a].mean())}
    gain = scores[best["ours"]] - scores[best["legacy"]]
    half = 1.96 * gain.std().item() / PICTURES**0.5
    value = gain.mean().item()
    return ClaimResult(
        value=round(value, 4),
        interval=(round(value - half, 4), round(value + half, 4)),
        holds=value - half > 0,
        details={"agreement": {a: round(s.mean().item(), 4) for a, s in scores.items()}, "best": best},
    )


@claim(
    "activations.noise",
    paper=PAPER,
    figure="4.1, asymmetric noise: strong at the start of the down stage, weak early in the up stage, back late",
    target="noise share at the start of down and at the end of up > 1.5 x that of the early up stage",
)
def noise(model: str | None = None, progress: Progress = silent) -> ClaimResult:
    """The share of an activation's spatial variance that changes with the noise seed, along the network."""
    down, late = "down-level0-repeat0-res-out", "up-level1-repeat1-vit-out"
    early = "up-level0-repeat0-vit-block0-cross-q"
    taps, _ = _taps(model, [down, "mid-vit-out", early, late], progress, variance=True)
    share = {}
    for address, activation in taps.items():
        seeds = taps.variance[address].mean((1, 2, 3))
        share[address] = (seeds / (seeds + activation.tensor.var((2, 3)).mean(1))).mean().item()
    ratio = min(share[down], share[late]) / max(share[early], 1e-12)
    return ClaimResult(
        value=round(ratio, 3),
        interval=None,
        holds=ratio > 1.5,
        details={"noise_share": {a: round(v, 4) for a, v in share.items()}},
    )
