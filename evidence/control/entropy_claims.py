"""The claim about entropy rectifying guidance: ``vitrine reproduce control.entropy``."""

from __future__ import annotations

from typing import Any

import torch

from ...engine.portraits.dataset import shown_mask
from ...engine.portraits.scenes import ATTRIBUTE_NAMES, Scenes
from ...engine.runtime.progress import Progress, silent
from ..intervals import mean_interval
from ..metrics import frechet_distance, precision_recall
from ..portraits.classifier import Reading
from ..registry import ClaimResult, Table, claim
from .controlled_transformer import ControlledTransformer
from .entropy import ARMS, BOTH, ENTROPY, NONE, PLAIN, draw
from .fid_sets import by_set, mean_arms
from .prompts import prompts_of, reader, renders

SETS, SAMPLES, QUICK_SAMPLES, QUICK_ROWS = 3, 64, 16, 12
FIRST = 7_400_000
QUICK_ARMS = (NONE, PLAIN, ENTROPY)


def hits(reading: Reading, scenes: Scenes) -> torch.Tensor:
    """(N,) fraction of the prompt's attributes in each image."""
    wanted = torch.as_tensor(scenes.attributes)
    shown = shown_mask(wanted)
    right = torch.stack([reading.logits[n].argmax(1) == wanted[:, k] for k, n in enumerate(ATTRIBUTE_NAMES)], 1)
    return (right & shown).sum(1) / shown.sum(1)


@claim(
    "control.entropy", paper="Entropy rectifying guidance (Berrada et al., NeurIPS 2025, arXiv 2504.13987)",
    figure="ERG, plain guidance and Eq. 2 at the same number of UNet evaluations: Frechet distance, prompts shown",
    target="ERG at 2 against no guidance: the lower FID and more of the prompt shown (95 % interval of the paired "
           "difference above 0), in all of three sets",
    minutes=2.5, quick_minutes=0.15,
)  # fmt: skip
def entropy(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """The transformer with the paper's curve at 64 px, three sets of prompts and noise, the same for every arm.

    ``quick`` samples three arms of few images in few steps, and tests that the interval may be above 0.
    """
    names, samples = (QUICK_ARMS, QUICK_SAMPLES) if quick else (tuple(ARMS), SAMPLES)
    readings, transformer = reader(), ControlledTransformer.open("power-cosine")
    real = readings(renders(400 if quick else 2000)).features
    fids: dict[str, list[float]] = {name: [] for name in names}
    shown: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    features: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for number in range(SETS):
        first = FIRST + 10_000 * number
        scenes, prompts, _ = prompts_of(samples, first)
        seeds = list(range(first, first + samples))
        for k, name in enumerate(names):
            reading = readings(draw(transformer, ARMS[name], prompts, seeds, **({"rows": QUICK_ROWS} if quick else {})))
            fids[name].append(round(frechet_distance(reading.features, real), 2))
            shown[name].append(hits(reading, scenes))
            features[name].append(reading.features)
            progress(number * len(names) + k + 1, SETS * len(names), None)
    return judged(fids, shown, {n: precision_recall(real, torch.cat(f)) for n, f in features.items()}, quick)


def judged(
    fids: dict[str, list[float]], shown: dict[str, list[torch.Tensor]], spread: dict[str, tuple[float, float]],
    quick: bool = False,
) -> ClaimResult:  # fmt: skip
    """The result from each arm's sets; the value is ERG's FID minus that without guidance, mean over sets.

    Args:
        spread: precision and recall of an arm's images of all sets.
    """
    differences = [ours - none for ours, none in zip(fids[ENTROPY], fids[NONE], strict=True)]
    gains = [mean_interval(a - b) for a, b in zip(shown[ENTROPY], shown[NONE], strict=True)]
    details: dict[str, Any] = {
        name: {"FID by set": fids[name], "shown": _span(torch.cat(shown[name]))}
        | {"precision, recall": [round(v, 3) for v in spread[name]]}
        for name in fids
    }
    details["ERG less no guidance, shown, by set"] = [[round(v, 3) for v in span] for span in gains]
    details["less plain guidance, FID by set"] = {
        name: [round(a - b, 2) for a, b in zip(fids[name], fids[PLAIN], strict=True)] for name in fids if name != PLAIN
    }
    if BOTH in shown:
        pair = torch.cat(shown[BOTH]) - torch.cat(shown[PLAIN])
        details["ERG and plain less plain, shown"] = [round(v, 3) for v in mean_interval(pair)]
    holds = all(low > 0 for low, _ in gains) and all(difference < 0 for difference in differences)
    if quick:
        holds = all(high > 0 for _, high in gains)
    value, interval = (
        round(sum(differences) / len(differences), 2),
        (round(min(differences), 2), round(max(differences), 2)),
    )
    roles = dict.fromkeys(fids, "rival") | {ENTROPY: "ours", NONE: "trivial"}
    means = tuple((name, float(torch.cat(values).mean())) for name, values in shown.items())
    return ClaimResult(
        value, interval, holds, details, arms=mean_arms(fids, roles), n=len(shown[NONE][0]), seeds=len(differences),
        tables=(by_set(fids), Table("Attributes shown", ("arm", "share"), means)),
    )  # fmt: skip


def _span(values: torch.Tensor) -> str:
    low, high = mean_interval(values)
    return f"{float(values.mean()):.3f} ({low:.3f} to {high:.3f})"
