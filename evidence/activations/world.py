"""The portraits world of this room: held-out renders with their truth, tapped, and places scored by the filter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ...engine.activations.config import TapConfig
from ...engine.activations.container import Activations
from ...engine.activations.correspondence import feature_maps
from ...engine.activations.filter import Properties, measure_properties
from ...engine.activations.images import encode_pixels
from ...engine.activations.ranking import PICTURES_SCORED, spatial_places
from ...engine.activations.tap import tap_latents
from ...engine.condition import Condition
from ...engine.denoiser import Denoiser
from ...engine.hooks import Activation
from ...engine.portraits import caption, render, sample_scenes
from ...engine.progress import Progress, silent

if TYPE_CHECKING:
    from ...engine.portraits import Portraits

PAPER = "GDF (arXiv 2410.03558)"
TIMESTEP = 50.0
SIDE = 16
"""Features of all places are compared on a grid of this side."""

FIRST_IDENTITY = 7_000_000
"""From here on, training saw no identity; the ranges below keep choosing, labelling and testing apart."""
CHOOSING, TESTING, LABELLED = 7_100_000, 7_200_000, 7_300_000
FILTERING, PROBING = 7_700_000, 7_710_000
SHOTS = 20
"""Labelled portraits that a probe is fitted on."""


@dataclass(frozen=True)
class Scene:
    """Renders with their truth, and what a tap takes of them.

    Attributes:
        images: (B, 3, H, W) in [0, 1].
        parts: (B, H, W) int64 numbers of the parts of a face.
        keypoints: (B, K, 2) x, y in [0, 1], NaN where hidden.
        captions, latents, cond: for the tap.
        denoiser: of the model that is tapped.
    """

    images: torch.Tensor
    parts: torch.Tensor
    keypoints: torch.Tensor
    captions: list[str]
    latents: torch.Tensor
    cond: Condition
    denoiser: Denoiser


def draw_scene(portraits: Portraits, identities: Sequence[int]) -> Scene:
    """Render identities and encode pictures and captions."""
    scenes = sample_scenes(identities)
    drawn, captions = render(scenes), caption(scenes)
    with torch.no_grad():
        cond = Condition(text=portraits.encode(captions))
    latents = encode_pixels(portraits.vae, drawn.images * 2 - 1)
    denoiser = Denoiser.from_diffusers(portraits.pipeline())
    return Scene(drawn.images, drawn.parts.long(), drawn.keypoints, captions, latents, cond, denoiser)


@dataclass(frozen=True)
class Pictures:
    """Renders with their truth, and taps of every place in question."""

    images: torch.Tensor
    parts: torch.Tensor
    keypoints: torch.Tensor
    taps: Activations

    def features(self, addresses: Sequence[str]) -> torch.Tensor:
        """(B, C, 16, 16); the word "pixels" stands for 4 x 4 patches of the picture."""
        if tuple(addresses) == ("pixels",):
            patches = F.pixel_unshuffle(self.images, self.images.shape[-1] // SIDE)
            return F.normalize(patches - patches.mean((0, 2, 3), keepdim=True), dim=1)
        return feature_maps(self.taps.select(list(addresses)), (SIDE, SIDE))

    def take(self, index: slice | list[int]) -> Pictures:
        """Some of the pictures."""
        items = {a: Activation(a, v.tensor[index], v.grid) for a, v in self.taps.items()}
        taps = Activations(items, self.taps.info)
        return Pictures(self.images[index], self.parts[index], self.keypoints[index], taps)

    @property
    def widths(self) -> dict[str, int]:
        """Channels of each place."""
        return {a: v.tensor.shape[1] for a, v in self.taps.items()}


def tap_pictures(
    portraits: Portraits,
    first: int,
    count: int,
    addresses: Sequence[str],
    progress: Progress = silent,
    seeds: int = 4,
    variance: bool = False,
) -> Pictures:
    """Render and tap ``count`` identities from ``first`` on, at t = 50."""
    scene = draw_scene(portraits, range(first, first + count))
    config = TapConfig(tuple(addresses), TIMESTEP, tuple(range(seeds)), variance=variance)
    taps = tap_latents(scene.denoiser, scene.latents, scene.cond, config, progress)
    return Pictures(scene.images, scene.parts, scene.keypoints, taps)


def untrained(portraits: Portraits) -> Portraits:
    """The same VAE and text encoder with a UNet of fresh random weights: what the architecture alone gives."""
    from dataclasses import replace

    from ...engine.portraits import build_models

    return replace(portraits, unet=build_models(seed=0).unet)


def all_places(portraits: Portraits) -> list[str]:
    """Every spatial place of the network but its input and output, in execution order."""
    return ["unet-after-conv-in", *spatial_places(portraits.unet)]


def score_places(
    portraits: Portraits, first: int, progress: Progress = silent, count: int = PICTURES_SCORED
) -> dict[str, Properties]:
    """The filter's three scores of every place, from ``count`` renders."""
    scene = draw_scene(portraits, range(first, first + count))
    return measure_properties(scene.denoiser, scene.latents, scene.cond, all_places(portraits), progress=progress)
