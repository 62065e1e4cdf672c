"""An external check of matching, on photographs: ``vitrine reproduce gdf.photographs``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...engine.activations.correspondence import feature_maps, find_correspondence, pck
from ...engine.activations.picture_latents import encode_pixels
from ...engine.activations.presets import PRESETS
from ...engine.activations.tap import tap_latents
from ...engine.activations.tap_config import TapConfig
from ...engine.diffusion.denoiser import Denoiser
from ...engine.network.condition import Condition
from ...engine.runtime.progress import Progress, silent
from ..intervals import mean_interval
from ..registry import ClaimResult, Table, arms, claim
from .photographs import NAMES, Pairs, daisy_maps, raw_patches, warped_pairs
from .tapped_pictures import PAPER, SIDE, TIMESTEP, Model, untrained

WARPS, QUICK_WARPS, SEEDS, FIRST_WARP = 24, 8, 4, 8_000_000
ALPHAS = (0.05, 0.1)
OURS = "layers chosen on portraits"
PRIOR = "prior-work layers"
DESCRIBED = ("raw patches", "DAISY", f"{OURS}, untrained network")
RIVALS = ("copied coordinates", *DESCRIBED)
ROLES = {OURS: "ours", "DAISY": "rival", PRIOR: "rival"}


@claim(
    "gdf.photographs",
    paper=PAPER,
    figure="no figure of the paper: Harris corners of five photographs (scikit-image's) matched to rotated, scaled, "
    "shifted, mirrored copies; layers were chosen on portraits, nothing is chosen here",
    target="PCK@0.1 of the portraits' layers above copied coordinates, raw patches, DAISY and the untrained network, "
    "outside the 95 % bootstrap interval of each difference",
    minutes=0.6,
    quick_minutes=0.2,
)
def photographs(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """The intervals are over warps of these five photographs, not over photographs."""
    from ...engine.portraits import load_portraits

    portraits = load_portraits(model)
    pairs = warped_pairs(portraits.unet.config.sample_size * 4, QUICK_WARPS if quick else WARPS, FIRST_WARP)
    maps = features_of(portraits, torch.cat([pairs.sources, pairs.targets]), progress)
    methods = {"copied coordinates": None} | {name: m.chunk(2) for name, m in maps.items()}
    scores = {alpha: {name: score(pairs, maps, alpha) for name, maps in methods.items()} for alpha in ALPHAS}
    by_pair = {name: score[1] for name, score in scores[0.1].items()}
    gains = {name: mean_interval(by_pair[OURS] - by_pair[name]) for name in by_pair if name != OURS}
    low, high = mean_interval(by_pair[OURS])
    per_photo = {
        photo: {
            name: round(values[[n == photo for n in pairs.names]].nanmean().item(), 3)
            for name, values in by_pair.items()
        }
        for photo in NAMES
    }
    return ClaimResult(
        value=round(scores[0.1][OURS][0], 4),
        interval=(round(low, 4), round(high, 4)),
        holds=all(gains[name][0] > 0 for name in RIVALS),
        details={
            **{f"PCK@{a}": {name: round(v, 4) for name, (v, _) in table.items()} for a, table in scores.items()},
            "gain at 0.1, 95 %": {name: [round(bound, 4) for bound in span] for name, span in gains.items()},
            "by photograph, 0.1": per_photo,
            "pairs, points": [len(pairs.names), sum(map(len, pairs.points))],
        },
        arms=arms(
            {name: value for name, (value, _) in scores[0.1].items()},
            {name: ROLES.get(name, "trivial") for name in scores[0.1]},
            {name: mean_interval(values) for name, values in by_pair.items()},
        ),
        n=len(pairs.names),
        parts={f"above {name}": gains[name][0] > 0 for name in RIVALS},
        tables=(
            Table("At 0.05", ("features", "PCK@0.05"), tuple((n, round(v, 4)) for n, (v, _) in scores[0.05].items())),
        ),
    )


def features_of(portraits: Model, pictures: torch.Tensor, progress: Progress) -> dict[str, torch.Tensor]:
    """Name -> (B, C, 16, 16) features of (B, 3, S, S) pictures in [0, 1]."""
    ours, prior = PRESETS["portraits"].addresses, PRESETS["portraits-legacy"].addresses
    return {
        "raw patches": raw_patches(pictures),
        "DAISY": daisy_maps(pictures),
        OURS: _tapped(portraits, pictures, ours, progress),
        PRIOR: _tapped(portraits, pictures, prior, progress),
        f"{OURS}, untrained network": _tapped(untrained(portraits), pictures, ours, progress),
    }


def _tapped(portraits: Model, pictures: torch.Tensor, sites: tuple[str, ...], progress: Progress) -> torch.Tensor:
    """(B, C, 16, 16) concatenated features under the empty prompt, mean over four noise seeds."""
    with torch.no_grad():
        cond = Condition(text=portraits.encode([""]))
    latents = torch.cat([encode_pixels(portraits.vae, part * 2 - 1) for part in pictures.split(32)])
    config = TapConfig(sites, TIMESTEP, tuple(range(SEEDS)))
    taps = tap_latents(Denoiser.from_diffusers(portraits.pipeline()), latents, cond, config, progress)
    return feature_maps(taps, (SIDE, SIDE))


def score(pairs: Pairs, maps: Sequence[torch.Tensor] | None, alpha: float = 0.1) -> tuple[float, torch.Tensor]:
    """PCK over all points, and by pair; ``maps`` are features of sources and of targets, None copies coordinates."""
    predicted = []
    for n, points in enumerate(pairs.points):
        if maps is None or not len(points):
            predicted.append(points)
        else:
            predicted.append(find_correspondence(maps[0][n], maps[1][n], points, temperature=0.02).points)
    return pck(predicted, pairs.truth, [1.0] * len(predicted), alpha)
