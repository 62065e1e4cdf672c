"""NeMo on a user's model: the score as a detector (Hintersdorf et al., NeurIPS 2024, Appendix B.4), and its search.

Statistics, a threshold and the neurons of each prompt are stored on disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...engine.nemo import Calibration, NeuronSet, NeuronStatistics, threshold, value_sites
from ...engine.nemo.blocked_copies import share_interval
from ...engine.nemo.neuron_statistics import import_official
from ...engine.pipelines.nemo_jobs import probe_of
from ...engine.pipelines.nemo_prompts import latent_shape
from ...engine.settings.nemo_options import SearchConfig
from ..intervals import auroc, auroc_interval, true_positives, true_positives_interval
from .context import SETTINGS, Context
from .protocol import check
from .records import Estimate, Figure, Measured, Need, Published

PAPER = "Finding NeMo (Hintersdorf et al., NeurIPS 2024)"
REPOSITORY = "github.com/ml-research/localizing_memorization_in_diffusion_models"
MEMORIZED = Need(
    "memorized_laion_prompts.csv",
    "500 memorized prompts, columns Caption and type VM or TM",
    f"{REPOSITORY}, prompts/",
    "code MIT; the list comes from Wen et al., whose repository states none: do not pass it on",
    ("memorized_prompts.csv",),
)
ORDINARY = Need(
    "unmemorized_laion_prompts.csv",
    "500 prompts that are not memorized",
    f"{REPOSITORY}, prompts/",
    "code MIT; captions from LAION, none stated",
    ("ordinary_prompts.csv",),
)
SD14, DATA = "SD1.4", "500 memorized and 500 other LAION prompts"
VERBATIM, FPR = "VM", 0.01
_TABLE = (
    ("auroc", "AUROC of the score, all prompts", 0.98),
    ("tpr", "fraction of memorized prompts above 99 % of the others (TPR at 1 % FPR)", 0.876),
    ("accuracy", "accuracy at a score of 0.5", 0.942),
    ("auroc.vm", "AUROC, prompts that come back verbatim (VM)", 0.9964),
    ("tpr.vm", "TPR at 1 % FPR, VM", 0.9821),
    ("accuracy.vm", "accuracy at 0.5, VM", 0.9739),
)
PUBLISHED = tuple(
    Published(f"nemo.{key}", figure, value, None, SD14, DATA, "NeMo, Appendix B.4") for key, figure, value in _TABLE
)


def prepare(context: Context) -> Estimate:
    """Ten noises of every prompt, one forward each."""
    counts = [_count(context, need) for need in (MEMORIZED, ORDINARY)]
    seeds, rows = context.settings.detect.seeds, sum(counts) * context.settings.detect.seeds
    held = context.pace.rows_within(context.budget, 80) * context.pace.row
    return context.pace.estimate(rows, held, f"{counts[0]} + {counts[1]} prompts, {seeds} noises each")


def _count(context: Context, need: Need, published: int = 500) -> int:
    """Prompts that will be measured; the published number if the list is missing."""
    whole = published if context.path(need) is None else len(context.prompts(need)[0])
    return len(context.chosen(whole))


@check(
    "nemo.detection",
    paper=PAPER,
    families=("SD", "SDXL", "Flux"),
    needs=(MEMORIZED, ORDINARY, SETTINGS),
    published=PUBLISHED,
    prepare=prepare,
)
def detection(context: Context) -> Measured:
    """Scores of both lists, and how well they are separated."""
    (memorized, labels), (ordinary, _) = (context.prompts(need) for need in (MEMORIZED, ORDINARY))
    first, second = context.chosen(len(memorized)), context.chosen(len(ordinary))
    texts = [memorized[i] for i in first] + [ordinary[i] for i in second]
    config = context.settings.detect
    state = context.state("scores.safetensors", config.to_dict(), texts)
    bar = context.bar("nemo.detection")
    scores = context.nemo.detect(texts, None, "one step", config, bar, state, context.budget)
    values = torch.tensor([score.value for score in scores])
    positive, negative = values[: len(first)], values[len(first) :]
    figures = _figures(positive, negative, "")
    verbatim = positive[torch.tensor([labels[i] == VERBATIM for i in first])]
    if len(verbatim) > 1:
        figures |= _figures(verbatim, negative, ".vm")
    differs = [
        *context.subset_note(len(first), len(memorized), "memorized prompts"),
        *context.subset_note(len(second), len(ordinary), "other prompts"),
        *context.usual_notes("detect"),
    ]
    missing = (
        {} if len(verbatim) > 1 else {p.key: "fewer than two VM prompts among those measured" for p in PUBLISHED[3:]}
    )
    details = {"metric": scores[0].metric or probe_of(context.nemo, config=config).metric(latent_shape(context.nemo))}
    details |= {
        f"{name} scores": [round(float(q), 4) for q in v.quantile(torch.tensor([0.0, 0.5, 0.99, 1.0]))]
        for name, v in (("memorized", positive), ("other", negative))
    }
    return Measured(figures, tuple(differs), missing, details)


def _figures(positive: torch.Tensor, negative: torch.Tensor, ending: str) -> dict[str, Figure]:
    count = len(positive) + len(negative)
    right = torch.cat([positive > 0.5, negative <= 0.5]).float()
    whose = "VM prompts" if ending else "all prompts"
    values = {
        "auroc": (f"AUROC, {whose}", auroc(positive, negative), auroc_interval(positive, negative)),
        "tpr": (
            f"TPR at 1 % FPR, {whose}",
            true_positives(positive, negative, FPR),
            true_positives_interval(positive, negative, FPR),
        ),
        "accuracy": (
            f"accuracy at a score of 0.5, {whose}",
            float(right.mean()),
            share_interval(int(right.sum()), count),
        ),
    }
    return {
        f"nemo.{key}{ending}": Figure(what, round(value, 4), interval, count)
        for key, (what, value, interval) in values.items()
    }


CAPTIONS = Need(
    "captions.csv",
    "ordinary captions, 500 or more, for statistics of a model that has none published",
    "any list of captions, such as LAION's or COCO's",
    "of that list",
    ("captions.txt",),
    optional=True,
)
STATISTICS = Need(
    "statistics_additional_laion_prompts_v1_4.pt",
    "means and deviations of SD1.4's value neurons over 50,000 captions",
    f"{REPOSITORY}, statistics/",
    "MIT",
    ("calibration.safetensors", *CAPTIONS.names),
)
SEARCHES_AT_ONCE = 4
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
    for start in range(0, len(prompts), SEARCHES_AT_ONCE):
        part = slice(start, start + SEARCHES_AT_ONCE)
        if not all(path.is_file() for path in paths[part]):
            results = context.nemo.find(list(prompts[part]), Calibration(statistics), search, context.settings.probe)
            for path, result in zip(paths[part], results, strict=True):
                context.nemo.neurons(result).save(path)
        bar(min(start + SEARCHES_AT_ONCE, len(prompts)), len(prompts), None)
    return [NeuronSet.load(path) for path in paths], differs + notes


def statistics_mark(statistics: NeuronStatistics) -> str:
    """A sum over all means and deviations."""
    total = hashlib.sha256()
    for address in sorted(statistics.means):
        for values in (statistics.means[address], statistics.stds[address]):
            total.update(values.float().numpy().tobytes())
    return total.hexdigest()
