"""NeMo on a user's model: statistics, a threshold, and the neurons of each prompt, stored on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...engine.nemo import Calibration, NeuronSet, NeuronStatistics, threshold, value_sites
from ...engine.nemo.neuron_statistics import import_official
from ...engine.nemo.search_config import SearchConfig
from .context import Context
from .nemo import MEMORIZED, REPOSITORY, VERBATIM
from .records import Need

CAPTIONS = Need(
    "captions.csv", "ordinary captions, 500 or more, for statistics of a model that has none published",
    "any list of captions, such as LAION's or COCO's", "of that list", ("captions.txt",), optional=True,
)  # fmt: skip
STATISTICS = Need(
    "statistics_additional_laion_prompts_v1_4.pt", "means and deviations of SD1.4's value neurons over 50,000 captions",
    f"{REPOSITORY}, statistics/", "MIT", ("calibration.safetensors", *CAPTIONS.names),
)  # fmt: skip
TOGETHER = 4
"""Prompts searched in lockstep: a kill costs these."""
ROWS_OF_A_SEARCH = 800
"""Rows of a VM prompt's search: 15.7 s where 20 rows took 0.21 s (NeMo, Table 2), half of them for results unused."""


def verbatim_rows(context: Context) -> tuple[list[int], list[str], int]:
    """(rows in the list, prompts, how many there are) of the prompts that come back verbatim, the subset of them."""
    prompts, labels = context.prompts(MEMORIZED)
    rows = [i for i, label in enumerate(labels) if label == VERBATIM] or list(range(len(prompts)))
    chosen = [rows[i] for i in context.chosen(len(rows))]
    return chosen, [prompts[i] for i in chosen], len(rows)


def statistics_of(context: Context) -> tuple[NeuronStatistics, list[str]]:
    """The authors' file, one of ``vitrine nemo calibrate``, or gathered here from captions; and what differs."""
    path = context.path(STATISTICS)
    assert path is not None  # a check does not run without what it needs
    if path.suffix == ".pt":
        return import_official(path, [site.address for site in value_sites(context.network)]), []
    if path.suffix == ".safetensors":
        return Calibration.load(path).known("statistics"), ["statistics of the user's own captions"]
    captions = _captions(context)[0]
    state = context.state("statistics", captions)
    bar = context.bar("statistics")
    measured = context.nemo.calibrate(captions, ["statistics"], progress=bar, state=state, memory=context.budget)
    differs = f"statistics of {len(captions)} captions of the user's, the authors took 50,000"
    return measured.known("statistics"), [differs]


def _captions(context: Context) -> tuple[list[str], list[str]]:
    """Captions for statistics, and a fifth, 100 at most, that are kept apart for the threshold."""
    captions = context.prompts(CAPTIONS)[0]
    apart = min(100, len(captions) // 5)
    return captions[: len(captions) - apart], captions[len(captions) - apart :]


def search_of(context: Context) -> tuple[SearchConfig, list[str]]:
    """The search's settings with a tau, calibrated here where they have none, and rows that fit the budget."""
    search, notes = context.settings.search, []
    if search.tau is None:
        apart, probe = _captions(context)[1], context.settings.probe
        state = context.state("threshold.safetensors", probe.to_dict(), apart)
        bar = context.bar("threshold")
        scores = context.nemo.detect(apart, None, "one step", probe, bar, state, context.budget)
        search = replace(search, tau=threshold([s.value for s in scores])[0])
        notes = [f"tau {search.tau:.3f} calibrated here on {len(apart)} captions, published 0.428"]
    return replace(search, rows=context.pace.rows_within(context.budget, search.rows)), notes


def neurons_of(context: Context, prompts: Sequence[str]) -> tuple[list[NeuronSet], list[str]]:
    """The set of each prompt, searched some at a time, and what differs; resumes where it was stopped."""
    statistics, differs = statistics_of(context)
    search, notes = search_of(context)
    settings: list[Any] = [search.to_dict(), context.settings.probe.to_dict(), statistics_mark(statistics)]
    folder, bar = context.state("neurons", settings), context.bar("search")
    paths = [folder / f"{hashlib.sha256(prompt.encode()).hexdigest()[:16]}.json" for prompt in prompts]
    for start in range(0, len(prompts), TOGETHER):
        part = slice(start, start + TOGETHER)
        if not all(path.is_file() for path in paths[part]):
            results = context.nemo.find(list(prompts[part]), Calibration(statistics), search, context.settings.probe)
            for path, result in zip(paths[part], results, strict=True):
                context.nemo.neurons(result).save(path)
        bar(min(start + TOGETHER, len(prompts)), len(prompts), None)
    return [NeuronSet.load(path) for path in paths], differs + notes


def statistics_mark(statistics: NeuronStatistics) -> str:
    """A sum over all means and deviations."""
    total = hashlib.sha256()
    for address in sorted(statistics.means):
        for values in (statistics.means[address], statistics.stds[address]):
            total.update(values.float().numpy().tobytes())
    return total.hexdigest()
