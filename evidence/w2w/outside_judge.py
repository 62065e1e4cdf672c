"""Identity by a face network of other authors: whether it knows these people."""

from __future__ import annotations

from pathlib import Path

import torch

from ...engine.runtime.progress import Progress, silent
from ..intervals import auroc, bootstrap
from ..metrics.face_embedding import describe, read_weights
from ..portraits.identities import portraits_of
from ..registry import ClaimResult, arms, claim

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
