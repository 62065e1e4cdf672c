"""Claims about the portraits model, for ``vitrine reproduce portraits.*``."""

from __future__ import annotations

from ...engine.portraits.flow import FLOW_WEIGHTS
from ...engine.runtime.progress import Progress, silent
from ..registry import ClaimResult, Table, arms, claim

QUICK = {"samples": 48, "renders": 512}
OTHER, DECODED, CONTROL = (
    "another sample's prompt",
    "renders through the autoencoder",
    "captions without the rare words",
)


@claim(
    "portraits.quality",
    paper="Vitrine",
    figure="prompted attributes shown, 512 samples, guidance 3, 30 DDIM steps",
    target="mean >= 95 %, each >= 90 %, held-out accuracy of the attribute classifier >= 99 % on each",
    minutes=2.5,
    quick_minutes=0.6,
)
def quality(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Whether samples show the prompt's attributes, by the attribute classifier; Frechet distances and their floor.

    ``quick`` takes 48 samples and 512 held-out renders, and tests whether the upper ends of the intervals reach the
    target.
    """
    from .avataaars import open_model
    from .classifier import classifier_of
    from .quality import measure_quality

    counts, opened = QUICK if quick else {}, open_model(model)
    q = measure_quality(opened, classifier_of(opened), **counts, progress=progress)
    spread = q.mean_accuracy - q.interval[0]
    slack = (spread, _slack(0.90, q.samples), _slack(0.99, q.renders)) if quick else (0.0, 0.0, 0.0)
    measured = (q.mean_accuracy, q.worst[1], min(q.classifier_accuracy.values()))
    return ClaimResult(
        value=round(q.mean_accuracy, 4),
        interval=(round(q.interval[0], 4), round(q.interval[1], 4)),
        holds=all(m + s >= target for m, s, target in zip(measured, slack, (0.95, 0.90, 0.99), strict=True)),
        details={
            "prompted_accuracy": {k: round(v, 4) for k, v in q.prompted_accuracy.items()},
            "worst": q.worst[0],
            "chance: mean against other prompts": round(q.chance, 4),
            "ceiling: mean of decoded renders": round(q.decoded_accuracy, 4),
            "readout_accuracy": {k: round(v, 4) for k, v in q.classifier_accuracy.items()},
            "frechet_guided": round(q.frechet_guided, 3),
            "frechet_unguided": round(q.frechet_unguided, 3),
            "frechet_real_vs_real": round(q.frechet_floor, 3),
        },
        arms=arms(
            {"ours": q.mean_accuracy, OTHER: q.chance, DECODED: q.decoded_accuracy},
            {"ours": "ours", OTHER: "trivial", DECODED: "reference"},
            {"ours": q.interval},
        ),
        n=q.samples,
        tables=(
            Table(
                "Frechet distance",
                ("pictures", "distance"),
                (("samples", q.frechet_guided), ("real against real", q.frechet_floor)),
            ),
        ),
    )


@claim(
    "portraits.quality.flow",
    paper="Vitrine",
    figure="portraits.quality on the flow model",
    target="mean >= 95 %, each >= 90 %, held-out accuracy of the attribute classifier >= 99 % on each",
    minutes=6,
    quick_minutes=0.7,
)
def quality_flow(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """As ``portraits.quality``."""
    return quality(model or str(FLOW_WEIGHTS), progress, quick)


@claim(
    "portraits.quality.avataaars",
    paper="Vitrine",
    figure="portraits.quality on faces of DiceBear's Avataaars, nine attributes",
    target="mean >= 95 %, each >= 90 %, held-out accuracy of the attribute classifier >= 99 % on each",
    minutes=3,
    quick_minutes=0.7,
)
def quality_avataaars(
    model: str | None = None, progress: Progress = silent, quick: bool = False, avataaars: str | None = None
) -> ClaimResult:
    """As ``portraits.quality``, with the attribute classifier that was trained with the model."""
    from .avataaars import avataaars_folder

    return quality(avataaars_folder(model, avataaars), progress, quick)


def _slack(share: float, count: int) -> float:
    """Half the 95 % binomial interval of a share measured on ``count`` pictures."""
    return 1.96 * (share * (1 - share) / count) ** 0.5


@claim(
    "portraits.memorized",
    paper="Vitrine",
    figure="memorized pictures that come back from 10 seeds (median pixel RMS <= 1/3 of the nearest other picture)",
    target=">= 6 of 8, and none from a caption without its rare words",
    minutes=0.7,
    quick_minutes=0.6,
)
def memorized(model: str | None = None, progress: Progress = silent, quick: bool = False) -> ClaimResult:
    """Are the injected duplicates really memorized, and are captions without the rare words innocent.

    ``quick`` takes 3 seeds instead of 10.
    """
    from .avataaars import open_model
    from .quality import measure_copies

    copies = measure_copies(open_model(model), seeds=3 if quick else 10, progress=progress)
    copied = sum(c.copied for c in copies)
    controls = sum(c.control_copied for c in copies)
    distances = {c.name: [round(v, 4) for v in (c.to_plant, c.to_neighbour, c.control_to_plant)] for c in copies}
    return ClaimResult(
        value=copied,
        interval=None,
        holds=copied >= 6 and controls == 0,
        details={"controls_copied": controls, "rms [to plant, to nearest other, control to plant]": distances},
        arms=arms({"ours": copied, CONTROL: controls}, {"ours": "ours", CONTROL: "trivial"}),
        n=len(copies),
        seeds=3 if quick else 10,
    )
