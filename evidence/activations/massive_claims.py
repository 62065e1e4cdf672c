"""Massive channels, and DiTF's correction, on the flow model: ``vitrine reproduce gdf.massive``."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...engine.activations.tap import massive_channels
from ...engine.diffusion.denoiser import Denoiser
from ...engine.portraits.flow import FLOW_WEIGHTS, load_flow_portraits
from ...engine.runtime.progress import Progress, silent
from ..intervals import mean_interval
from ..registry import Arm, ClaimResult, arms, claim
from .measures import by_pair, correspondence_score
from .tapped_pictures import CHOOSING, TESTING, Pictures, Scene, draw_scene, tap_scene, untrained

if TYPE_CHECKING:
    from diffusers import FluxTransformer2DModel

TIMESTEP, SEEDS = 260.0, 2
"""DiTF's timestep on Flux, and two noise seeds."""
SITES = tuple(f"vit-block{i}-in" for i in range(6))
CHANNELS, FACTOR = (17, 80, 143), 1000.0
"""Injected one at a time; fixed before any measurement."""
HELD_OUT, TEST = 120, 200
QUICK_HELD_OUT, QUICK_TEST = 40, 100
NEAR = 0.02
ALPHAS = (0.1, 0.05)
RAW, MODULATED, DITF = "raw", "modulated", "modulated, massive channels discarded (DiTF)"
Table = dict[str, torch.Tensor]
"""Name -> (2, B) PCK of each test picture at 0.1 and 0.05."""


@claim(
    "gdf.massive",
    paper="DiTF (arXiv 2505.18584)",
    figure="Table 3 (Flux on SPair: 29.9 raw, 65.3 modulated, 67.1 with massive channels discarded); here keypoints of "
    "200 misaligned flow portraits, with a channel made massive by rescaling",
    target="for each of three channels: raw matching lower at 0.1 (95 % interval of the difference); DiTF within 0.02 "
    "of its result, and of raw matching, without the massive channel",
    minutes=1.5,
    quick_minutes=0.25,
)
def massive(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Site and discarded channels are chosen on other images; the injected channels are not given."""
    portraits = load_flow_portraits(model or FLOW_WEIGHTS)
    held_out, count = (QUICK_HELD_OUT, QUICK_TEST) if quick else (HELD_OUT, TEST)
    channels = CHANNELS[:1] if quick else CHANNELS
    choosing = draw_scene(portraits, range(CHOOSING, CHOOSING + held_out), misaligned=True)
    testing = draw_scene(portraits, range(TESTING, TESTING + count), misaligned=True)
    place, alone = _choose(choosing, progress)
    whole, usual = _ways(choosing, testing, place)
    fresh = untrained(portraits)
    nothing, _ = _ways(_through(choosing, fresh), _through(testing, fresh), place)
    injected: dict[int, tuple[Table, tuple[int, ...]]] = {}
    for channel in channels:
        changed = replace(portraits, transformer=with_massive_channel(portraits.transformer, channel, FACTOR))
        injected[channel] = _ways(_through(choosing, changed), _through(testing, changed), place)
        progress(len(injected), len(channels), None)
    broken = {c: _gain(whole[RAW], table[RAW]) for c, (table, _) in injected.items()}
    mended = {c: _gain(table[DITF], whole[DITF]) for c, (table, _) in injected.items()}
    beyond = {c: _gain(table[DITF], whole[RAW]) for c, (table, _) in injected.items()}
    worst = max(abs(gain[0]) for gain in mended.values())
    seen = all(set(discard) == {*usual, c} for c, (_, discard) in injected.items())
    tables = {"as trained": whole, "untrained network": nothing}
    tables |= {f"channel {c} planted": table for c, (table, _) in injected.items()}
    return ClaimResult(
        value=round(worst, 4),
        interval=None,
        holds=seen
        and worst <= NEAR
        and all(gain[1] > 0 for gain in broken.values())
        and all(gain[0] >= -NEAR for gain in beyond.values()),
        details={
            "place, chosen on other pictures": place,
            "block inputs there, raw and modulated": alone,
            "PCK [at 0.1, at 0.05]": {name: _means(table) for name, table in (tables | _trivial(testing)).items()},
            "raw with the channel below raw without, [mean, 95 %]": broken,
            "DiTF with the channel above DiTF without, [mean, 95 %]": mended,
            "DiTF with the channel above raw without, [mean, 95 %]": beyond,
            "modulated above raw, as trained, [mean, 95 %]": _gain(whole[MODULATED], whole[RAW]),
            "massive channels seen [as trained, planted]": [
                usual,
                {c: list(seen_there) for c, (_, seen_there) in injected.items()},
            ],
        },
        arms=_arms([table for table, _ in injected.values()], whole, _trivial(testing)["no network"]),
        n=count, seeds=SEEDS, parts={
            "the channel lowers raw matching": all(gain[1] > 0 for gain in broken.values()),
            "DiTF gives it back": worst <= NEAR,
        },
    )  # fmt: skip


def _arms(injected: list[Table], whole: Table, trivial: Table) -> tuple[Arm, ...]:
    """PCK@0.1 of each method at the worst injected channel, without the channel, and without a network."""
    figures = {name: min(_means(table)[name][0] for table in injected) for name in (DITF, MODULATED, RAW)}
    figures |= {"without the massive channel": _means(whole)[DITF][0]}
    figures |= {name: mean[0] for name, mean in _means(trivial).items()}
    roles = {DITF: "ours", MODULATED: "rival", RAW: "rival", "without the massive channel": "reference"}
    return arms(figures, roles | dict.fromkeys(trivial, "trivial"))


def _choose(scene: Scene, progress: Progress) -> tuple[str, dict[str, list[float]]]:
    """(the block input whose modulated features match best, all scores)."""
    raw, modulated = (_tap(scene, SITES, progress, modulate=on) for on in (False, True))
    alone = {a: [round(correspondence_score(p, p.features((a,)))[0], 3) for p in (raw, modulated)] for a in SITES}
    return max(SITES, key=lambda a: alone[a][1]), alone


def _ways(choosing: Scene, testing: Scene, place: str) -> tuple[Table, tuple[int, ...]]:
    """(scores of each way to read a site, massive channels on the images used for the choice)."""
    discard = massive_channels(_tap(choosing, (place,)).taps[place].tensor)
    ways: dict[str, dict[str, Any]] = {
        RAW: {},
        "raw, massive channels discarded": {"discard": discard},
        MODULATED: {"modulate": True},
        DITF: {"modulate": True, "discard": discard},
    }
    if not discard:
        ways = {RAW: {}, MODULATED: {"modulate": True}}
    table = {name: _scores(p := _tap(testing, (place,), **s), p.features((place,))) for name, s in ways.items()}
    return table | ({} if discard else {DITF: table[MODULATED]}), discard


def _tap(scene: Scene, sites: tuple[str, ...], progress: Progress = silent, **settings: Any) -> Pictures:
    return tap_scene(scene, sites, progress, SEEDS, timestep=TIMESTEP, **settings)


def _through(scene: Scene, model: Any) -> Scene:
    """The same images for another network."""
    return replace(scene, denoiser=Denoiser.from_diffusers(model))


def _scores(pictures: Pictures, features: torch.Tensor | None) -> torch.Tensor:
    return torch.stack([correspondence_score(pictures, features, alpha)[1] for alpha in ALPHAS])


def _trivial(scene: Scene) -> dict[str, Table]:
    """Trivial baselines."""
    pictures = _tap(scene, SITES[:1])
    return {
        "no network": {
            "copied coordinates": _scores(pictures, None),
            "Fourier coordinates": _scores(pictures, pictures.features(("coordinates",))),
            "raw pixels": _scores(pictures, pictures.features(("pixels",))),
        }
    }


def _means(table: Table) -> dict[str, list[float]]:
    return {name: [round(float(v), 4) for v in scores.nanmean(1)] for name, scores in table.items()}


def _gain(ours: torch.Tensor, theirs: torch.Tensor) -> list[float]:
    """Mean at 0.1, and its 95 % interval over pairs of images."""
    pairs = by_pair(ours[0] - theirs[0])
    return [round(float(v), 4) for v in (pairs.nanmean(), *mean_interval(pairs))]


class Unscaled(nn.LayerNorm):
    """A LayerNorm of a stream in other units."""

    scale: torch.Tensor

    def __init__(self, norm: nn.LayerNorm, scale: torch.Tensor) -> None:
        super().__init__(norm.normalized_shape, norm.eps, elementwise_affine=False)
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of the stream in its original units."""
        return super().forward(x / self.scale)


def with_massive_channel(net: FluxTransformer2DModel, channel: int, factor: float) -> FluxTransformer2DModel:
    """The same function, with one channel of the residual stream scaled by ``factor``.

    Writes to the stream are multiplied; the norms, its only readers, divide. Text and image share a stream
    in the single blocks, so both are rescaled.
    """
    net = copy.deepcopy(net)
    scale = torch.ones(net.inner_dim)
    scale[channel] = factor
    writers = [net.x_embedder, net.context_embedder]
    for double in net.transformer_blocks:
        writers += [double.attn.to_out[0], double.attn.to_add_out, double.ff.net[2], double.ff_context.net[2]]
        for ada in (double.norm1, double.norm1_context):
            ada.norm = Unscaled(ada.norm, scale)
        double.norm2, double.norm2_context = Unscaled(double.norm2, scale), Unscaled(double.norm2_context, scale)
    for single in net.single_transformer_blocks:
        writers.append(single.proj_out)
        single.norm.norm = Unscaled(single.norm.norm, scale)
    net.norm_out.norm = Unscaled(net.norm_out.norm, scale)
    with torch.no_grad():
        for writer in writers:
            writer.weight[channel] *= factor
            writer.bias[channel] *= factor
    return net.eval()
