"""Find the neurons that memorize: score prompts, search the memorized ones in lockstep, judge the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..condition import Condition
from ..denoiser import Denoiser
from ..errors import refuse
from ..progress import Progress, silent
from .config import ProbeConfig, SearchConfig
from .neurons import NeuronSet, width_of
from .score import Probe, Request, Score, ddim_timestep, probe_noise
from .search import Found, Look, Searching, search
from .sites import text_only, value_activations, value_sites
from .statistics import NeuronStatistics

PUBLISHED_PROBE, PUBLISHED_SEARCH = ProbeConfig(), SearchConfig()
VERDICTS = ("not memorized", "cured", "reduced", "failed")


@dataclass(frozen=True)
class Result:
    """One prompt's outcome.

    Attributes:
        prompt: the text, for people.
        before: cross-seed score without blocking.
        found: the search's own report; None when the prompt is not memorized.
        after: cross-seed score with the found neurons blocked.
        forwards: network rows spent on this prompt.
    """

    prompt: str
    before: Score
    found: Found | None
    after: Score | None
    forwards: int

    @property
    def verdict(self) -> str:
        """``cured`` only if tau was reached *and* seeds no longer agree; a changed prediction alone is ``reduced``."""
        if self.found is None or self.after is None:
            return VERDICTS[0]
        if not self.found.exhausted and not self.after.memorized:
            return VERDICTS[1]
        return VERDICTS[2] if self.after.value < self.before.value and self.found.score < 0.99 else VERDICTS[3]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for NEURONS files and reports."""
        plain: dict[str, Any] = {"prompt": self.prompt, "verdict": self.verdict, "forwards": self.forwards}
        plain |= {"score_before": self.before.value, "seeds_kept": self.before.keep.nonzero().flatten().tolist()}
        if self.found and self.after:
            plain |= {"score_after": self.after.value, "search": self.found.to_dict()}
        return plain

    def neurons(self, fingerprint: str, settings: dict[str, Any]) -> NeuronSet:
        """As a set to block, with the report inside; empty when the prompt is not memorized."""
        kept = {a: tuple(n) for a, n in self.found.neurons.items()} if self.found else {}
        return NeuronSet(kept, fingerprint, self.to_dict() | {"settings": settings})


def make_probe(
    denoiser: Denoiser, scope: str = "down+mid", config: ProbeConfig = PUBLISHED_PROBE, rows: int = 80,
    empty: Condition | None = None,
) -> Probe:  # fmt: skip
    """A probe over the model's value sites at the configured timestep; ``empty`` is needed with guidance."""
    t = ddim_timestep(config.steps, config.timestep_index, denoiser.schedule.steps)
    return Probe(denoiser, value_sites(denoiser.backbone, scope), t, config, rows, empty)


@torch.no_grad()
def score_prompts(
    probe: Probe, conds: Sequence[Condition], shape: tuple[int, int, int], tau: float, progress: Progress = silent
) -> tuple[list[Score], list[torch.Tensor]]:
    """(scores, unblocked signals) of prompts given as conditions of one row; S rows each, in full batches."""
    noise = probe_noise(probe.config, shape).to(_device(conds))
    at_once = max(1, probe.rows // len(noise))
    scores: list[Score] = []
    plain: list[torch.Tensor] = []
    for i in range(0, len(conds), at_once):
        found = probe.signals([Request(c, noise, {}) for c in conds[i : i + at_once]])
        plain += found
        scores += [Score(probe.per_seed(s).cpu(), tau) for s in found]
        progress(min(i + at_once, len(conds)), len(conds), None)
    return scores, plain


@torch.no_grad()
def find_neurons(
    probe: Probe,
    prompts: Sequence[str],
    conds: Sequence[Condition],
    statistics: NeuronStatistics,
    shape: tuple[int, int, int],
    config: SearchConfig = PUBLISHED_SEARCH,
    progress: Progress = silent,
) -> list[Result]:
    """Search every memorized prompt among ``prompts``, all in lockstep.

    Args:
        conds: one condition of one row for each prompt.
        shape: (C, h, w) of the latents.

    Raises:
        VitrineError: numbers of prompts and conditions differ, or statistics of another model.
    """
    if len(prompts) != len(conds) or not prompts:
        raise refuse("prompts", (len(prompts), len(conds)), "one condition for each prompt", "encode each")
    noise = probe_noise(probe.config, shape).to(_device(conds))
    scores, plain = score_prompts(probe, conds, shape, config.tau)
    hits = [i for i, s in enumerate(scores) if s.memorized]
    kept = {i: scores[i].keep.to(noise.device) for i in hits}
    # Prompts that share batches need not guess ahead: each gets its part of the rows for that.
    levels = _levels(probe, conds, noise, plain, kept, replace(config, rows=max(1, config.rows // max(1, len(hits)))))
    tasks = {i: _task(probe, conds[i], noise[kept[i]], plain[i][kept[i]], statistics, levels[i]) for i in hits}
    found = lockstep(probe, tasks, progress)
    results = []
    for i, prompt in enumerate(prompts):
        after = None
        if i in found:
            (signals,) = probe.signals([Request(conds[i], noise, found[i].neurons)])
            after = Score(probe.per_seed(signals).cpu(), config.tau)
        spent = len(noise) * (1 + (i in found)) + (tasks[i].rows if i in tasks else 0)
        spent += len(noise[kept[i]]) if i in found and config.share is not None else 0
        results.append(Result(prompt, scores[i], found.get(i), after, spent))
    return results


def _levels(
    probe: Probe, conds: Sequence[Condition], noise: torch.Tensor, plain: list[torch.Tensor],
    kept: dict[int, torch.Tensor], config: SearchConfig,
) -> dict[int, SearchConfig]:  # fmt: skip
    """Each prompt's own stopping level, from what blocking everything in scope does to its prediction."""
    if config.share is None or not kept:
        return dict.fromkeys(kept, config)
    everything = {s.address: range(width_of(probe.denoiser.backbone, s)) for s in probe.sites}
    signals = probe.signals([Request(conds[i], noise[k], everything) for i, k in kept.items()])
    least = [float(probe.similarity(plain[i][k], s).max()) for (i, k), s in zip(kept.items(), signals, strict=True)]
    return {i: replace(config, tau_search=1 - config.share * (1 - s)) for i, s in zip(kept, least, strict=True)}


@dataclass
class Task:
    """One prompt's running search: what it looks at, and the rows it has cost."""

    cond: Condition
    noise: torch.Tensor
    plain: torch.Tensor
    searching: Searching
    rows: int = 0


def _task(
    probe: Probe, cond: Condition, noise: torch.Tensor, plain: torch.Tensor, statistics: NeuronStatistics,
    config: SearchConfig,
) -> Task:  # fmt: skip
    addresses = [s.address for s in probe.sites]
    latents = None if all(text_only(s) for s in probe.sites) else noise
    repeated = cond if latents is None else cond.take(torch.zeros(len(noise), dtype=torch.long))
    found = [a.mean(0) for a in value_activations(probe.denoiser, repeated, probe.sites, latents, probe.t)]
    z = [statistics.z(address, a) for address, a in zip(addresses, found, strict=True)]
    early = probe.config.data_range is not None
    return Task(cond, noise, plain, search(addresses, z, found, len(noise), config, early))


def lockstep(probe: Probe, tasks: dict[int, Task], progress: Progress = silent) -> dict[int, Found]:
    """Advance all searches together: each round runs every task's wanted looks as one batch."""
    found: dict[int, Found] = {}
    waiting: dict[int, list[Look]] = {}
    for key, task in tasks.items():
        _advance(key, task, None, waiting, found)
    while waiting:
        order = list(waiting)
        requests = [Request(tasks[k].cond, tasks[k].noise[s], blocked) for k in order for blocked, s in waiting[k]]
        signals = iter(probe.signals(requests))
        for key in order:
            task = tasks[key]
            looks = waiting.pop(key)
            task.rows += sum(len(s) for _, s in looks)
            answers = [probe.similarity(task.plain[s], next(signals)).cpu() for _, s in looks]
            _advance(key, task, answers, waiting, found)
        progress(len(found), len(tasks), None)
    return found


def _advance(
    key: int, task: Task, answers: list[torch.Tensor] | None, waiting: dict[int, list[Look]], found: dict[int, Found]
) -> None:
    try:
        waiting[key] = next(task.searching) if answers is None else task.searching.send(answers)
    except StopIteration as end:
        found[key] = end.value


def _device(conds: Sequence[Condition]) -> torch.device:
    text = conds[0].text
    return text.device if text is not None else torch.device("cpu")
