"""What the claims of W2W measure on people of the portraits world: identity distances and shares of attributes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...engine.w2w.edit.coefficient_sampling import SampleConfig
from .people import LABELS, Studio

PEOPLE = SampleConfig(components=100_000, attributes="joined", emphasis=1.5, inherit=0.4)
"""How people are sampled for measurements: all components, the attributes of one training model, a little exaggerated.

Emphasis and inheritance were chosen on seeds from 2000 on; ``w2w.sampling`` measures those from 0 on.
"""


def distances(features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(M, P, F) identity features -> cosine distances within models (M,) and between pictures of models (M, M - 1)."""
    unit = torch.nn.functional.normalize(features, dim=-1)
    m, p = unit.shape[:2]
    table = 1 - torch.einsum("ipf,jqf->ijpq", unit, unit)
    off = ~torch.eye(p, dtype=torch.bool)
    within = table[range(m), range(m)][:, off].mean(1)
    between = table.mean((2, 3))[~torch.eye(m, dtype=torch.bool)].view(m, m - 1)
    return within, between


def distributions(within: torch.Tensor, between: torch.Tensor) -> dict[str, list[tuple[float, float]]]:
    """Cumulative distributions of both kinds of distances: (distance, share below it) at 41 shares."""
    steps = torch.linspace(0, 1, 41)
    kinds = {"of one model": within, "of two models": between}
    return {
        k: list(zip(torch.quantile(v.flatten(), steps).tolist(), steps.tolist(), strict=True)) for k, v in kinds.items()
    }


def consistent(within: torch.Tensor, between: torch.Tensor) -> int:
    """How many models are closer to themselves than to any other."""
    return int((within[:, None] < between).all(1).sum())


def shares(studio: Studio, attributes: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Label -> share of models for which most pictures show it; hair colours among those with hair."""
    hair = studio.likelihood(attributes, "bald").mean(1) < 0.5
    by_label = {}
    for label, (attribute, _) in LABELS.items():
        has = studio.likelihood(attributes, label).mean(1) > 0.5
        by_label[label] = float(has[hair].float().mean() if attribute == "hair_color" else has.float().mean())
    return by_label


def side_effects(
    before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], edited: str
) -> dict[str, torch.Tensor]:
    """Attribute other than the edited one -> (M, P, values) change of its probabilities from (M, P, values) to those.

    A bald head shows no hair colour: what the classifier reads follows the skin (pictures rendered with another skin
    and nothing else differ by 0.7). So where there was no hair before, its colour is NaN, and an edit of the hair
    itself leaves the colour out altogether.
    """
    from ...engine.portraits.scenes import ATTRIBUTES

    changes = {name: after[name] - values for name, values in before.items() if name != edited}
    if "hair" not in before:  # of another dataset
        return changes
    bald = before["hair"][..., ATTRIBUTES["hair"].index("bald")] > 0.5
    if edited == "hair":
        del changes["hair_color"]
    elif "hair_color" in changes:
        changes["hair_color"] = changes["hair_color"].masked_fill(bald[..., None], torch.nan)
    return changes


def variation(changes: torch.Tensor) -> float:
    """Of changes (..., values): how far the distribution over all pictures moves, in total variation."""
    return float(changes.flatten(0, -2).nanmean(0).abs().sum() / 2)


def spread(values: torch.Tensor) -> str:
    """Median and range of a sample, as text."""
    low, middle, high = torch.quantile(values, torch.tensor([0.05, 0.5, 0.95])).tolist()
    return f"{middle:.3f} (5th to 95th percentile {low:.3f} to {high:.3f})"
