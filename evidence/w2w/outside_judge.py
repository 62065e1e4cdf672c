"""Identity by a face network of other authors: whether it knows these people, and what it says of inversion."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import normalize

from ...engine.runtime.progress import Progress, silent
from ..intervals import auroc, bootstrap, mean_interval
from ..metrics.face_embedding import describe, read_weights
from ..portraits.identities import portraits_of
from ..registry import ClaimResult, Table, arms, claim
from .likeness import BARE, Sitters
from .people import Studio

FIRST, PICTURES, CONTEXT = 30_000_000, 4, 7000
"""First identity of people that no model was trained on, pictures of each, first context of their pictures."""
JUDGE, OURS = "outside face network", "our attribute classifier"


@claim(
    "w2w.judge", paper="King 2017 (dlib); no figure of the paper",
    figure="same person or another, of pairs of portraits: AUROC of a face network trained on photographs elsewhere",
    target="above 0.75, and above pixels, with the 95 % interval over people",
    minutes=0.8, quick_minutes=0.2,
)  # fmt: skip
def judge(
    model: str | None = None, progress: Progress = silent, quick: bool = False, face_model: str | None = None
) -> ClaimResult:
    """Renders of people in four contexts each; whatever judges identity must tell them apart first."""
    from ...engine.portraits import render
    from ..portraits.classifier import load_classifier, read

    weights, people = read_weights(Path(face_model or "")), 20 if quick else 100
    images = torch.cat([render(portraits_of(FIRST + i, PICTURES, CONTEXT)).images for i in range(people)])
    small = torch.nn.functional.avg_pool2d(images, 4).flatten(1)
    features = {JUDGE: describe(weights, images), OURS: read(load_classifier(), images).features, "pixels": small}
    by_person = {name: values.view(people, PICTURES, -1) for name, values in features.items()}
    who = torch.arange(people)
    areas = {name: _told_apart(values, who) for name, values in by_person.items()}
    spans = {name: bootstrap(_told_apart, values, who, paired=True, draws=200) for name, values in by_person.items()}
    progress(1, 1, None)
    parts = {"above 0.75": spans[JUDGE][0] > 0.75, "above pixels": spans[JUDGE][0] > spans["pixels"][1]}
    roles = {JUDGE: "ours", OURS: "reference", "pixels": "trivial"}
    return ClaimResult(
        round(areas[JUDGE], 4), spans[JUDGE], all(parts.values()), arms=arms(areas, roles, spans), n=people, parts=parts
    )


def _told_apart(values: torch.Tensor, who: torch.Tensor) -> float:
    """AUROC of distances between people above those within one, of (people, pictures, D) descriptors.

    Args:
        who: (people,) numbers; in a resample, pairs of a person and their own copy are left out.
    """
    flat, count = values.flatten(0, 1), values.shape[1]
    first, second = torch.triu_indices(len(flat), len(flat), 1)
    distances, same = torch.cdist(flat, flat)[first, second], first // count == second // count
    return auroc(distances[who[first // count] != who[second // count]], distances[same])


@claim(
    "w2w.inversion.judge", paper="weights2weights (Dravid et al., NeurIPS 2024)",
    figure="Table 2 by another judge: cosine of face descriptors, one picture against trained LoRAs",
    target="above a LoRA trained on the one picture and above another person's renders, paired 95 % over people",
    minutes=14, quick_minutes=1.5,
)  # fmt: skip
def inversion_judged(
    model: str | None = None, progress: Progress = silent, quick: bool = False, face_model: str | None = None
) -> ClaimResult:
    """People and settings of ``w2w.inversion``; descriptors are centred on the mean of all people's renders."""
    weights, studio = read_weights(Path(face_model or "")), Studio.open(model)
    sitters = Sitters.open(studio, 2 if quick else 16)
    truth = torch.stack([describe(weights, studio.portraits.draw(portraits_of(i, 24, CONTEXT))) for i in sitters.who])
    likeness = partial(_likeness, truth, truth.mean((0, 1)))
    scores: dict[str, torch.Tensor] = {}
    for name, flat in sitters.weights_of_three_ways(BARE).items():
        images = studio.draw_weights(studio.manifest, flat, 8)
        scores[name] = likeness(describe(weights, images.flatten(0, 1)).view(len(images), 8, -1))
        progress(len(scores), 3, None)
    scores["another person's renders"] = likeness(truth.roll(1, 0))
    ours = next(iter(scores))
    gains = {name: mean_interval(scores[ours] - other) for name, other in scores.items() if name != ours}
    parts = {f"above {name}": gains[name][0] > 0 for name in ("LoRA, 1 picture", "another person's renders")}
    roles = {name: "ours" if name == ours else "trivial" if "another" in name else "rival" for name in scores}
    spans = {name: mean_interval(values) for name, values in scores.items()}
    rows = tuple((name, round(float((scores[ours] - scores[name]).mean()), 3), f"{low} to {high}")
                 for name, (low, high) in gains.items())  # fmt: skip
    means = {name: float(values.mean()) for name, values in scores.items()}
    return ClaimResult(
        round(means[ours], 4), spans[ours], all(parts.values()), arms=arms(means, roles, spans), n=len(sitters.who),
        parts=parts, tables=(Table("Inversion less, paired", ("", "difference", "95 %"), rows),),
    )  # fmt: skip


def _likeness(truth: torch.Tensor, centre: torch.Tensor, described: torch.Tensor) -> torch.Tensor:
    """(M,) mean cosine of (M, N, D) descriptors to the mean of their person's (M, R, D), all less the ``centre``."""
    person = normalize((truth - centre).mean(1, keepdim=True), dim=2)
    return (normalize(described - centre, dim=2) * person).sum(2).mean(1)
