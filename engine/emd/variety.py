"""Diversity of the images of one prompt, and noise on the text to increase it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import adaptive_avg_pool2d, normalize

from ..diffusion.coverage import precision_recall
from ..diffusion.noise import generators
from ..errors import refuse
from ..io.number_checks import refuse_unless_finite
from ..network.condition import Condition


def mean_distance(features: torch.Tensor) -> float:
    """Mean of 1 - cosine over all pairs of (N, D) features of one prompt's images; 0 if all are equal."""
    similarity = _similarity(features)
    count = len(similarity)
    return float(1 - (similarity.sum() - similarity.diagonal().sum()) / (count * (count - 1)))


def vendi_score(features: torch.Tensor) -> float:
    """Effective number of different images among N, 1 to N (Friedman & Dieng 2023): e to the entropy of K / N.

    K is the matrix of cosines of (N, D) features. The score grows with N: compare at equal N.
    """
    similarity = _similarity(features)
    # Friedman & Dieng 2023, Eq. 4: exp(-sum l ln l), l the eigenvalues of K / N
    values = torch.linalg.eigvalsh(similarity / len(similarity)).clamp(min=0)
    return float(torch.exp(-torch.xlogy(values, values).sum()))


class Variety(NamedTuple):
    """Diversity of the images of one prompt.

    Attributes:
        distance: mean of 1 - cosine between two of them.
        vendi: effective number of different images, 1 to N.
        precision, recall: fraction of images near the reference, fraction of the reference near images; None without
            one. A method that raises distance and lowers precision adds noise, not diversity.
    """

    distance: float
    vendi: float
    precision: float | None = None
    recall: float | None = None


def measure_variety(features: torch.Tensor, reference: torch.Tensor | None = None) -> Variety:
    """Measures the diversity of one prompt's images.

    Args:
        features: (N, D) of the images, one per seed.
        reference: (M, D) of reference images for the same prompt, such as the teacher's.
    """
    spread = mean_distance(features), vendi_score(features)
    if reference is None:
        return Variety(*spread)
    near = min(3, len(features) - 1, len(reference) - 1)
    if near < 2:
        counts = (len(features), len(reference))
        raise refuse("pictures, reference", counts, "3 or more of each", "sample the prompt with more seeds")
    return Variety(*spread, *precision_recall(reference, features, near))


def small_pixels(pictures: torch.Tensor, side: int = 16) -> torch.Tensor:
    """(N, 3 side^2) features of (N, 3, H, W) images in [0, 1]: pixels, without a feature network."""
    return adaptive_avg_pool2d(pictures.float() - 0.5, side).flatten(1)


def _similarity(features: torch.Tensor) -> torch.Tensor:
    if features.ndim != 2 or len(features) < 2:
        raise refuse(
            "features", tuple(features.shape), "(N, D) with N of 2 or more", "sample the prompt with several seeds"
        )
    rows = normalize(features.double(), dim=1)
    return rows @ rows.T


def noisy_text(cond: Condition, strength: float, seeds: list[int]) -> Condition:
    """Adds normal noise to the text states, in units of each token's standard deviation, different for each image.

    All-zero tokens and the pooled text are unchanged.

    Args:
        cond: (B, T, C) text, one row per seed, or one for all.
        strength: 0 has no effect.
    """
    refuse_unless_finite("strength", strength)
    if cond.text is None or strength < 0:
        shown = "no text" if cond.text is None else strength
        raise refuse("strength on a text", shown, "a text and 0 or more", "1 is as much noise as signal")
    if strength == 0:
        return cond
    cond = cond.take(torch.arange(len(seeds)))
    text = cond.text
    assert text is not None
    noise = torch.stack([torch.randn(text.shape[1:], generator=g) for g in generators(seeds)]).to(text.device)
    spread = text.float().std(dim=2, keepdim=True)
    return Condition((text.float() + strength * spread * noise).to(text.dtype), cond.pooled, cond.extra)
