"""GDF's quantitative comparison (section 4.3) as a greedy search under a budget of channels.

Every candidate is scored alone; then the site that improves the combination most is added repeatedly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import refuse
from ..io.files import named
from ..jobs.run import Run
from ..runtime.progress import Progress, silent

ScoreOf = Callable[[tuple[str, ...]], float]


class Budget(NamedTuple):
    """Width of each site, and the largest sum of widths."""

    channels: Mapping[str, int]
    total: int


@dataclass(frozen=True)
class SearchResult:
    """Scores of the candidates and the best combination.

    Attributes:
        singles: site name -> score alone, best first.
        chosen: the combination, in the order in which its sites were added.
        score: of the combination.
    """

    singles: dict[str, float]
    chosen: tuple[str, ...]
    score: float


class _Scores:
    """Scores already computed, in a file from which an interrupted search resumes."""

    def __init__(self, run: Run) -> None:
        self._run = run
        with named(run.path or "", "comparison state", "a JSON table of scores", "delete the file"):
            self.table = {k: float(v) for k, v in run.load_table().get("scores", {}).items()}

    def score(self, addresses: tuple[str, ...], score_of: ScoreOf) -> float:
        key = " ".join(sorted(addresses))
        if key not in self.table:
            self.table[key] = float(score_of(addresses))
            self._run.save_table({"scores": self.table})
        return self.table[key]


def greedy_search(
    candidates: Sequence[str],
    score_of: ScoreOf,
    *,
    budget: Budget | None = None,
    most: int = 4,
    pool: int = 12,
    tie: float = 0.0,
    state: Run | None = None,
    progress: Progress = silent,
) -> SearchResult:
    """Ranks sites by their individual scores, then combines them greedily.

    Args:
        score_of: larger is better; called once per combination.
        budget: bound on the channels of the combination; None is no bound.
        most: most sites in the combination.
        pool: only the best ``pool`` singles are tried as additions.
        tie: additions within this score of the best count as equal; the one that is best alone is added.
        state: stores the scores in a JSON file, from which the same call resumes; its inputs are what they depend on.
    """
    widths, total = budget or Budget({}, 0)  # a site without a width costs nothing
    allowed = [c for c in candidates if widths.get(c, 0) <= total]
    if not allowed:
        raise refuse("candidates", list(candidates), "at least one layer within the budget", "raise the budget")
    if state is not None and not isinstance(state, Run):
        remedy = "a path alone does not say what the scores depend on"
        raise refuse("state", state, "Run(file, 'comparison', what the scores depend on)", remedy)
    memory = _Scores(state or Run(None, "comparison", {}))
    singles = {}
    for i, address in enumerate(allowed):
        singles[address] = memory.score((address,), score_of)
        progress(i + 1, len(allowed), None)
    ranked = dict(sorted(singles.items(), key=lambda item: -item[1]))
    chosen: tuple[str, ...] = (next(iter(ranked)),)
    best = ranked[chosen[0]]
    while len(chosen) < most:
        used = sum(widths.get(c, 0) for c in chosen)
        additions = [c for c in list(ranked)[:pool] if c not in chosen]
        additions = [c for c in additions if used + widths.get(c, 0) <= total]
        scores = {c: memory.score((*chosen, c), score_of) for c in additions}
        if not scores or max(scores.values()) <= best:
            break
        added = next(c for c in additions if scores[c] >= max(scores.values()) - tie)
        chosen, best = (*chosen, added), scores[added]
    return SearchResult(ranked, chosen, best)
