"""How different the pictures of one prompt are, and the usual remedy against sameness: noise on the text."""

from __future__ import annotations

import torch
from torch.nn.functional import normalize

from ..condition import Condition
from ..errors import refuse
from ..noise import generators


def mean_distance(features: torch.Tensor) -> float:
    """Mean of 1 - cosine over all pairs of (N, D) features of one prompt's pictures: 0 where all are one.

    Raises:
        VitrineError: There are fewer than two.
    """
    similarity = _similarity(features)
    count = len(similarity)
    return float(1 - (similarity.sum() - similarity.diagonal().sum()) / (count * (count - 1)))


def vendi_score(features: torch.Tensor) -> float:
    """How many different pictures there are among N, 1 to N (Friedman & Dieng 2023): e to the entropy of K / N.

    K holds the cosines of (N, D) features. It grows with N: compare at equal N.

    Raises:
        VitrineError: There are fewer than two.
    """
    similarity = _similarity(features)
    # Friedman & Dieng 2023, Eq. 4: exp(-sum l ln l), l the eigenvalues of K / N
    values = torch.linalg.eigvalsh(similarity / len(similarity)).clamp(min=0)
    return float(torch.exp(-torch.xlogy(values, values).sum()))


def _similarity(features: torch.Tensor) -> torch.Tensor:
    if features.ndim != 2 or len(features) < 2:
        raise refuse(
            "features", tuple(features.shape), "(N, D) with N of 2 or more", "draw the prompt with several seeds"
        )
    rows = normalize(features.double(), dim=1)
    return rows @ rows.T


def noisy_text(cond: Condition, strength: float, seeds: list[int]) -> Condition:
    """Normal noise on the text states, in units of each token's own standard deviation; its own for each picture.

    Tokens that are all zero stay so, and pooled text stays as it is.

    Args:
        cond: (B, T, C) text, one row for each seed, or one for all.
        strength: 0 changes nothing.

    Raises:
        VitrineError: There is no text, or strength is negative.
    """
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
