"""Claims about the Activation Tap, for ``vitrine reproduce activations.*``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...engine.activations.presets import PRESETS
from ...engine.progress import Progress, silent
from ..registry import ClaimResult, claim
from . import filter_claims as _filter  # noqa: F401  registers gdf.filter and gdf.properties
from . import matching_claims as _matching  # noqa: F401  registers gdf.correspondence and gdf.segmentation
from .measures import mean_interval, part_agreement_by_picture
from .world import FIRST_IDENTITY, PAPER, tap_pictures, untrained

if TYPE_CHECKING:
    from ...engine.portraits import Portraits

PICTURES, SEEDS = 48, 4
QUICK_PICTURES, QUICK_SEEDS = 24, 2


@claim(
    "activations.places",
    paper=PAPER,
    figure="Table 1's order (here: nearest features in other pictures that lie on the same part, all at 16 x 16)",
    target="best address of `portraits` beats the best of `portraits-legacy`, and itself in an untrained UNet (95 %)",
    minutes=0.1,
    quick_minutes=0.05,
)
def places(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Does a place inside a transformer carry more about the parts of a face than the places used before GDF?

    The best addresses are chosen on the first half of the pictures and measured on the second.
    """
    from ...engine.portraits import load_portraits

    portraits = load_portraits(model)
    ours, legacy = PRESETS["portraits"].addresses, PRESETS["portraits-legacy"].addresses
    addresses = list(dict.fromkeys(ours + legacy))
    count, seeds = (QUICK_PICTURES, QUICK_SEEDS) if quick else (PICTURES, SEEDS)
    half = count // 2
    scores = []
    for network in (portraits, untrained(portraits)):
        pictures = tap_pictures(network, FIRST_IDENTITY, count, addresses, progress, seeds)
        scores.append({a: part_agreement_by_picture(v.tensor, pictures.parts) for a, v in pictures.taps.items()})
    trained, random = scores
    best_ours = max((a for a in ours if a not in legacy), key=lambda a: trained[a][:half].mean())
    best_legacy = max(legacy, key=lambda a: trained[a][:half].mean())
    gain = trained[best_ours][half:] - trained[best_legacy][half:]
    learned = trained[best_ours][half:] - random[best_ours][half:]
    interval = mean_interval(gain)
    return ClaimResult(
        value=round(gain.mean().item(), 4),
        interval=interval,
        holds=interval[0] > 0 and mean_interval(learned)[0] > 0,
        details={
            "best": {"portraits": best_ours, "portraits-legacy": best_legacy},
            "agreement": {a: round(s[half:].mean().item(), 4) for a, s in trained.items()},
            "agreement, untrained UNet": {a: round(s[half:].mean().item(), 4) for a, s in random.items()},
            "gain over untrained, 95 %": mean_interval(learned),
        },
    )


@claim(
    "activations.noise",
    paper=PAPER,
    figure="4.1, asymmetric noise: strong at the start of the down stage, weak early in the up stage, back late",
    target="noise share at the start of down and at the end of up > 1.5 x that of the early up stage",
    minutes=0.1,
    quick_minutes=0.05,
)
def noise(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """The share of an activation's variance that changes with the noise seed, along the network."""
    from ...engine.portraits import load_portraits

    portraits = load_portraits(model)
    count = QUICK_PICTURES if quick else PICTURES
    shares = [_noise_shares(network, count, progress) for network in (portraits, untrained(portraits))]
    ratios = []
    for share in shares:
        down, _, early, late = share.values()
        ratios.append(round(min(down, late) / max(early, 1e-12), 3))
    return ClaimResult(
        value=ratios[0],
        interval=None,
        holds=ratios[0] > 1.5,
        details={
            "noise share": shares[0],
            "noise share, untrained UNet": shares[1],
            "ratio, untrained UNet": ratios[1],
        },
    )


def _noise_shares(portraits: Portraits, count: int, progress: Progress) -> dict[str, float]:
    """Variance over seeds / (variance over seeds + variance of the mean over positions), mean over pictures."""
    addresses = [
        "down-level0-repeat0-res-out",
        "mid-vit-out",
        "up-level0-repeat0-vit-block0-cross-q",
        "up-level1-repeat1-vit-out",
    ]
    taps = tap_pictures(portraits, FIRST_IDENTITY, count, addresses, progress, SEEDS, variance=True).taps
    shares = {}
    for address in addresses:
        over_seeds = taps.variance[address].mean((1, 2, 3))
        over_positions = taps[address].tensor.var((2, 3)).mean(1)
        shares[address] = round((over_seeds / (over_seeds + over_positions)).mean().item(), 4)
    return shares
