"""Layers chosen on cartoon portraits, on photographed objects: points under known warps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from ...engine.activations.correspondence import feature_maps, find_correspondence, pck
from ...engine.activations.picture_latents import encode_pixels
from ...engine.activations.presets import PRESETS
from ...engine.activations.tap import tap_latents
from ...engine.activations.tap_config import TapConfig
from ...engine.diffusion.denoiser import Denoiser
from ...engine.network.condition import Condition
from ...engine.runtime.progress import Progress, silent
from ..intervals import mean_interval
from ..photograph_folder import FOLDER, composed, read_cutouts
from ..registry import ClaimResult, arms, claim
from .tapped_pictures import (
    PAPER,
    SIDE,
    TIMESTEP,
    Model,
    random_warps,
    untrained,
    warp_images,
    warp_points,
)

FIRST_WARP = 8_100_000
"""First seed of the warps and backgrounds."""
FEWEST_POINTS, QUICK_OBJECTS, SEEDS = 4, 60, 4
"""Fewest points of an object that counts, objects measured quickly, and noise seeds of a tap."""
CORNERS = 24
"""Most points on one object."""
_MARGIN = 0.1
"""Fraction of the side at each edge without points."""
CHOSEN_LAYERS, PRIOR_LAYERS = "layers chosen on portraits", "prior-work layers"
DESCRIBED = ("raw patches", "DAISY", f"{CHOSEN_LAYERS}, untrained network")
ROLES = {CHOSEN_LAYERS: "ours", "DAISY": "rival", PRIOR_LAYERS: "rival"}


@dataclass(frozen=True)
class Pairs:
    """Pairs of objects and their warped copies.

    Attributes:
        sources, targets: (P, 3, S, S) in [0, 1].
        points: of each pair, (N, 2) x, y in [0, 1] of the source; truth: their positions in the target.
    """

    sources: torch.Tensor
    targets: torch.Tensor
    points: list[torch.Tensor]
    truth: list[torch.Tensor]


@claim(
    "gdf.correspondence.photographs",
    paper=PAPER,
    figure="corners of photographed objects (tuxpaint-stamps-default), found again after a known warp on another "
    "background; layers as chosen on portraits",
    target="PCK@0.1 above copied coordinates, raw patches, DAISY and the untrained network, outside the 95 % interval",
    minutes=1.5,
    quick_minutes=0.6,
)
def correspondence(
    model: str | None = None, progress: Progress = silent, quick: bool = False, photographs: str | None = None
) -> ClaimResult:
    """One pair an object: 64 pixels, turned, scaled, shifted, half of them mirrored."""
    from ...engine.portraits import load_portraits

    portraits = load_portraits(model)
    pairs = _pairs(_objects(photographs, quick), portraits.unet.config.sample_size * 4)
    both = torch.cat([pairs.sources, pairs.targets])
    maps = {name: m.chunk(2) for name, m in features_of(portraits, both, progress).items()}
    scores = {name: score(pairs, m) for name, m in ({"copied coordinates": None} | maps).items()}
    by_pair = {name: each for name, (_, each) in scores.items()}
    gains = {
        name: mean_interval(by_pair[CHOSEN_LAYERS] - each) for name, each in by_pair.items() if name != CHOSEN_LAYERS
    }
    rivals = ("copied coordinates", *DESCRIBED)
    spans = {name: mean_interval(each) for name, each in by_pair.items()}
    return _result({name: value for name, (value, _) in scores.items()}, spans, gains, rivals, len(pairs.points))


def _objects(photographs: str | None, quick: bool) -> torch.Tensor:
    """(B, 4, 256, 256) objects of the folder; quick: evenly spaced, :data:`QUICK_OBJECTS` in all."""
    cutouts = read_cutouts(Path(photographs) if photographs else FOLDER)
    rgba = torch.stack([cutout.rgba for cutout in cutouts])
    return rgba[:: max(1, len(rgba) // QUICK_OBJECTS)] if quick else rgba


def _pairs(rgba: torch.Tensor, side: int) -> Pairs:
    """Each object before one background, and its warped copy before another; points are corners on the object."""
    count = len(rgba)
    warps = random_warps(range(FIRST_WARP, FIRST_WARP + count))
    sources = composed(rgba, range(FIRST_WARP, FIRST_WARP + count))
    targets = composed(_warped(rgba, warps), range(FIRST_WARP + count, FIRST_WARP + 2 * count))
    kept, points, truth = [], [], []
    for n, each in enumerate(rgba):
        inside = -F.max_pool2d(-each[None, 3:], 9, 1, 4)[0, 0] > 0.9  # away from the outline
        peaks = corners(each[:3].mean(0) + 0.5 * (1 - each[3]), side)
        at = (peaks * each.shape[-1]).long().clamp(max=each.shape[-1] - 1)
        peaks = peaks[inside[at[:, 1], at[:, 0]]]
        moved = warp_points(peaks[None], warps[n : n + 1])[0]
        visible = ~moved.isnan().any(1)
        if int(visible.sum()) >= FEWEST_POINTS:
            kept.append(n)
            points.append(peaks[visible])
            truth.append(moved[visible])
    small = [_resized(pictures[kept], side) for pictures in (sources, targets)]
    return Pairs(small[0], small[1], points, truth)


def _warped(rgba: torch.Tensor, warps: torch.Tensor) -> torch.Tensor:
    """As :func:`warp_images`; the border, which it continues, is transparent."""
    edged = rgba.clone()
    edged[..., [0, -1], :] = 0
    edged[..., [0, -1]] = 0
    return warp_images(edged, warps)


def _resized(pictures: torch.Tensor, side: int) -> torch.Tensor:
    return F.interpolate(pictures, (side, side), mode="bilinear", antialias=True).clamp(0, 1)


def _result(
    values: Mapping[str, float],
    spans: Mapping[str, tuple[float, float]],
    gains: Mapping[str, tuple[float, float]],
    rivals: tuple[str, ...],
    count: int,
) -> ClaimResult:
    parts = {f"above {name}": gains[name][0] > 0 for name in rivals}
    roles = {name: ROLES.get(name, "trivial") for name in values}
    return ClaimResult(
        round(values[CHOSEN_LAYERS], 4),
        spans[CHOSEN_LAYERS],
        all(parts.values()),
        {"gain, 95 %": dict(gains)},
        arms=arms(values, roles, spans),
        n=count,
        parts=parts,
    )


def features_of(portraits: Model, pictures: torch.Tensor, progress: Progress) -> dict[str, torch.Tensor]:
    """Name -> (B, C, 16, 16) features of (B, 3, S, S) pictures in [0, 1]."""
    ours, prior = PRESETS["portraits"].addresses, PRESETS["portraits-legacy"].addresses
    return {
        "raw patches": raw_patches(pictures),
        "DAISY": daisy_maps(pictures),
        CHOSEN_LAYERS: _tapped(portraits, pictures, ours, progress),
        PRIOR_LAYERS: _tapped(portraits, pictures, prior, progress),
        f"{CHOSEN_LAYERS}, untrained network": _tapped(untrained(portraits), pictures, ours, progress),
    }


def _tapped(portraits: Model, pictures: torch.Tensor, sites: tuple[str, ...], progress: Progress) -> torch.Tensor:
    """(B, C, 16, 16) concatenated features under the empty prompt, mean over four noise seeds."""
    with torch.no_grad():
        cond = Condition(text=portraits.encode([""]))
    latents = torch.cat([encode_pixels(portraits.vae, part * 2 - 1) for part in pictures.split(32)])
    config = TapConfig(sites, TIMESTEP, tuple(range(SEEDS)))
    taps = tap_latents(Denoiser.from_diffusers(portraits.pipeline()), latents, cond, config, progress)
    return feature_maps(taps, (SIDE, SIDE))


def score(pairs: Pairs, maps: Sequence[torch.Tensor] | None) -> tuple[float, torch.Tensor]:
    """PCK@0.1 over all points, and by pair.

    Args:
        maps: features of sources and of targets; None copies coordinates.
    """
    predicted = []
    for n, points in enumerate(pairs.points):
        if maps is None or not len(points):
            predicted.append(points)
        else:
            predicted.append(find_correspondence(maps[0][n], maps[1][n], points, temperature=0.02).points)
    return pck(predicted, pairs.truth, [1.0] * len(predicted), 0.1)


def corners(grey: torch.Tensor, side: int) -> torch.Tensor:
    """(N, 2) Harris corners x, y in [0, 1] of a square grey picture, of details that it still has at ``side``."""
    from skimage.feature import corner_harris, corner_peaks

    size = grey.shape[-1]
    response = corner_harris(grey.numpy(), sigma=size / side)
    edge = round(_MARGIN * size)
    peaks = corner_peaks(response, min_distance=size // 24, num_peaks=CORNERS, exclude_border=edge, threshold_rel=0)
    return (torch.from_numpy(peaks.copy()).flip(1).float() + 0.5) / size


def raw_patches(pictures: torch.Tensor, cells: int = 16, width: int = 12) -> torch.Tensor:
    """(B, 3 w^2, cells, cells): the pixel patch around each cell, centred and normalised."""
    step = pictures.shape[-1] // cells
    around = F.pad(pictures, [(width - step) // 2] * 4, mode="reflect")
    patches = F.unfold(around, width, stride=step).unflatten(2, (cells, cells))
    return F.normalize(patches - patches.mean(1, keepdim=True), dim=1)


def daisy_maps(pictures: torch.Tensor, cells: int = 16, radius: int = 9) -> torch.Tensor:
    """(B, C, cells, cells): DAISY (Tola et al. 2010), a dense descriptor of oriented gradients as SIFT's."""
    from skimage.feature import daisy

    side = pictures.shape[-1]
    grey = F.pad(pictures.mean(1, keepdim=True), [radius] * 4, mode="reflect")[:, 0]
    maps = [torch.from_numpy(daisy(g.numpy(), step=1, radius=radius, rings=2)).float().movedim(-1, 0) for g in grey]
    whole = F.interpolate(torch.stack(maps), (side, side), mode="bilinear")
    return F.normalize(F.avg_pool2d(whole, side // cells), dim=1)
