"""Options of a ranking: GDF's qualitative filter, and how the layers that it keeps are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ..errors import refuse
from .option import Option, Options

SPLITS = ("halves", "stratified", "crossed")


@dataclass(frozen=True)
class FilterRule(Options):
    """Bounds on a site's scores; None is no bound. Noise and granularity are relative to the model's median site.

    The defaults were chosen on 16 portraits of the reference model and checked on others (``vitrine reproduce
    gdf.filter``). On another model, check the strips first.
    """

    noise: Annotated[
        float | None,
        Option(
            "Largest noise score, in medians over all layers.",
            gt=0,
            top=10,
            step=0.05,
            unset=0.0,
            unset_doc="no bound",
        ),
    ] = 0.8
    granularity: Annotated[
        float | None,
        Option(
            "Finest detail allowed, in medians over all layers.",
            gt=0,
            top=10,
            step=0.1,
            unset=0.0,
            unset_doc="no bound",
        ),
    ] = 2.0
    locality: Annotated[
        tuple[float | None, float | None],
        Option(
            "Smallest and largest locality. A layer below the smallest has no spatial order.",
            node=False,
        ),
    ] = (0.05, 0.6)

    def _check(self) -> None:
        """Localities are in order."""
        low, high = self.locality
        if low is not None and high is not None and low >= high:
            raise refuse("filter locality", self.locality, "smallest below largest", "(0.05, 0.6) is the default")


@dataclass(frozen=True)
class RankingConfig(Options):
    """How sites are ranked."""

    layers: Annotated[
        str | tuple[str, ...],
        Option(
            "Layer names or patterns, such as up-*; * ranks all.",
        ),
    ] = "*"
    timestep: Annotated[
        float,
        Option(
            "The network's own timestep, 0 to 999; GDF takes 50.",
            bottom=0,
            top=1000,
            step=1,
        ),
    ] = 50.0
    rule: FilterRule = FilterRule()
    budget: Annotated[
        int | None,
        Option(
            "Most channels together.",
            ge=1,
            top=100_000,
            unset=0,
            unset_doc="no bound",
        ),
    ] = None
    most: Annotated[int, Option("Most layers together.", ge=1, top=16, remedy="GDF chooses four")] = 4
    strips: Annotated[
        bool,
        Option(
            "Also render the scored images at every site, for ``Ranking.strip``.",
            node=False,
        ),
    ] = False
    split: Annotated[
        str,
        Option(
            "Who judges: the second half; a half that shows each class as often; or each part in turn (crossed).",
            choices=SPLITS,
            details="Half of the validation images choose the sites, the others score the choice; "
            "with crossed, choices made without each part are scored on it.",
            remedy="'stratified' balances classes",
        ),
    ] = "halves"
    folds: Annotated[int, Option("Parts of the crossed split.", ge=2, top=64)] = 4
    alpha: Annotated[
        float,
        Option(
            "A point within this fraction of the image's longer side is correct.",
            gt=0,
            node=False,
            remedy="0.1 is usual",
        ),
    ] = 0.1
