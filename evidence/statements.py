"""The claims in plain words: the part of ``results/*.json`` that is not measured.

The registry has paper, figure and target with the measurement. Claims in ``statements.json`` that the registry does
not have were measured by another command, which is in their result, or were not run.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

METHODS = {
    "portraits": "The toy models",
    "features": "Look Inside (Activation Tap): diffusion features (GDF)",
    "nemo": "NEMO: memorization neurons",
    "w2w": "weights2weights: a space of models",
    "emd": "EMD: one-step students",
    "control": "Size conditioning",
    "resolution": "Other sizes than the trained one",
    "interfaces": "Both libraries, the authors' code, cost",
}
"""Page of the results -> its title."""
_PAGES = {"activations": "features", "gdf": "features"}


class Statement(NamedTuple):
    """One claim in words.

    Attributes:
        title: the claim, in 20 words at most.
        metric: of its arms.
        better: whether a ``higher`` or a ``lower`` figure is better, or empty.
        world: the model and data it is measured on.
        about: how it is measured and how to read it, without measured figures; 150 words at most.
    """

    title: str
    metric: str
    better: str
    world: str
    about: str


@lru_cache(maxsize=1)
def statements() -> dict[str, Statement]:
    """Claim -> its statement, in the order of the pages."""
    table = json.loads(Path(__file__).with_name("statements.json").read_text(encoding="utf-8"))
    return {name: Statement(**words) for name, words in table.items()}


def page_of(claim: str) -> str:
    """The page of :data:`METHODS` that a claim is on."""
    method = claim.split(".")[0]
    return _PAGES.get(method, method)
