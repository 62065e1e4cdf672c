"""Claims about the Activation Tap, for ``vitrine reproduce activations.*``."""

from __future__ import annotations

import torch

from ...engine.activations.presets import PRESETS
from ...engine.runtime.progress import Progress, silent
from ..intervals import mean_interval
from ..registry import ClaimResult, Table, arms, claim
from . import avataaars_claims as _avataaars  # noqa: F401  registers gdf.*.avataaars
from . import cutout_claims as _cutouts  # noqa: F401  registers gdf.*.photographs
from . import filter_claims as _filter  # noqa: F401  registers gdf.filter and gdf.properties
from . import flow_claims as _flow  # noqa: F401  registers gdf.*.flow
from . import massive_claims as _massive  # noqa: F401  registers gdf.massive
from . import matching_claims as _matching  # noqa: F401  registers gdf.correspondence and gdf.segmentation
from . import photograph_claims as _photographs  # noqa: F401  registers gdf.photographs
from .measures import part_agreement, part_agreement_by_picture
from .tapped_pictures import (
    FIRST_IDENTITY,
    PAPER,
    Model,
    Pictures,
    all_sites,
    inter_module_sites,
    tap_pictures,
    untrained,
)

PICTURES, SEEDS = 48, 4
QUICK_PICTURES, QUICK_SEEDS = 24, 2


@claim(
    "activations.places",
    paper=PAPER,
    figure="Table 1's order (here: nearest features in other misaligned pictures that lie on the same part, all at "
    "16 x 16)",
    target="the best layer of the preset `portraits` beats copied coordinates, Fourier coordinates, pixels, itself in "
    "an untrained UNet, and the best inter-module layer (95 % of each difference)",
    minutes=0.2,
    quick_minutes=0.1,
)
def sites(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Whether sites inside a transformer encode face parts better than the layers that prior work could tap.

    Sites are chosen on the first half of the images and measured on the second.
    """
    from ...engine.portraits import load_portraits

    portraits = load_portraits(model)
    pools = {
        "portraits": [a for a in PRESETS["portraits"].addresses if a not in PRESETS["portraits-legacy"].addresses],
        "prior work's layer": list(PRESETS["portraits-legacy"].addresses),
        "inter-module, same search": inter_module_sites(portraits),
        "all layers, same search": all_sites(portraits),
    }
    addresses = list(dict.fromkeys(a for pool in pools.values() for a in pool))
    count, seeds = (QUICK_PICTURES, QUICK_SEEDS) if quick else (PICTURES, SEEDS)
    trained, random = (
        tap_pictures(network, FIRST_IDENTITY, count, addresses, progress, seeds, misaligned=True)
        for network in (portraits, untrained(portraits))
    )
    choosing, test, fresh = (
        trained.take(slice(count // 2)),
        *(p.take(slice(count // 2, None)) for p in (trained, random)),
    )
    alone = {a: part_agreement(choosing.taps[a].tensor, choosing.parts) for a in addresses}
    best = {name: max(pool, key=lambda a: alone[a]) for name, pool in pools.items()}
    scores = {name: part_agreement_by_picture(test.taps[a].tensor, test.parts) for name, a in best.items()}
    scores |= _trivial(test) | {
        "ours, untrained network": part_agreement_by_picture(fresh.taps[best["portraits"]].tensor, fresh.parts)
    }
    ours = scores["portraits"]
    gains = {name: mean_interval(ours - score) for name, score in scores.items() if name != "portraits"}
    rivals = [name for name in gains if name not in ("prior work's layer", "all layers, same search")]
    return ClaimResult(
        value=round((ours - scores["inter-module, same search"]).mean().item(), 4),
        interval=gains["inter-module, same search"],
        holds=all(gains[name][0] > 0 for name in rivals),
        details={
            "best": best,
            "agreement": {name: round(score.mean().item(), 4) for name, score in scores.items()},
            "gain of the best of portraits, 95 %": gains,
        },
        arms=arms(
            {name: score.mean().item() for name, score in scores.items()},
            {name: "ours" if name == "portraits" else "rival" if name in pools else "trivial" for name in scores},
            {name: mean_interval(score) for name, score in scores.items()},
        ),
        n=len(ours), seeds=seeds, parts={f"above {name}": gains[name][0] > 0 for name in rivals},
        tables=(Table("Gain of ours, 95 %", ("over", "from", "to"), tuple((n, *span) for n, span in gains.items())),),
    )  # fmt: skip


def _trivial(test: Pictures) -> dict[str, torch.Tensor]:
    """Scores of trivial baselines."""
    coordinates, pixels = test.features(("coordinates",)), test.features(("pixels",))
    return {
        "copied coordinates": part_agreement_by_picture(None, test.parts),
        "Fourier coordinates": part_agreement_by_picture(coordinates, test.parts),
        "raw pixels": part_agreement_by_picture(pixels, test.parts),
    }


@claim(
    "activations.noise",
    paper=PAPER,
    figure="4.1, asymmetric noise: strong at the start of the down stage, weak early in the up stage, back late",
    target="noise share at the start of down and at the end of up > 1.5 x that of the early up stage",
    minutes=0.1,
    quick_minutes=0.05,
)
def noise(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """The fraction of an activation's variance that is due to the noise seed, along the network."""
    from ...engine.portraits import load_portraits

    portraits = load_portraits(model)
    count = QUICK_PICTURES if quick else PICTURES
    fractions = [_noise_shares(network, count, progress) for network in (portraits, untrained(portraits))]
    ratios = []
    for fraction in fractions:
        down, _, early, late = fraction.values()
        ratios.append(round(min(down, late) / max(early, 1e-12), 3))
    return ClaimResult(
        value=ratios[0],
        interval=None,
        holds=ratios[0] > 1.5,
        details={
            "noise share": fractions[0],
            "noise share, untrained UNet": fractions[1],
            "ratio, untrained UNet": ratios[1],
        },
        arms=arms(
            {"ours": ratios[0], "untrained UNet": ratios[1]}, {"ours": "ours", "untrained UNet": "trivial"}
        ),
        n=count,
        seeds=SEEDS,
    )  # fmt: skip


def _noise_shares(portraits: Model, count: int, progress: Progress) -> dict[str, float]:
    """Variance over seeds / (variance over seeds + variance of the mean over positions), mean over pictures."""
    addresses = [
        "down-level0-repeat0-res-out",
        "mid-vit-out",
        "up-level0-repeat0-vit-block0-cross-q",
        "up-level1-repeat1-vit-out",
    ]
    taps = tap_pictures(portraits, FIRST_IDENTITY, count, addresses, progress, SEEDS, variance=True).taps
    fractions = {}
    for address in addresses:
        over_seeds = taps.variance[address].mean((1, 2, 3))
        over_positions = taps[address].tensor.var((2, 3)).mean(1)
        fractions[address] = round((over_seeds / (over_seeds + over_positions)).mean().item(), 4)
    return fractions
