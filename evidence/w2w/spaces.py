"""What any space of people is measured by: sampled models, and the directions of labels."""

from __future__ import annotations

from typing import Any

import torch

from ...engine.runtime.progress import Progress, silent
from ...engine.w2w.edit.coefficient_sampling import SampleConfig, closeness, nearest, sample
from ...engine.w2w.space.directions import quality
from ...engine.w2w.space.space import WeightSpace
from ..registry import ClaimResult, Curves, Table, arms
from .measures import PEOPLE, consistent, distances, distributions, shares, spread
from .people import LABELS, SHAPES, Studio, labels

GAUSSIANS = "independent Gaussians (the paper's)"


def measure_sampling(
    studio: Studio, models: int, pictures: int, tolerance: float, progress: Progress = silent
) -> ClaimResult:
    """``models`` sampled models of a studio's space, ``pictures`` of each; shares of three times as many.

    Args:
        tolerance: how far the share of an attribute may be from that of the training people.
    """
    space = studio.space
    coefficients = sample(space, range(models), PEOPLE)
    features, attributes = studio.read(studio.draw(coefficients, pictures))
    within, between = distances(features)
    near, limit = [n[0].cosine for n in nearest(space, coefficients)], closeness(space)
    progress(1, 4, None)
    differences, training_gaps = _gaps(studio, attributes, models, pictures, progress)
    paper = SampleConfig(components=space.dimension, attributes="gaussian")
    gaussian = studio.draw(sample(space, range(models), paper), pictures)
    within_gaussian, between_gaussian = distances(studio.read(gaussian)[0])
    progress(4, 4, None)
    worst = max(differences, key=lambda k: abs(differences[k]))
    separate = float(torch.quantile(within, 0.95)) < float(torch.quantile(between, 0.05))
    ours, gaussians = consistent(within, between), consistent(within_gaussian, between_gaussian)
    details = {
        "distance within a model": spread(within),
        "distance between models": spread(between.flatten()),
        "independent Gaussians (the paper's draw)": f"within {spread(within_gaussian)}, between "
        f"{float(between_gaussian.median()):.3f}",
        "nearest training model, cosine": f"at most {max(near):.3f}, mean {sum(near) / len(near):.3f}",
        "training models among themselves, 95th percentile": round(limit, 3),
    }
    parts = {"consistent": separate, "new": max(near) < limit}
    details |= {"largest gap of an attribute's share": f"{worst} {differences[worst]:+.3f}", "gaps": differences}
    details["training LoRAs' own gaps"] = training_gaps
    parts["as varied"] = abs(differences[worst]) <= tolerance
    plot = Curves("Identity distance of two pictures", "cosine distance", "share below", distributions(within, between))
    return ClaimResult(
        round(float(within.mean() / between.mean()), 3), None, all(parts.values()), details, (plot,),
        arms({"ours": ours, GAUSSIANS: gaussians}, {"ours": "ours", GAUSSIANS: "rival"}), models,
        parts=parts,
        tables=(
            Table("Mean identity distance", ("pictures", "cosine distance"),
                  (("of one model", float(within.mean())), ("of two models", float(between.mean())))),
            Table("Largest cosine to a training person", ("models", "cosine"),
                  (("sampled", max(near)), ("training people to each other, 95 %", limit))),
        ),
    )  # fmt: skip


def _gaps(
    studio: Studio, attributes: Any, models: int, pictures: int, progress: Progress
) -> tuple[dict[str, float], dict[str, float]]:
    """Label -> share of sampled models with it, less the share of training people; and the same of training LoRAs.

    Shares of 50 models would be 7 points uncertain, so twice as many more are sampled, with fewer pictures each.
    """
    space = studio.space
    known = labels(space.names)
    wanted = {k: float(known[k].nanmean()) for k in LABELS}
    # a finite training set's own shares, through the same network: what its LoRAs generate
    trained = studio.draw(space.coefficients[:: max(1, space.count // models)][:models], pictures)
    trained_shares = shares(studio, studio.read(trained)[1])
    progress(2, 4, None)
    more = studio.read(studio.draw(sample(space, range(models, 3 * models), PEOPLE), min(3, pictures)))[1]
    pooled = {k: torch.cat([v.mean(1, keepdim=True), more[k].mean(1, keepdim=True)]) for k, v in attributes.items()}
    sampled_shares = shares(studio, pooled)
    progress(3, 4, None)
    differences = {k: round(sampled_shares[k] - wanted[k], 3) for k in LABELS}
    return differences, {k: round(trained_shares[k] - wanted[k], 3) for k in LABELS}


def measure_directions(space: WeightSpace, components: int | None = None) -> ClaimResult:
    """Five-fold accuracy of each label's direction, and how much directions share; and of shuffled labels.

    Args:
        components: how many to use; None takes a third of the number of models.
    """
    known = labels(space.names)
    result = quality(space, known, components=components)
    worst = min(LABELS, key=lambda k: result.balanced[k])
    off_diagonal = result.entanglement[~torch.eye(len(result.labels), dtype=torch.bool)]
    order = torch.randperm(space.count, generator=torch.Generator().manual_seed(0))
    chance = list(quality(space, {k: known[k][order] for k in LABELS}, components=components).balanced.values())
    details: dict[str, Any] = {k: f"{result.accuracy[k]:.3f} (balanced {result.balanced[k]:.3f})" for k in LABELS}
    details |= {k: f"above or below average: {result.balanced[k.replace('_', ' ')]:.3f}" for k in SHAPES}
    details["mean |cosine| between directions"] = round(float(off_diagonal.mean()), 3)
    details["shuffled labels, balanced"] = f"mean {sum(chance) / len(chance):.3f}, at most {max(chance):.3f}"
    details["people, components"] = [space.count, space.dimension]
    details["variance held"] = round(float(space.explained.sum()), 3)
    return ClaimResult(
        round(result.balanced[worst], 3),
        None,
        result.balanced[worst] >= 0.9,
        details,
        n=space.count,
        arms=arms(
            {"ours": result.balanced[worst], "shuffled labels, mean": sum(chance) / len(chance)},
            {"ours": "ours", "shuffled labels, mean": "trivial"},
        ),
        tables=(
            Table("Balanced accuracy", ("label", "accuracy"), tuple((k, round(result.balanced[k], 3)) for k in LABELS)),
        ),
    )
