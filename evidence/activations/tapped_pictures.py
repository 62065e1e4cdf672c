"""Test environment of this package: held-out renders with ground truth, misaligned, their taps, and filter scores.

All faces of the renderer are aligned, so copying the source's coordinates is nearly always right. Known crops, shifts,
rotations, scales and flips of images, keypoints and masks test the features.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from ...engine.activations.container import Activations
from ...engine.activations.correspondence import feature_maps
from ...engine.activations.picture_latents import encode_pixels
from ...engine.activations.qualitative_filter import Properties, measure_properties
from ...engine.activations.ranking import PICTURES_SCORED, spatial_sites
from ...engine.activations.tap import tap_latents
from ...engine.activations.tap_config import TapConfig
from ...engine.diffusion.denoiser import Denoiser
from ...engine.network.condition import Condition
from ...engine.portraits import PARTS, Portraits, build_models
from ...engine.portraits.flow import FlowPortraits
from ...engine.runtime.progress import Progress, silent
from ...engine.tracing.hooks import Activation

Model = Portraits | FlowPortraits
PAPER = "GDF (arXiv 2410.03558)"
TIMESTEP = 50.0
SIDE = 16
"""Features of all sites are compared on a grid of this side."""

_ENCODED_AT_ONCE = 64

CHOOSING, TESTING, LABELLED = 7_100_000, 7_200_000, 7_300_000
FILTERING, PROBING = 7_700_000, 7_710_000
"""First scenes of disjoint ranges, none of them in the training data."""
SHOTS = 20
"""Number of labelled portraits for fitting a probe."""
SCALE, TURN, SHIFT = (0.75, 1.3), 30.0, 0.15
"""Ranges of misaligned pictures: scale of the object, degrees of rotation, fractions of the image side."""


@dataclass(frozen=True)
class Scene:
    """Renders with ground truth, and the inputs of a tap.

    Attributes:
        images: (B, 3, H, W) in [0, 1].
        parts: (B, H, W) int64 part indices.
        keypoints: (B, K, 2) x, y in [0, 1], NaN if hidden.
        captions, latents, cond: for the tap.
        denoiser: of the model that is tapped.
        classes: number of parts, with the background.
    """

    images: torch.Tensor
    parts: torch.Tensor
    keypoints: torch.Tensor
    captions: list[str]
    latents: torch.Tensor
    cond: Condition
    denoiser: Denoiser
    classes: int = len(PARTS)


def draw_scene(portraits: Model, identities: Sequence[int], misaligned: bool = False) -> Scene:
    """Renders identities and encodes images and captions; if misaligned, each image is warped by its own known map.

    Images have the model's size, and the details of its training data.
    """
    dataset = portraits.dataset
    scenes = dataset.sample_scenes(identities)
    drawn = dataset.render(scenes, portraits.side, details=isinstance(portraits, FlowPortraits))
    captions = dataset.caption(scenes)
    images, parts, keypoints = drawn.images, drawn.parts.long(), drawn.keypoints
    if misaligned:
        warps = random_warps(identities)
        images = warp_images(images, warps).clamp(0, 1)
        parts = warp_images(parts[:, None].float(), warps, nearest=True)[:, 0].long()
        keypoints = swap_sides(warp_points(keypoints, warps), mirrored(warps), dataset.keypoints)
    with torch.no_grad():
        cond = portraits.condition(portraits.encode(captions))
        latents = torch.cat([encode_pixels(portraits.vae, some * 2 - 1) for some in images.split(_ENCODED_AT_ONCE)])
    denoiser = Denoiser.from_diffusers(portraits)
    return Scene(images, parts, keypoints, captions, latents, cond, denoiser, len(dataset.parts))


@dataclass(frozen=True)
class Pictures:
    """Renders with ground truth, and taps of all candidate sites."""

    images: torch.Tensor
    parts: torch.Tensor
    keypoints: torch.Tensor
    taps: Activations
    classes: int = len(PARTS)

    def features(self, addresses: Sequence[str]) -> torch.Tensor:
        """(B, C, 16, 16); "pixels" gives 4 x 4 patches, "coordinates" Fourier features of the positions."""
        if tuple(addresses) == ("coordinates",):
            return fourier_features().expand(len(self.images), -1, -1, -1)
        if tuple(addresses) == ("pixels",):
            patches = F.pixel_unshuffle(self.images, self.images.shape[-1] // SIDE)
            return F.normalize(patches - patches.mean((0, 2, 3), keepdim=True), dim=1)
        return feature_maps(self.taps.select(list(addresses)), (SIDE, SIDE))

    def take(self, index: slice | list[int]) -> Pictures:
        """A subset of the images."""
        items = {a: Activation(a, v.tensor[index], v.grid) for a, v in self.taps.items()}
        taps = Activations(items, self.taps.info)
        return replace(
            self, images=self.images[index], parts=self.parts[index], keypoints=self.keypoints[index], taps=taps
        )

    @property
    def widths(self) -> dict[str, int]:
        """Channels of each site."""
        return {a: v.tensor.shape[1] for a, v in self.taps.items()}


def fourier_features(frequencies: int = 4) -> torch.Tensor:
    """(1, 4 F, 16, 16): sines and cosines of x and y with 1, 2, 4 ... half waves across the picture."""
    side = (torch.arange(SIDE) + 0.5) / SIDE
    waves = torch.stack([fn(torch.pi * 2**k * side) for k in range(frequencies) for fn in (torch.sin, torch.cos)])
    x, y = waves[:, None, :].expand(-1, SIDE, -1), waves[:, :, None].expand(-1, -1, SIDE)
    return F.normalize(torch.cat([x, y])[None], dim=1)


def tap_pictures(
    portraits: Model,
    first: int,
    count: int,
    addresses: Sequence[str],
    progress: Progress = silent,
    seeds: int = 4,
    *,
    misaligned: bool = False,
    **settings: Any,
) -> Pictures:
    """Renders and taps ``count`` identities from ``first``, at t = 50 unless ``settings`` of the tap differ."""
    scene = draw_scene(portraits, range(first, first + count), misaligned)
    return tap_scene(scene, addresses, progress, seeds, **settings)


def tap_scene(
    scene: Scene, addresses: Sequence[str], progress: Progress = silent, seeds: int = 4, **settings: Any
) -> Pictures:
    """Taps existing renders, at t = 50 unless ``settings`` of the tap differ."""
    options: dict[str, Any] = {"timestep": TIMESTEP, "seeds": tuple(range(seeds))} | settings
    config = TapConfig(tuple(addresses), **options)
    taps = tap_latents(scene.denoiser, scene.latents, scene.cond, config, progress)
    return Pictures(scene.images, scene.parts, scene.keypoints, taps, scene.classes)


def untrained(portraits: Model) -> Model:
    """The same VAE and text encoder with a randomly initialised network: the effect of the architecture alone."""
    if not isinstance(portraits, FlowPortraits):
        return replace(portraits, unet=build_models(seed=0).unet)
    with torch.random.fork_rng(devices=[]):  # as diffusers builds it: the trained one was initialised as the identity
        torch.manual_seed(0)
        return replace(portraits, transformer=type(portraits.transformer)(**portraits.transformer.config).eval())


def all_sites(portraits: Model) -> list[str]:
    """Every spatial site of the network except its input and output, in execution order."""
    first = [] if isinstance(portraits, FlowPortraits) else ["unet-after-conv-in"]
    return [*first, *spatial_sites(portraits.backbone)]


def inter_module_sites(portraits: Model) -> list[str]:
    """The sites that prior work could tap: outputs of residual blocks, transformers, samplers or flow blocks."""
    if isinstance(portraits, FlowPortraits):
        return [a for a in all_sites(portraits) if re.fullmatch(r"vit-block\d+-(in|out)", a)]
    ends = ("-res-out", "-vit-out", "sampler-out")
    return [a for a in all_sites(portraits) if a.endswith(ends)]


def score_sites(
    portraits: Model,
    first: int,
    progress: Progress = silent,
    count: int = PICTURES_SCORED,
    timestep: float = TIMESTEP,
) -> dict[str, Properties]:
    """The filter's three scores of every site, from ``count`` renders."""
    scene = draw_scene(portraits, range(first, first + count))
    sites = all_sites(portraits)
    return measure_properties(scene.denoiser, scene.latents, scene.cond, sites, timestep, progress=progress)


def random_warps(seeds: Sequence[int]) -> torch.Tensor:
    """(B, 2, 3) maps from a warped image's coordinates in [-1, 1] to the original's; each from its own seed."""
    rows = []
    for seed in seeds:
        scale, turn, right, down, flip = torch.rand(5, generator=torch.Generator().manual_seed(seed)).tolist()
        size = SCALE[0] * (SCALE[1] / SCALE[0]) ** scale
        angle = math.radians(TURN * (2 * turn - 1))
        cos, sin = math.cos(angle) / size, math.sin(angle) / size
        mirror = -1.0 if flip < 0.5 else 1.0
        x, y = 2 * SHIFT * (2 * right - 1), 2 * SHIFT * (2 * down - 1)
        turned = [[mirror * cos, mirror * sin], [-sin, cos]]
        rows.append([[*row, -(row[0] * x + row[1] * y)] for row in turned])
    return torch.tensor(rows)


def warp_images(images: torch.Tensor, warps: torch.Tensor, nearest: bool = False) -> torch.Tensor:
    """(B, C, H, W) warped by the maps, with border padding."""
    grid = F.affine_grid(warps, list(images.shape), align_corners=False)
    mode = "nearest" if nearest else "bilinear"
    return F.grid_sample(images, grid, mode=mode, padding_mode="border", align_corners=False)


def warp_points(points: torch.Tensor, warps: torch.Tensor) -> torch.Tensor:
    """(B, K, 2) points x, y in [0, 1] of the originals, in the warped images; NaN if they are outside."""
    centred = points * 2 - 1
    moved = torch.linalg.solve(warps[:, None, :, :2], (centred - warps[:, None, :, 2])[..., None])[..., 0]
    moved = (moved + 1) / 2
    inside = ((moved >= 0) & (moved <= 1)).all(-1, keepdim=True)
    return torch.where(inside, moved, torch.nan)


def mirrored(warps: torch.Tensor) -> torch.Tensor:
    """(B,) bool: which maps flip."""
    return torch.linalg.det(warps[:, :, :2]) < 0


def swap_sides(points: torch.Tensor, flipped: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
    """(B, K, 2) points with left and right swapped in flipped images."""
    other = {"left": "right", "right": "left"}
    partner = [names.index("_".join([other.get(n.split("_")[0], n.split("_")[0]), *n.split("_")[1:]])) for n in names]
    return torch.where(flipped[:, None, None], points[:, partner], points)
