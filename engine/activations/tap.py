"""The activation tap: add noise to latents, run the denoiser once, keep the requested sites.

GDF (arXiv 2410.03558, section 3): x_t ~ q(x_t | z0); one call eps_theta(x_t, t, c); the output is discarded, the
inner activations are the features. All batch rows (images x seeds x timesteps) run in as few forwards as
``TapConfig.batch`` allows; each stops after the last requested site.
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
from ..network.site import ModuleSite, Site, adaln_site
from ..runtime.progress import Progress, silent
from ..tracing.addresses import resolve
from ..tracing.hooks import Activation, capture
from .container import Activations, TapInfo
from .ditf import modulated, without_channels
from .site_statistics import RunningMoments, store
from .tap_config import DTYPES, TapConfig

if TYPE_CHECKING:
    from ..diffusion.denoiser import Denoiser
    from ..network.condition import Condition

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
    _check(denoiser, latents, cond, configs, noise)
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
            _forward(denoiser, latents, cond, noise, current, configs)
        progress(start + len(current), len(rows), None)
    return [_finish(table, sites, c, denoiser, prompts, model) for table, c in zip(tables, configs, strict=True)]


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


def _forward(
    denoiser: Denoiser,
    latents: torch.Tensor,
    cond: Condition,
    noise: torch.Tensor,
    rows: Sequence[Row],
    configs: Sequence[TapConfig],
) -> None:
    """One network call for any mixture of batch rows."""
    pictures = torch.tensor([p for _, _, p in rows])
    seeds = torch.tensor([s for _, s, _ in rows])
    t = torch.tensor([configs[i].timestep for i, _, _ in rows], dtype=torch.float32)
    clean = latents[pictures.to(latents.device)]
    chosen = noise[seeds, pictures].to(clean)
    x_t = denoiser.network_input(clean, chosen, t.to(clean.device)) if configs[0].noise else clean
    denoiser.forward(x_t, t.to(clean.device), cond.take(pictures))


def _finish(
    table: dict[str, RunningMoments],
    sites: Sequence[Site],
    config: TapConfig,
    denoiser: Denoiser,
    prompts: Sequence[str],
    model: str,
) -> Activations:
    dtype, order = DTYPES[config.dtype], [site.address for site in sites]
    missing = [a for a in order if a not in table]
    if missing:
        raise refuse("address", missing, "layers that run in this model", "the network never reached them")
    means = {site.address: _remedied(site, table, config) for site in sites}
    items = {a: Activation(a, store(means[a], dtype, a), table[a].grid) for a in order}
    variances = {a: table[a].variance() for a in order}
    variance = {a: store(v, torch.float32, a) for a, v in variances.items() if v is not None}
    info = TapInfo(
        timestep=config.timestep,
        sigma=float(denoiser.schedule.sigma(config.timestep)),
        seeds=config.seeds,
        prompts=tuple(prompts),
        model=model,
        extra={"config": config.to_dict()},
    )
    return Activations(items, info, variance)


def _remedied(site: Site, table: dict[str, RunningMoments], config: TapConfig) -> torch.Tensor:
    """The mean over seeds of one site, after DiTF's discarding and modulation if they are on."""
    mean = table[site.address].mean
    if config.discard:
        mean = without_channels(mean, config.discard, site.address)
    where = adaln_site(site) if config.modulate and isinstance(site, ModuleSite) else None
    return mean if where is None or where.adaln is None else modulated(mean, table[where.address].mean, where.adaln)


def _check(
    denoiser: Denoiser, latents: torch.Tensor, cond: Condition, configs: Sequence[TapConfig], noise: torch.Tensor | None
) -> None:
    """Checks all input before the first forward."""
    if not configs:
        raise refuse("timesteps", (), "at least one", "GDF uses 50")
    for config in configs:
        check_timestep(denoiser, config.timestep)
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
