"""Find the neurons that memorize: score prompts, search them in lockstep, judge the outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..diffusion.denoiser import Denoiser
from ..errors import refuse
from ..io.number_checks import refuse_unless_finite
from ..network.condition import Condition
from ..runtime.progress import Progress, silent
from ..settings.nemo_options import ProbeConfig, SearchConfig, check_tau
from ..settings.one_line import one_line
from ..tracing.fingerprint import width_of
from .dose import DoseCurve
from .escalation import escalate
from .few_step_detection import Agreement, FewStepSampler, sample_agreement
from .neuron_effects import NeuronStats, holdings
from .neuron_statistics import NeuronStatistics
from .neurons import NeuronSet
from .noise_similarity import Neurons, Probe, Request, Score, ddim_timestep, probe_noise
from .search import Outcome, Round, Search, search
from .sites import each_value, text_only, value_sites

SEARCH_PART, DOSES = 0.5, 2.0
"""Of a progress bar: the search's, the rest is the doses'; and of the search's evaluations, how many doses may take."""
PUBLISHED_PROBE, PUBLISHED_SEARCH = ProbeConfig(), SearchConfig()


@one_line
@dataclass(frozen=True)
class Result:
    """One prompt's outcome.

    Attributes:
        prompt: the text, for people.
        before: cross-seed score without blocking.
        search: what the search ended with; None where ``protocol="nemo"`` left a prompt below tau out.
        after: cross-seed score with its neurons blocked.
        forwards: network rows spent on this prompt.
        settings: of the probe and the search, as :func:`settings_of` gives them.
        held: what each neuron encodes, see :func:`~vitrine.engine.nemo.neuron_effects.holdings`.
        samples: agreement of few-step samples without blocking and with it, where a sampler judged the search.
        curve: the doses that were tried, where samples decided which is taken.
    """

    prompt: str
    before: Score
    search: Outcome | None
    after: Score | None
    forwards: int
    settings: dict[str, Any] = field(default_factory=dict)
    held: list[dict[str, Any]] = field(default_factory=list)
    samples: tuple[Agreement, Agreement] | None = None
    curve: DoseCurve | None = None

    @property
    def verdict(self) -> str:
        """``cured``, ``reduced``, ``not cured`` or ``not memorized``, of samples at the chosen dose.

        Where there was no escalation, ``changed``, ``reduced`` or ``failed``, or ``no verdict`` where no threshold was
        measured: ``changed`` only if the search reached its stop *and* seeds that agreed no longer do; either alone is
        ``reduced``, since whole samples may end in the picture all the same. Whether full samples are still copies is
        another question, for :class:`~vitrine.engine.nemo.blocked_copies.Copies`.
        """
        if self.curve is not None:
            return self.curve.verdict
        if self.search is None or self.after is None:
            return "not memorized"
        if self.samples is not None and self.samples[0].threshold is not None:
            before, after = self.samples
            if not before.memorized:
                return "not memorized"
            if not after.memorized and not self.search.exhausted:
                return "changed"
            return "reduced" if after.distance > before.distance else "failed"
        if self.after.tau is None:
            return "no verdict"
        if not self.search.exhausted and not self.after.memorized:
            return "changed"
        return "reduced" if self.after.value < self.before.value and self.search.score < 0.99 else "failed"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for NEURONS files."""
        plain: dict[str, Any] = {"prompt": self.prompt, "verdict": self.verdict, "forwards": self.forwards}
        plain |= {"metric": self.before.metric, "settings": self.settings}
        plain |= {"score_before": self.before.value}
        if self.before.tau is not None:
            plain |= {"seeds_kept": self.before.keep.nonzero().flatten().tolist()}
        if self.search and self.after:
            plain |= {"score_after": self.after.value, "search": self.search.to_dict(), "held": self.held}
        if self.samples is not None:
            plain |= {"samples_before": self.samples[0].to_dict(), "samples_after": self.samples[1].to_dict()}
        if self.curve is not None:
            plain |= {"doses": self.curve.to_dict()}
        return plain

    def with_words(self, words: Sequence[str]) -> Result:
        """The same with each record's "words" at its "tokens"; ``words`` are those at all positions, or none."""
        named = [r | {"words": [words[at] for at, _ in r["tokens"] if at < len(words)]} for r in self.held]
        return replace(self, held=named) if words else self

    def neurons(self, fingerprint: str) -> NeuronSet:
        """As a set to block, with this result in its ``info``; empty when the prompt is not memorized."""
        neurons: Neurons = self.search.neurons if self.search else {}
        factor = 0.0
        if self.curve is not None:
            neurons, factor = self.curve.chosen.dose.neurons, self.curve.chosen.dose.factor
        return NeuronSet({a: tuple(n) for a, n in neurons.items()}, fingerprint, self.to_dict(), factor)


def settings_of(probe: Probe, config: SearchConfig) -> dict[str, Any]:
    """Plain values of everything that decides a search's result but the model and the statistics."""
    return {
        "probe": _as_mode_compares(probe, config).config.to_dict(),
        "search": config.to_dict(),
        "sites": [site.address for site in probe.sites],
    }


def _as_mode_compares(probe: Probe, config: SearchConfig) -> Probe:
    """With the official similarity for a search of mode ``parity``."""
    return replace(probe, config=replace(probe.config, range_of_batch=True)) if config.mode == "parity" else probe


def make_probe(
    denoiser: Denoiser,
    scope: str = "down+mid",
    config: ProbeConfig = PUBLISHED_PROBE,
    rows: int = 80,
    empty: Condition | None = None,
) -> Probe:
    """A probe of the model's value sites at the configured timestep; guidance needs ``empty``, the null condition."""
    t = ddim_timestep(config.steps, config.timestep_index, denoiser.schedule.steps)
    return Probe(denoiser, value_sites(denoiser.backbone, scope), t, config, rows, empty)


@torch.no_grad()
def score_prompts(
    probe: Probe,
    conds: Sequence[Condition],
    shape: tuple[int, int, int],
    tau: float | None,
    progress: Progress = silent,
) -> tuple[list[Score], list[torch.Tensor]]:
    """(scores, unblocked signals (S, C, h, w)) of prompts, from a condition of one row each, in full batches.

    Args:
        shape: (C, h, w) of the latents.
        tau: the threshold of the scores, 0..1; None where it has not been calibrated.
    """
    refuse_unless_finite("tau", tau)
    noise = probe_noise(probe.config, shape).to(conds[0].device)
    at_once, metric = probe.at_once, probe.metric(shape)
    scores: list[Score] = []
    unblocked: list[torch.Tensor] = []
    for i in range(0, len(conds), at_once):
        signals = probe.signals([Request(c, noise, {}) for c in conds[i : i + at_once]])
        unblocked += signals
        per_seed = torch.stack([probe.per_seed(s) for s in signals]).cpu()  # one wait for all of them
        scores += [Score(values, tau, metric) for values in per_seed]
        progress(min(i + at_once, len(conds)), len(conds), None)
    return scores, unblocked


@torch.no_grad()
def find_neurons(
    probe: Probe,
    prompts: Sequence[str],
    conds: Sequence[Condition],
    statistics: NeuronStatistics,
    shape: tuple[int, int, int],
    config: SearchConfig = PUBLISHED_SEARCH,
    progress: Progress = silent,
    sampler: FewStepSampler | None = None,
) -> list[Result]:
    """Search every prompt, or under ``protocol="nemo"`` every memorized one, all in lockstep.

    A search that exhausts its candidates begins again in the layers of scope ``all``, where the statistics are of these
    (but not under ``protocol="nemo"``): a picture in a usual pose comes back from the up blocks alone.

    Args:
        conds: one condition of one row for each prompt.
        shape: (C, h, w) of the latents.
        sampler: samples each prompt in a few steps; where it has a threshold, these decide at which dose neurons are
            blocked, see :mod:`vitrine.engine.nemo.dose` (but not under ``protocol="nemo"``), at up to twice the
            search's evaluations. None leaves the verdict to the one-step predictions.
    """
    if len(prompts) != len(conds) or not prompts:
        raise refuse("prompts", (len(prompts), len(conds)), "one condition for each prompt", "encode each")
    if config.published:
        check_tau(config.tau)
    probe, escalating = _as_mode_compares(probe, config), None
    sites = value_sites(probe.denoiser.backbone, "all")
    wider = len(sites) > len(probe.sites) and all(site.address in statistics.means for site in sites)
    wider = wider and not config.published
    if sampler is not None and sampler.threshold is not None and not config.published:
        escalating, sampler = sampler, None
    end = 1.0 if escalating is None else SEARCH_PART
    middle = end / 2 if wider else end
    first = _part(progress, 0, middle)
    results = _found(probe, prompts, conds, statistics, shape, config, first, sampler)
    again = [i for i, result in enumerate(results) if result.search is not None and result.search.exhausted]
    if again and wider:
        texts, rows = [prompts[i] for i in again], [conds[i] for i in again]
        probe, second = replace(probe, sites=sites), _part(progress, middle, end)
        whole = _found(probe, texts, rows, statistics, shape, config, second, sampler)
        for i, result in zip(again, whole, strict=True):
            results[i] = replace(result, forwards=result.forwards + results[i].forwards)
    if escalating is not None:
        part = _part(progress, SEARCH_PART, 1)
        results = _dosed(probe, escalating, conds, results, shape, config.sample_steps, part)
    return results


def _part(progress: Progress, start: float, end: float) -> Progress:
    """Reports a part of a longer job."""

    def after(step: int, total: int, preview: torch.Tensor | None = None) -> None:
        progress(round(1000 * (start + (end - start) * step / max(1, total))), 1000, preview)

    return after


def _dosed(
    probe: Probe,
    sampler: FewStepSampler,
    conds: Sequence[Condition],
    results: Sequence[Result],
    shape: tuple[int, int, int],
    steps: int,
    progress: Progress,
) -> list[Result]:
    """The results with the dose at which samples no longer agree, and the score of predictions at that dose."""
    noise, dosed = probe_noise(probe.config, shape).to(conds[0].device), list(results)
    outcomes = {i: (result.search, result.held) for i, result in enumerate(results) if result.search is not None}
    most_rows = [round(DOSES * (results[i].forwards - len(noise))) for i in outcomes]
    searched = [conds[i] for i in outcomes]
    curves = escalate(sampler, searched, list(outcomes.values()), shape, steps, most_rows, progress)
    every = replace(probe, sites=list(sampler.sites))
    for i, curve in zip(outcomes, curves, strict=True):
        dose = curve.chosen.dose
        (signals,) = every.signals([Request(conds[i], noise, dose.neurons, dose.factor)])
        after = replace(results[i].before, per_seed=probe.per_seed(signals).cpu())
        spent = results[i].forwards + curve.rows + len(noise)
        dosed[i] = replace(results[i], after=after, samples=curve.samples, curve=curve, forwards=spent)
    return dosed


def _found(
    probe: Probe,
    prompts: Sequence[str],
    conds: Sequence[Condition],
    statistics: NeuronStatistics,
    shape: tuple[int, int, int],
    config: SearchConfig,
    progress: Progress,
    sampler: FewStepSampler | None,
) -> list[Result]:
    """One search of each prompt in the probe's layers."""
    noise = probe_noise(probe.config, shape).to(conds[0].device)
    scores, unblocked = score_prompts(probe, conds, shape, config.tau)
    searched: dict[int, _Searched] = {}
    for i, score in enumerate(scores):
        rows = score.keep.to(noise.device) if config.published else torch.ones(len(noise), dtype=torch.bool)
        if bool(rows.any()):
            searched[i] = _Searched(conds[i], noise[rows], unblocked[i][rows])
    # Prompts that share batches need not guess ahead: each gets its part of the rows for that.
    smaller = replace(config, rows=max(1, config.rows // max(1, len(searched))))
    stops = _stops(probe, searched, config)
    tasks = {i: _task(probe, prompt, statistics, smaller, stops[i]) for i, prompt in searched.items()}
    outcomes, settings = lockstep(probe, tasks, progress), settings_of(probe, config)
    judged, results = _judged(sampler, searched, outcomes, shape), []
    for i, prompt in enumerate(prompts):
        outcome, after, spent, held = outcomes.get(i), None, len(noise), []
        if outcome is not None:
            held = holdings(outcome, tasks[i].seen, tasks[i].z, statistics)
            (signals,) = probe.signals([Request(conds[i], noise, outcome.neurons)])
            after = Score(probe.per_seed(signals).cpu(), config.tau, probe.metric(shape))
            spent += len(noise) + tasks[i].rows + (0 if config.published else len(tasks[i].noise))
            spent += sum(agreement.rows for agreement in judged.get(i, ()))
        results.append(Result(prompt, scores[i], outcome, after, spent, settings, held, judged.get(i)))
    return results


def _judged(
    sampler: FewStepSampler | None,
    searched: Mapping[int, _Searched],
    outcomes: Mapping[int, Outcome],
    shape: tuple[int, int, int],
) -> dict[int, tuple[Agreement, Agreement]]:
    """Agreement of each searched prompt's samples, without blocking and with it."""
    if sampler is None or not searched:
        return {}
    conds = [prompt.cond for prompt in searched.values()]
    before = sample_agreement(sampler, conds, shape)
    after = sample_agreement(sampler, conds, shape, blocked=[outcomes[i].neurons for i in searched])
    return dict(zip(searched, zip(before, after, strict=True), strict=True))


@dataclass(frozen=True)
class _Searched:
    """A prompt to search: its condition (one row), noises and unblocked signals of its seeds, (s, C, h, w)."""

    cond: Condition
    noise: torch.Tensor
    unblocked: torch.Tensor


def _stops(probe: Probe, prompts: Mapping[int, _Searched], config: SearchConfig) -> dict[int, float]:
    """The similarity that ends each search: tau, or what blocking everything in scope leaves of the prediction."""
    if config.published:
        return dict.fromkeys(prompts, check_tau(config.tau))
    everything = {s.address: range(width_of(probe.denoiser.backbone, s)) for s in probe.sites}
    signals = probe.signals([Request(p.cond, p.noise, everything) for p in prompts.values()])
    pairs = zip(prompts.values(), signals, strict=True)
    least = torch.stack([probe.similarity(prompt.unblocked, signal).max() for prompt, signal in pairs]).tolist()
    return {i: 1 - config.effect_fraction * (1 - s) for i, s in zip(prompts, least, strict=True)}


@dataclass
class Task:
    """One prompt's running search, and the network rows it has cost.

    Attributes:
        cond: the prompt, one row.
        noise, unblocked: noises of the kept seeds, and their signals with nothing blocked, (s, C, h, w).
        search: the search itself, begun or not.
        seen, z: address -> what the prompt does to the site's neurons, and their |z|.
        rows: network rows so far.
    """

    cond: Condition
    noise: torch.Tensor
    unblocked: torch.Tensor
    search: Search
    seen: Mapping[str, NeuronStats] = field(default_factory=dict)
    z: Mapping[str, torch.Tensor] = field(default_factory=dict)
    rows: int = 0


def _task(probe: Probe, prompt: _Searched, statistics: NeuronStatistics, config: SearchConfig, stop: float) -> Task:
    """A search that is ready to begin, with its activations and z-scores averaged over noises where they need any."""
    addresses, cond, latents = [s.address for s in probe.sites], prompt.cond, None
    if not all(text_only(s) for s in probe.sites):
        latents = prompt.noise
        cond = cond.take(torch.zeros(len(latents), dtype=torch.long))
    elif probe.denoiser.made_of is not None:  # values come from a forward there, and are those of any noise
        latents = prompt.noise[:1]
    values = each_value(probe.denoiser, cond, probe.sites, NeuronStats.of, latents, probe.t)
    activations = [seen.activations for seen in values]
    activations = list(torch.cat(activations).cpu().split([len(a) for a in activations]))  # the search reads them
    z = [statistics.z(address, a) for address, a in zip(addresses, activations, strict=True)]
    early = not probe.config.range_of_batch
    searching = search(addresses, z, activations, len(prompt.noise), config, stop, early)
    seen, deviations = dict(zip(addresses, values, strict=True)), dict(zip(addresses, z, strict=True))
    return Task(prompt.cond, prompt.noise, prompt.unblocked, searching, seen, deviations)


def lockstep(probe: Probe, tasks: Mapping[int, Task], progress: Progress = silent) -> dict[int, Outcome]:
    """Advance all searches together: each round runs the trials that every task waits for as one batch.

    ``progress`` counts hundredths of each search.
    """
    outcomes: dict[int, Outcome] = {}
    rounds: dict[int, Round] = {}

    def advance(key: int) -> None:
        try:
            rounds[key] = next(tasks[key].search)
        except StopIteration as end:
            outcomes[key] = end.value

    for key in tasks:
        advance(key)
    while rounds:
        waiting = list(rounds.items())
        rounds.clear()
        pairs = [(tasks[key], trial) for key, asked in waiting for trial in asked.trials]
        requests = [Request(task.cond, task.noise[seeds], blocked) for task, (blocked, seeds) in pairs]
        signals = iter(probe.signals(requests))
        similar = [probe.similarity(task.unblocked[seeds], next(signals)) for task, (_, seeds) in pairs]
        on_cpu = iter(torch.cat(similar).cpu().split([len(s) for s in similar]))  # one wait for all trials
        for key, asked in waiting:
            tasks[key].rows += sum(len(seeds) for _, seeds in asked.trials)
            asked.similarities = [next(on_cpu) for _ in asked.trials]
            advance(key)
        decided = len(outcomes) + sum(asked.decided for asked in rounds.values())
        progress(int(100 * decided), 100 * len(tasks), None)
    return outcomes
