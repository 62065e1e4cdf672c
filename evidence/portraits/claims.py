"""Claims about the portraits model, for ``vitrine reproduce portraits.*``."""

from __future__ import annotations

from ...engine.progress import Progress, silent
from ..registry import ClaimResult, claim


def _load(model: str | None) -> tuple:
    from ...engine.portraits.models import load_portraits
    from ...engine.portraits.readout import load_readout

    return load_portraits(model), load_readout()


@claim(
    "portraits.quality",
    paper="Vitrine",
    figure="prompted attributes shown, 512 samples, guidance 3, 30 DDIM steps",
    target="mean >= 95 %, each >= 90 %, readout held-out accuracy >= 99 % on each",
)
def quality(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Do samples show what the prompt says, as read by the readout network; Frechet distances beside the floor."""
    from .quality import measure_quality

    q = measure_quality(*_load(model), progress=progress)
    holds = q.mean_accuracy >= 0.95 and q.worst[1] >= 0.90 and min(q.readout_accuracy.values()) >= 0.99
    # Binomial spread of a mean over samples x attributes, which are nearly independent here.
    spread = 1.96 * (q.mean_accuracy * (1 - q.mean_accuracy) / (q.samples * len(q.prompted_accuracy))) ** 0.5
    return ClaimResult(
        value=round(q.mean_accuracy, 4),
        interval=(round(q.mean_accuracy - spread, 4), round(min(1.0, q.mean_accuracy + spread), 4)),
        holds=holds,
        details={
            "prompted_accuracy": {k: round(v, 4) for k, v in q.prompted_accuracy.items()},
            "worst": q.worst[0],
            "readout_accuracy": {k: round(v, 4) for k, v in q.readout_accuracy.items()},
            "frechet_guided": round(q.frechet_guided, 3),
            "frechet_unguided": round(q.frechet_unguided, 3),
            "frechet_real_vs_real": round(q.frechet_floor, 3),
        },
    )


@claim(
    "portraits.memorized",
    paper="Vitrine",
    figure="planted pictures that come back from 10 seeds (median pixel RMS <= 1/3 of the nearest other picture)",
    target=">= 6 of 8, and no control caption",
)
def memorized(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Are the planted duplicates really memorized, and are captions without the rare words innocent."""
    from .quality import measure_copies

    copies = measure_copies(_load(model)[0], progress=progress)
    copied = sum(c.copied for c in copies)
    controls = sum(c.control_copied for c in copies)
    rows = {c.name: [round(v, 4) for v in (c.to_plant, c.to_neighbour, c.control_to_plant)] for c in copies}
    return ClaimResult(
        value=copied,
        interval=None,
        holds=copied >= 6 and controls == 0,
        details={"controls_copied": controls, "rms [to plant, to nearest other, control to plant]": rows},
    )
