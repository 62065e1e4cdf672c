"""GDF's qualitative filter as a measurement: diffusion noise, granularity and locality of every site.

The authors inspect PCA images and drop sites that are noisy, over-refined or bound to position (GDF,
section 4). Here each of the three is computed from the activations, so the filter runs on any model, needs no
labels, and reports why a site was dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from ..diffusion.denoiser import Denoiser
from ..errors import refuse
from ..io.files import named
from ..jobs.run import Run
from ..network.condition import Condition
from ..runtime.footprint import memory_bytes
from ..runtime.progress import Progress, silent
from ..settings.ranking_options import FilterRule
from ..tracing.hooks import Activation
from .activation_pictures import PCABasis
from .streaming import footprint, split_sites
from .tap import tap_latents
from .tap_config import TapConfig

GROUP = 24
"""Most sites tapped together."""


@dataclass(frozen=True)
class Properties:
    """The three properties of one site, averaged over images.

    Attributes:
        noise: 1 - cosine between the activations under two noises, 0 (none) to about 1 (nothing but noise).
        granularity: spectral centroid of the three principal components, in cycles per image: the larger, the
            finer. A grid of side n has at most n / 2.
        locality: Spearman correlation of feature distance and distance in the image, -1 .. 1; near 1, features encode
            only position.
    """

    noise: float
    granularity: float
    locality: float


def filtered(rule: FilterRule, properties: Mapping[str, Properties]) -> tuple[list[str], dict[str, list[str]]]:
    """(sites that are kept, site -> reasons why it was dropped), in the order of ``properties``."""
    scores = list(properties.values())
    noise = None if rule.noise is None else rule.noise * _median([p.noise for p in scores])
    fine = None if rule.granularity is None else rule.granularity * _median([p.granularity for p in scores])
    reasons = {a: _reasons(p, noise, fine, rule.locality) for a, p in properties.items()}
    return [a for a, why in reasons.items() if not why], {a: why for a, why in reasons.items() if why}


def _reasons(
    p: Properties, noise: float | None, fine: float | None, locality: tuple[float | None, float | None]
) -> list[str]:
    low, high = locality
    reasons = []
    if noise is not None and p.noise > noise:
        reasons.append(f"diffusion noise {p.noise:.3f} > {noise:.3f}")
    if fine is not None and p.granularity > fine:
        reasons.append(f"over-refined, {p.granularity:.2f} > {fine:.2f} cycles")
    if low is not None and p.locality < low:
        reasons.append(f"no spatial order, locality {p.locality:.2f} < {low:g}")
    if high is not None and p.locality > high:
        reasons.append(f"bound to position, locality {p.locality:.2f} > {high:g}")
    return reasons


def _median(values: list[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(0.5)) if values else 0.0


def noise_score(first: torch.Tensor, second: torch.Tensor) -> float:
    """1 - mean cosine of (B, C, h, w) under two noises, around each channel's mean (GDF, section 4.1)."""
    centre = (first.float().mean((0, 2, 3)) + second.float().mean((0, 2, 3)))[:, None, None] / 2
    cosine = F.cosine_similarity(first.float() - centre, second.float() - centre, dim=1)
    return float(1 - cosine.mean())


def granularity_score(maps: torch.Tensor) -> float:
    """Mean spectral centroid of the PCA-3 maps of (B, C, h, w), in cycles per image (GDF, section 4.2)."""
    centroids = []
    for single in maps.float().split(1):
        pca = PCABasis.fit(single).project(single)[0].float()
        pca = pca - pca.mean((1, 2), keepdim=True)
        power = torch.fft.fft2(pca).abs().square().sum(0)
        rows, columns = (torch.fft.fftfreq(n) * n for n in power.shape)
        radius = (rows[:, None].square() + columns[None].square()).sqrt()
        centroids.append((power * radius).sum() / power.sum().clamp_min(1e-30))
    return float(torch.stack(centroids).mean())


def locality_score(maps: torch.Tensor, most: int = 144) -> float:
    """Spearman correlation between distances in feature space and in the image (GDF, section 4.3).

    Args:
        maps: (B, C, h, w).
        most: most positions per image that are compared, evenly spaced.
    """
    batch, _, h, w = maps.shape
    rows, columns = torch.meshgrid(torch.arange(h) / h, torch.arange(w) / w, indexing="ij")
    positions = torch.stack([rows.flatten(), columns.flatten()], 1)
    chosen = torch.linspace(0, h * w - 1, min(most, h * w)).round().long()
    ranks = _ranks(torch.pdist(positions[chosen]))
    correlations = []
    for picture in maps.float():
        cells = picture.flatten(1)
        features = F.normalize((cells - cells.mean(1, keepdim=True)).T[chosen], dim=1)
        correlations.append(torch.corrcoef(torch.stack([ranks, _ranks(torch.pdist(features))]))[0, 1].nan_to_num())
    return float(torch.stack(correlations).mean()) if batch else 0.0


def _ranks(values: torch.Tensor) -> torch.Tensor:
    """Ranks with ties averaged: a grid has many equal distances."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    means = counts.double().cumsum(0) - (counts.double() - 1) / 2
    return means[inverse]


def measure_properties(
    denoiser: Denoiser,
    latents: torch.Tensor,
    cond: Condition,
    addresses: list[str],
    timestep: float = 50.0,
    *,
    state: str | Path | Run | None = None,
    memory: int | str | None = None,
    progress: Progress = silent,
) -> dict[str, Properties]:
    """The three scores of every site, from a few images under two noise samples.

    Args:
        latents: (B, C, h, w) clean latents of at least 2 images; six or eight are enough.
        addresses: spatial sites of a UNet or transformer.
        state: a .safetensors file with the scores of finished sites, from which the same call resumes. A run has the
            digests of images and network, if they are known without reading them.
        memory: budget in bytes or as "2GB" for the sites and images that are tapped together; None taps two dozen sites
            together.
    """
    if len(latents) < 2:
        raise refuse("pictures", len(latents), "two or more", "one picture cannot tell what is common; take six")
    if isinstance(state, Run):
        run = state
    else:
        run = Run(state, "filter", {"model": denoiser, "pictures": [latents, cond], "timestep": timestep})
    properties = _known(run)
    missing = [a for a in addresses if a not in properties]
    done = 0
    groups, rows = site_groups(denoiser, latents, cond, missing, timestep, memory)
    for sites in groups:
        configs = [TapConfig(sites, timestep, (seed,), batch=rows) for seed in (0, 1)]
        taps = [tap_latents(denoiser, latents, cond, config) for config in configs]
        for address in taps[0]:
            properties[address] = _score(*(t[address] for t in taps))
        run.save({}, facts={a: asdict(p) for a, p in properties.items()})
        done += len(sites)
        progress(done, len(missing), None)
    return {a: properties[a] for a in addresses}


def site_groups(
    denoiser: Denoiser,
    latents: torch.Tensor,
    cond: Condition,
    sites: list[str],
    timestep: float,
    memory: int | str | None,
) -> tuple[list[tuple[str, ...]], int]:
    """Groups of sites that are tapped together for all images, and the batch rows of a forward.

    Args:
        memory: budget in bytes or as "2GB"; None groups two dozen sites.
    """
    if memory is None or not sites:
        return [tuple(sites[i : i + GROUP]) for i in range(0, len(sites), GROUP)], TapConfig(("*",)).batch
    config, budget = TapConfig(tuple(sites), timestep), memory_bytes(memory)
    row_cost = footprint(denoiser, latents[:1], cond.take(torch.zeros(1, dtype=torch.long)), config)
    # two noise samples per image, and the intermediate values of their scores
    parts = split_sites(row_cost.sites, budget, 3 * len(latents))
    rows = max(1, min(config.batch, budget // 2 // max(1, row_cost.forward)))
    return [part[i : i + GROUP] for part in parts for i in range(0, len(part), GROUP)], rows


def _score(first: Activation, second: Activation) -> Properties:
    """The scores of one site from its activations under two noise samples."""
    if first.grid is None:
        raise refuse("address", first.address, "layers with a grid", "attention maps and text tokens have none")
    mean = (first.tensor.float() + second.tensor.float()) / 2
    return Properties(noise_score(first.tensor, second.tensor), granularity_score(mean), locality_score(mean))


def _known(run: Run) -> dict[str, Properties]:
    state = run.load()
    with named(run.path or "", "filter state", "a table of properties", "delete the file"):
        table = {} if state is None else state.facts
        return {a: Properties(**{k: float(n) for k, n in v.items()}) for a, v in table.items()}
