"""NeMo's blocking: similarity of samples to the training picture before, after, and with random neurons blocked."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...engine.nemo import NeuronSet
from ..intervals import mean_interval, median_interval
from ..nemo.baselines import random_neurons
from .context import SETTINGS, Context
from .judge import CLIP, SSCD, Judge, judge_of
from .nemo import CAPTIONS, MEMORIZED, ORDINARY, PAPER, ROWS_OF_A_SEARCH, SD14, STATISTICS, neurons_of, verbatim_rows
from .protocol import check
from .records import Estimate, Figure, Measured, Published
from .samples import ORIGINALS, Samples, originals

READS = ("probe", "search", "seeds", "first_seed", "usual", "steps", "guidance", "size", "call", "scheduler")
"""Settings that affect the figures."""
REMEDIES = ("untouched", "blocked", "random")
WORDS = {
    "untouched": "nothing blocked",
    "blocked": "NeMo's neurons blocked",
    "random": "as many random neurons blocked",
}
NEEDS = (MEMORIZED, STATISTICS, ORIGINALS, SSCD, CLIP, CAPTIONS, replace(ORDINARY, optional=True), SETTINGS)
_DATA = "112 VM prompts"
_NOTE = (
    "The paper does not say whether its similarity to the training picture is the median or the largest over the ten "
    "samples; the median is taken here."
)
_TABLE = (
    ("sscd.orig.untouched", "SSCD to the training picture, nothing blocked", 0.83, 0.16),
    ("sscd.orig.blocked", "SSCD to the training picture, NeMo's neurons blocked", 0.09, 0.06),
    ("sscd.orig.random", "SSCD to the training picture, as many random neurons blocked", 0.80, 0.11),
    ("sscd.gen.blocked", "SSCD to the same seed's unblocked sample, NeMo's neurons blocked", 0.10, 0.07),
    ("sscd.gen.random", "SSCD to the same seed's unblocked sample, random neurons blocked", 0.999, None),
    ("neurons", "neurons blocked for a prompt", 4.0, 3.0),
    ("clip.untouched", "prompt alignment (CLIP), nothing blocked", 0.32, 0.02),
    ("clip.blocked", "prompt alignment (CLIP), NeMo's neurons blocked", 0.31, 0.02),
)
PUBLISHED = tuple(
    Published(f"blocking.{key}", figure, value, spread, SD14, _DATA, "NeMo, Table 1", _NOTE if "orig" in key else "")
    for key, figure, value, spread in _TABLE
)


def prepare(context: Context) -> Estimate:
    """A search for each prompt, and its samples under three treatments."""
    settings, pace = context.settings, context.pace
    count = len(verbatim_rows(context)[0]) if context.path(MEMORIZED) else len(context.chosen(112))
    pictures = count * len(REMEDIES) * settings.seeds + settings.usual
    return pace.sampling(
        count * ROWS_OF_A_SEARCH,
        pictures,
        settings.steps,
        context.budget,
        (f"{count} prompts: about {ROWS_OF_A_SEARCH} evaluations a search, {len(REMEDIES)} x {settings.seeds} samples"),
    )


@check("nemo.blocking", paper=PAPER, families=("SD", "SDXL", "Flux"), needs=NEEDS, published=PUBLISHED, prepare=prepare)
def blocking(context: Context) -> Measured:
    """Searches, samples, and the descriptor's similarities."""
    judge = judge_of(context)
    usual = usual_samples(context, judge)  # first: it raises without captions
    rows, prompts, whole = verbatim_rows(context)
    sets, differs = neurons_of(context, prompts)
    described = {name: samples.all() for name, samples in remedies(context, judge, prompts, sets).items()}
    pictures = originals(context, rows)
    figures: dict[str, Figure] = {}
    references = {i: judge.describe(pictures[row]) for i, row in enumerate(rows) if row in pictures}
    details: dict[str, Any] = {"judge": judge.name, "a copy is above": round(judge.level, 4)}
    for name, (samples, _) in described.items():
        if references:
            table = torch.stack([judge.similarity(samples[i], r, usual) for i, r in references.items()])
            what = f"{judge.name}, to the training picture, {WORDS[name]}"
            figures[f"blocking.{judge.key}.orig.{name}"] = median_figure(what, table.median(1).values)
            figures[f"blocking.{judge.key}.copies.{name}"] = _share(judge, table, WORDS[name])
        if name != "untouched":
            pairs = zip(samples, described["untouched"][0], strict=True)
            table = torch.stack([judge.similarity(s, u, usual) for s, u in pairs])
            what = f"{judge.name}, to the same seed's unblocked sample, {WORDS[name]}"
            figures[f"blocking.{judge.key}.gen.{name}"] = median_figure(what, table.median(1).values)
    if judge.texts is not None:
        figures |= _alignment(judge.texts(prompts).float(), {n: d[1] for n, d in described.items()})
    counts = torch.tensor([float(len(s)) for s in sets])
    figures["blocking.neurons"] = median_figure("neurons blocked for a prompt", counts)
    verdicts = [str(s.info.get("verdict")) for s in sets]
    details["verdicts of the search"] = {v: verdicts.count(v) for v in sorted(set(verdicts))}
    differs = [*context.subset_note(len(rows), whole, "VM prompts"), *differs, *context.usual_notes(*READS)]
    differs.append("every sample has a separate seed; the authors take ten from one generator")
    if len(pictures) < len(rows):
        differs.append(f"{len(rows) - len(pictures)} of {len(rows)} prompts without a readable training picture")
    return Measured(figures, tuple(differs), _missing(figures, judge, pictures), details)


def remedies(context: Context, judge: Judge, prompts: list[str], sets: list[NeuronSet]) -> dict[str, Samples]:
    """Samples of the prompts under each treatment."""
    random = [random_neurons(context.network, s) for s in sets]
    none = [NeuronSet({})] * len(sets)
    made = {}
    for name, each in zip(REMEDIES, (none, sets, random), strict=True):
        facts = [sorted((a, list(n)) for a, n in s.neurons.items()) for s in each]
        made[name] = Samples(context, judge, prompts, name, facts, partial(_blocked, each))
    return made


def _blocked(sets: list[NeuronSet], row: int) -> dict[str, Any]:
    """Arguments of a call that samples a prompt with its neurons blocked."""
    return {"neurons": sets[row]}


def usual_samples(context: Context, judge: Judge) -> torch.Tensor:
    """(R, D) of samples of ordinary captions, the scale of distances; empty if the descriptor needs none."""
    if not judge.usual:
        return torch.zeros(0, 1)
    need = CAPTIONS if context.path(CAPTIONS) is not None else ORDINARY
    captions = context.prompts(need)[0][: context.settings.usual]
    return Samples(context, judge, captions, "usual", seeds=[1]).all()[0].flatten(0, 1)


def _alignment(texts: torch.Tensor, images: dict[str, torch.Tensor]) -> dict[str, Figure]:
    """Cosines of prompts and samples in CLIP's space."""
    return {
        f"blocking.clip.{name}": median_figure(
            f"prompt alignment (CLIP), {WORDS[name]}",
            torch.cosine_similarity(each, texts[:, None], dim=-1).median(1).values,
        )
        for name, each in images.items()
    }


def median_figure(what: str, values: torch.Tensor) -> Figure:
    """Median and median absolute deviation of (N,) values over prompts, as in the paper."""
    middle = values.median()
    spread = round(float((values - middle).abs().median()), 4)
    return Figure(what, round(float(middle), 4), median_interval(values), len(values), spread)


def _share(judge: Judge, table: torch.Tensor, words: str) -> Figure:
    """Fraction of samples that are copies; its interval is a bootstrap over prompts."""
    fractions = (table > judge.level).float().mean(1)
    what = f"fraction of samples that copy the training picture ({judge.key}), {words}"
    return Figure(what, round(float(fractions.mean()), 4), mean_interval(fractions), len(fractions))


def _missing(figures: dict[str, Figure], judge: Judge, pictures: dict[int, torch.Tensor]) -> dict[str, str]:
    """The reason why a published figure has no measured one."""
    reasons = {}
    for published in PUBLISHED:
        if published.key in figures:
            continue
        if ".clip." in published.key:
            reasons[published.key] = f"needs {CLIP.short}"
        elif judge.key != "sscd":
            reasons[published.key] = f"needs {SSCD.short}"
        elif not pictures:
            reasons[published.key] = f"needs {ORIGINALS.short}"
    return reasons
