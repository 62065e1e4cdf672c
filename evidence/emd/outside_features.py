"""One-step students by an Inception network of other authors: ``vitrine reproduce emd.student.judge``."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from ...engine.runtime.progress import Progress, silent
from ..intervals import bootstrap, spearman
from ..metrics import frechet_distance
from ..metrics.inception_features import Inception, read_inception
from ..registry import ClaimResult, Table, arms, claim
from .judge import Judge
from .student_claims import PAPER, ROLES, all_samples, one_step_students

FIRST_SCENE, CAPTION_COUNT, QUICK_CAPTION_COUNT, COMPONENTS = 5_500_000, 400, 100, 64
"""First scene of the captions, captions in full and quickly, and principal components of the renders that are compared:
a covariance of 2,048 features needs more pictures than that."""
STUDENT, TEACHER_1_STEP, TEACHER_30_STEPS = "EMD, 1 step", "teacher, 1 step", "teacher, 30 steps"


@claim(
    "emd.student.judge", paper=PAPER,
    figure="Table 1 by other features: FID on an Inception network trained on photographs and drawings elsewhere",
    target="the teacher's single step is farther than its 30 steps and than the student, 95 % over pictures; all "
    "samplers in our features' order (rank correlation 0.9 or more)", minutes=14, quick_minutes=4,
)  # fmt: skip
def judged(
    model: str | None = None, progress: Progress = silent, quick: bool = False, inception: str | None = None
) -> ClaimResult:
    """Samplers of ``emd.student`` on other captions; distances to renders of other scenes, and of renders to those.

    Quick: 100 captions.
    """
    from ...engine.portraits import render, sample_scenes

    network, count = read_inception(Path(inception or "")), QUICK_CAPTION_COUNT if quick else CAPTION_COUNT
    judge = Judge.open(FIRST_SCENE, count, model)
    images = {name: pictures for name, pictures, _ in all_samples(judge, one_step_students(), progress, 2 * count)}
    others, fresh = (
        render(sample_scenes(range(FIRST_SCENE + start * count, FIRST_SCENE + stop * count))).images
        for start, stop in ((1, 3), (3, 4))
    )
    images["real against real"] = fresh
    real, compared = _compared(network, others, images, progress)
    distance = partial(frechet_distance, real)
    values = {name: distance(features) for name, features in compared.items()}
    own = {name: judge.distance(pictures) for name, pictures in images.items()}
    farther = {
        name: bootstrap(lambda a, b: distance(a) - distance(b), compared[TEACHER_1_STEP], compared[name], draws=200)
        for name in (TEACHER_30_STEPS, STUDENT)
    }
    order = spearman(list(values.values()), [own[name] for name in values])
    parts = {f"single step farther than {name}": span[0] > 0 for name, span in farther.items()}
    parts["our features' order"] = order >= 0.9
    spans = {name: bootstrap(distance, features, draws=200) for name, features in compared.items()}
    rows = tuple(
        (name, round(values[name], 4), round(own[name], 2)) for name in sorted(values, key=lambda n: values[n])
    )
    return ClaimResult(
        round(values[STUDENT], 4), spans[STUDENT], all(parts.values()), {"rank correlation": round(order, 3)},
        arms=arms(values, ROLES, spans), n=count, parts=parts,
        tables=(Table("Frechet distances by both", ("pictures", "Inception", "attribute classifier"), rows),),
    )  # fmt: skip


def _compared(
    network: Inception, others: torch.Tensor, images: dict[str, torch.Tensor], progress: Progress
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Features (N, COMPONENTS) of the reference renders and of each set, on the renders' principal components."""
    real = network.features(others)
    centre = real.mean(0)
    basis = torch.pca_lowrank(real, COMPONENTS, center=True, niter=4)[2]
    compared = {}
    for i, (name, pictures) in enumerate(images.items()):
        compared[name] = (network.features(pictures) - centre) @ basis
        progress(len(pictures) * (1 + i) // len(images) + len(pictures), 2 * len(pictures), None)
    return (real - centre) @ basis, compared
