"""The activation tap: add noise to latents, run the denoiser once, keep the requested sites.

GDF (arXiv 2410.03558, section 3): x_t ~ q(x_t | z0); one call eps_theta(x_t, t, c); the output is discarded, the
inner activations are the features. All batch rows (images x seeds x timesteps) run in as few forwards as
``TapConfig.batch`` allows; each stops after the last requested site.

A few channels of a transformer's residual stream are larger than the rest by orders of magnitude, for all patches and
images, and dominate the cosine similarity. A block does not read the stream itself, but its norm under the block's
adaLN; that, with those channels set to zero before the norm, matches well (DiTF, arXiv 2505.18584).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import torch

from ..diffusion.noise import RowNoise
from ..errors import refuse
from ..io.number_checks import all_finite
from ..network.site import AdaLN, ModuleSite, Site, adaln_site
from ..runtime.progress import Progress, silent
from ..tracing.addresses import resolve
from ..tracing.hooks import Activation, capture
from .container import Activations, RunningMoments, TapInfo, store
from .tap_config import DTYPES, TapConfig

if TYPE_CHECKING:
    from ..diffusion.denoiser import Denoiser
    from ..network.condition import Condition


def massive_channels(tensor: torch.Tensor, ratio: float = 30.0) -> tuple[int, ...]:
    """Channels whose mean magnitude over images and positions is at least ``ratio`` times the median channel's.

    The paper names 154 and 1446 for Flux.1-dev, without a rule; other channels are within a factor of about ten.

    Args:
        tensor: (B, C, h, w), or (B, C, T, h, w) of a video.

    Returns:
        Their indices, the largest first.
    """
    if tensor.ndim not in (4, 5):
        raise refuse("activation", tuple(tensor.shape), "(B, C, h, w)", "text tokens and attention maps have no grid")
    size = tensor.float().abs().transpose(0, 1).flatten(1).mean(1)
    channels = torch.nonzero(size >= ratio * size.median().clamp_min(1e-30)).flatten().tolist()
    return tuple(sorted(channels, key=lambda c: -float(size[c])))


def without_channels(tensor: torch.Tensor, channels: Sequence[int], address: str = "") -> torch.Tensor:
    """A copy of (B, C, ...) with channels set to zero."""
    width = tensor.shape[1]
    if any(c >= width for c in channels):
        raise refuse("discard", list(channels), f"channels 0 .. {width - 1} of {address}", "see massive_channels")
    result = tensor.clone()
    result[:, list(channels)] = 0
    return result


def modulated(tensor: torch.Tensor, modulation: torch.Tensor, adaln: AdaLN) -> torch.Tensor:
    """(B, C, ...) block inputs after norm and modulation, as the block's attention reads them, float32.

    A discarded channel is zero before norm and adaLN, not after them, as in the authors' code.

    Args:
        modulation: (B, 2, C) shift and factor.
    """
    x = tensor.float()
    # DiTF: f = (1 + scale) LN(x) + shift, over channels; RMS norms do not centre.
    if not adaln.rms:
        x = x - x.mean(1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + adaln.eps)
    shift, factor = (part.reshape(*part.shape, *[1] * (x.ndim - 2)) for part in modulation.to(x).unbind(1))
    return factor * x + shift


Row = tuple[int, int, int]
"""(timestep index, seed index, image index)."""


def gdf_noise(seed: int, shape: Sequence[int], posterior: str = "mean") -> torch.Tensor:
    """Noise of one latent by GDF's convention: float32 on the CPU, a function of the seed alone.

    With ``posterior="sample"`` the seed's first sample is for the VAE's posterior, and the noise is the second.
    """
    noise = RowNoise([seed])
    if posterior == "sample":
        noise(shape)
    return noise(shape)[0]


def tap_latents(
    denoiser: Denoiser,
    latents: torch.Tensor,
    cond: Condition,
    config: TapConfig,
    progress: Progress = silent,
    *,
    noise: torch.Tensor | None = None,
    prompts: Sequence[str] = (),
    model: str = "",
) -> Activations:
    """Taps scaled latents (B, C, h, w), or (B, C, T, h, w) of a video, at one timestep.

    Args:
        cond: text condition with B rows, or one row for all images.
        noise: (seeds, B, C, h, w) instead of the seeds' own noise.
        prompts, model: written into the result's ``info``.

    Returns:
        Activations on the CPU in ``config.dtype``, averaged over seeds, in execution order.
    """
    return tap_timesteps(
        denoiser, latents, cond, config, (config.timestep,), progress, noise=noise, prompts=prompts, model=model
    )[0]


@torch.no_grad()
def tap_timesteps(  # noqa: PLR0913
    denoiser: Denoiser,
    latents: torch.Tensor,
    cond: Condition,
    config: TapConfig,
    timesteps: Sequence[float],
    progress: Progress = silent,
    *,
    noise: torch.Tensor | None = None,
    prompts: Sequence[str] = (),
    model: str = "",
) -> list[Activations]:
    """As :func:`tap_latents`, at several timesteps batched together; each replaces ``config.timestep``."""
    configs = [replace(config, timestep=t) for t in timesteps]
    sites = resolve(denoiser.backbone, list(config.addresses))
    read = [*sites, *_modulations(sites, config)]
    for c in configs:
        check_timestep(denoiser, c.timestep)
    _check(latents, cond, configs, noise)
    if noise is None:
        noise = torch.stack([gdf_noise(s, latents.shape[1:], config.posterior) for s in config.seeds])[:, None]
        noise = noise.expand(-1, len(latents), *latents.shape[1:])  # all images get the same
    rows: list[Row] = list(product(range(len(configs)), range(len(config.seeds)), range(len(latents))))
    tables: list[dict[str, RunningMoments]] = [{} for _ in configs]
    current: list[Row] = []

    def reduce(activation: Activation) -> None:
        place, table = activation.address, tables[current[0][0]]
        if place not in table and current == [(current[0][0], 0, picture) for picture in range(len(latents))]:
            table[place] = RunningMoments.of_one_each(activation, config.variance)
            return
        for (t, _, picture), value in zip(current, activation.tensor, strict=True):
            if place not in tables[t]:
                tables[t][place] = RunningMoments.like(activation, len(latents), config.variance)
            tables[t][place].add(picture, value)

    for start in range(0, len(rows), config.batch):
        current[:] = rows[start : start + config.batch]
        size = (latents.shape[-2], latents.shape[-1])
        with capture(
            denoiser.backbone, read, early_exit=config.early_exit, reduce=reduce, maps=config.maps, latent_size=size
        ):
            pictures = torch.tensor([p for _, _, p in current])
            seeds = torch.tensor([s for _, s, _ in current])
            t = torch.tensor([configs[i].timestep for i, _, _ in current], dtype=torch.float32).to(latents.device)
            clean = latents[pictures.to(latents.device)]
            x_t = denoiser.network_input(clean, noise[seeds, pictures].to(clean), t) if config.noise else clean
            denoiser.forward(x_t, t, cond.take(pictures))
        progress(start + len(current), len(rows), None)
    taps = []
    for table, c in zip(tables, configs, strict=True):
        dtype, order = DTYPES[c.dtype], [site.address for site in sites]
        missing = [a for a in order if a not in table]
        if missing:
            raise refuse("address", missing, "layers that run in this model", "the network never reached them")
        means = {site.address: _remedied(site, table, c) for site in sites}
        items = {a: Activation(a, store(means[a], dtype, a), table[a].grid) for a in order}
        variances = {a: table[a].variance() for a in order}
        variance = {a: store(v, torch.float32, a) for a, v in variances.items() if v is not None}
        sigma, extra = float(denoiser.schedule.sigma(c.timestep)), {"config": c.to_dict()}
        info = TapInfo(c.timestep, sigma, c.seeds, prompts=tuple(prompts), model=model, extra=extra)
        taps.append(Activations(items, info, variance))
    return taps


def _modulations(sites: Sequence[Site], config: TapConfig) -> list[ModuleSite]:
    """The sites of the adaLN modulation of each requested site, if ``modulate`` is on."""
    others = [s.address for s in sites if s.kind not in ("spatial", "tokens")]
    if config.discard and others:
        raise refuse("discard", others, "layers with a grid", "text tokens and attention maps keep their channels")
    if not config.modulate:
        return []
    modulations = {s.address: adaln_site(s) if isinstance(s, ModuleSite) else None for s in sites}
    plain = [a for a, where in modulations.items() if where is None]
    if plain:
        raise refuse("modulate", plain, "block inputs of transformers, vit-block*-in", "tap those, or leave it off")
    return [where for where in modulations.values() if where is not None]


def _remedied(site: Site, table: dict[str, RunningMoments], config: TapConfig) -> torch.Tensor:
    """The mean over seeds of one site, after DiTF's discarding and modulation if they are on."""
    mean = table[site.address].mean
    if config.discard:
        mean = without_channels(mean, config.discard, site.address)
    where = adaln_site(site) if config.modulate and isinstance(site, ModuleSite) else None
    return mean if where is None or where.adaln is None else modulated(mean, table[where.address].mean, where.adaln)


def _check(latents: torch.Tensor, cond: Condition, configs: Sequence[TapConfig], noise: torch.Tensor | None) -> None:
    """Checks all input before the first forward."""
    if not configs:
        raise refuse("timesteps", (), "at least one", "GDF uses 50")
    if latents.ndim not in (4, 5) or 0 in latents.shape or not latents.is_floating_point():
        accepted = "float (B, C, h, w), or (B, C, T, h, w) of a video"
        raise refuse("latents", tuple(latents.shape), accepted, "add a batch axis; encode pictures first")
    if not all_finite(latents):
        raise refuse("latents", "NaN or infinite values", "finite latents", "check the picture and the VAE's precision")
    for value in (cond.text, cond.pooled, *cond.extra.values()):
        if value is not None and len(value) not in (1, len(latents)):
            raise refuse("conditions", len(value), f"1 or {len(latents)}", "give one prompt, or one for each picture")
    shape = (len(configs[0].seeds), *latents.shape)
    if noise is not None and tuple(noise.shape) != shape:
        raise refuse("noise", tuple(noise.shape), shape, "one noise per seed and picture")


def check_timestep(denoiser: Denoiser, t: float) -> None:
    """Refuse a timestep outside the model's own range (0..999 for 1000-step models, 0..1000 for flow models)."""
    denoiser.schedule.sigma(t)
