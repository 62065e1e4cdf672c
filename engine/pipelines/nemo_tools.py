"""The NEMO tools of a pipeline: score prompts, find the neurons that memorize, verify what blocking them did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..activations.picture_latents import to_pixels
from ..diffusion.noise import generators
from ..errors import refuse
from ..nemo import (
    Copies,
    NeuronSet,
    NeuronStatistics,
    ProbeConfig,
    Result,
    RunningStatistics,
    Score,
    SearchConfig,
    Verification,
    VerifyConfig,
    find_neurons,
    keep_scores,
    kept_scores,
    make_probe,
    picture_distance,
    score_prompts,
    threshold,
    value_activations,
    value_sites,
    verify,
)
from ..nemo.few_step_detection import FewStepSampler
from ..nemo.neuron_statistics import published_statistics
from ..nemo.noise_similarity import Probe, Request, probe_noise
from ..network.condition import Condition
from ..runtime.footprint import memory_bytes, rows_within
from ..runtime.processes import ALONE, Workers
from ..runtime.progress import Progress, silent
from ..tracing.fingerprint import active_fingerprint_of, fingerprint_of
from .adapter import Adapter
from .components import components_of
from .nemo_blocking import BlockedSampling
from .nemo_prompts import TOGETHER, UNUSED, one_each, text_of, texts_of
from .sample_detection import SampleDetection

_SHARE = 2
"""Share of a budget that one forward may take."""


class NEMOTools(BlockedSampling, SampleDetection):
    """What every form of :class:`~vitrine.engine.pipelines.NEMOPipeline` does."""

    def statistics(
        self, prompts: str | Iterable[str], scope: str = "down+mid", progress: Progress = silent,
        state: str | Path | None = None, memory: int | str | None = None, workers: Workers = ALONE,
    ) -> NeuronStatistics:  # fmt: skip
        """Mean and deviation of every value neuron over ordinary captions (500 or more; the paper took 50,000).

        Args:
            state: a file for the sums so far; the same call resumes from it, also after the process was killed.
            memory: budget in bytes or as "2GB" for what is needed beyond the models; it decides how many captions are
                encoded at once, 64 at most. None takes 64.
            workers: processes that share the captions, from :func:`~vitrine.engine.runtime.processes.launched`; each
                returns the whole, equal to what one process gives but for rounding.
        """
        texts, denoiser, sites = texts_of(prompts), self._denoiser(), value_sites(self._network, scope)
        own = texts[workers.index :: workers.count]
        with self._in_use(), self._run("statistics", texts, {"scope": scope}, state, workers) as run:
            running, model = RunningStatistics(s.address for s in sites), active_fingerprint_of(self._network)
            running.resume(run)

            def activations(batch: Condition) -> list[torch.Tensor]:
                return value_activations(denoiser, batch, sites, _blank(self._adapter, batch))

            def one() -> None:
                activations(next(self._encoded(texts[:1])))

            size = TOGETHER if memory is None else rows_within(memory_bytes(memory) // _SHARE, one, TOGETHER)
            for batch in self._encoded(own[running.count :], size):
                running.add(activations(batch))
                running.keep(run)
                progress(running.count, len(own), None)
            whole = RunningStatistics(running.addresses)
            whole.join(workers.gather(running))
            return whole.finish(model)

    def import_statistics(self, path: str | Path) -> NeuronStatistics:
        """The authors' published statistics of SD 1.4, from their ``.pt`` file; nothing is unpickled."""
        return published_statistics(path, self._network)

    def score(
        self, prompts: str | Iterable[str], tau: float | None = None, config: ProbeConfig | None = None,
        progress: Progress = silent, state: str | Path | None = None, memory: int | str | None = None,
        workers: Workers = ALONE,
    ) -> list[Score]:  # fmt: skip
        """The published score of each prompt: how alike the one-step predictions from different noises are.

        :meth:`detect` judges by samples.
        Prompts are encoded and scored some at a time, and only their scores are kept.

        Args:
            state: a file for the scores so far; the same call resumes from it, also after the process was killed.
            memory, workers: as in :meth:`statistics`; ``memory`` also decides how many rows go through the UNet at
                once, 80 at most.
        """
        probe, texts = self.probe("down+mid", config), texts_of(prompts)
        own = texts[workers.index :: workers.count]
        settings = {"settings": probe.config, "latents": list(self.latent_shape())}
        with self._in_use(), self._run("scores", texts, settings, state, workers) as run:
            scores = kept_scores(run, tau)
            done, size = len(scores), max(1, TOGETHER // probe.at_once) * probe.at_once
            if memory is not None and done < len(own):
                probe.rows, size = self._fitting(probe, texts[:1], memory_bytes(memory) // _SHARE)

            def after(step: int, total: int, preview: torch.Tensor | None = None) -> None:
                progress(len(scores) + step, len(own), preview)

            for batch in self._encoded(own[done:], size):
                conds = one_each(batch)
                scores += score_prompts(probe, conds, self.latent_shape(), tau, after)[0]
                keep_scores(run, scores)
        parts = workers.gather(scores)
        return [parts[i % workers.count][i // workers.count] for i in range(len(texts))]

    def _fitting(self, probe: Probe, texts: list[str], budget: int) -> tuple[int, int]:
        """How many rows fit through the UNet at once, and how many prompts through the text encoder."""
        (cond,) = self._encoded(texts)
        noise = probe_noise(probe.config, self.latent_shape())[:1].to(text_of(cond))
        rows = rows_within(budget, lambda: probe.signals([Request(cond, noise, {})]), probe.rows)
        # signals and text states of the prompts that are encoded together wait for each other
        each = probe.config.seeds * noise.nbytes + 2 * text_of(cond).nbytes
        most = max(1, min(TOGETHER, budget // 4 // each))
        return rows, rows_within(budget, lambda: next(self._encoded(texts)), most)

    def calibrate(self, prompts: str | Iterable[str], config: ProbeConfig | None = None) -> float:
        """tau = mean + one deviation of the scores of ordinary captions, under the settings detection will use."""
        return threshold([s.value for s in self.score(prompts, 1.0, config)])[0]

    def find(
        self,
        prompts: str | Iterable[str],
        statistics: NeuronStatistics,
        config: SearchConfig | None = None,
        probe: ProbeConfig | None = None,
        scope: str = "down+mid",
        progress: Progress = silent,
        sampler: FewStepSampler | None = None,
    ) -> list[Result]:
        """Search every prompt, all in lockstep; under ``protocol="nemo"`` only those above tau, as published.

        Args:
            sampler: from :meth:`sampler`; few-step samples before and after then judge what blocking did.
        """
        statistics.check(self._network)
        texts, config = texts_of(prompts), config or SearchConfig()
        prober = self.probe(scope, probe, config.rows)
        with self._in_use():
            conds = [row for batch in self._encoded(texts) for row in one_each(batch)]
            return find_neurons(prober, texts, conds, statistics, self.latent_shape(), config, progress, sampler)

    def search_inputs(self, statistics: NeuronStatistics) -> dict[str, object]:
        """What a search depends on besides its settings and the prompt, for a :class:`~vitrine.engine.jobs.run.Run`."""
        return {**components_of(self, UNUSED), "statistics": statistics, "size": self.predicted_size}

    def neurons(self, result: Result) -> NeuronSet:
        """A result as a set to block or to save, which only this model accepts."""
        return result.neurons(fingerprint_of(self._network))

    def verify(
        self,
        prompt: str,
        neurons: NeuronSet,
        tau: float,
        picture: Any = None,
        probe: ProbeConfig | None = None,
        seed: int = 101,
        progress: Progress = silent,
    ) -> Verification:
        """Score blocked neurons on other seeds and, with ``picture``, under an optimised embedding.

        Args:
            picture: the memorized one, or an unblocked sample: PIL, array (H, W, 3), or tensor (1, 3, H, W) in [0, 1].
        """
        prober = self.probe("all", probe)
        with self._in_use():
            (cond,), reference = self._encoded([prompt]), None
            if picture is not None:
                reference = self.latents(picture)
            config = VerifyConfig(tau, seed)
            return verify(prober, cond, neurons, self.latent_shape(), config, reference=reference, progress=progress)

    def copies(
        self, prompt: str, neurons: NeuronSet, picture: Any, ordinary: Sequence[str],
        seeds: Sequence[int] = range(1000, 1010), **sampling: Any,
    ) -> Copies:  # fmt: skip
        """Sample the prompt with and without the neurons, and judge each sample by its distance to the picture.

        Args:
            picture: the memorized one: PIL, array (H, W, 3), or tensor (1, 3, H, W) in [0, 1].
            ordinary: captions that have nothing to do with it; their samples say which distance is usual.
            seeds: of the samples; take none that the search has seen.
            sampling: as in a call: num_inference_steps, guidance_scale, height, width ...
        """
        if not seeds or not ordinary:
            raise refuse(
                "seeds, ordinary", (len(seeds), len(ordinary)), "one at least of both", "ten of each are usual"
            )
        wanted = (to_pixels(picture, None, self._adapter.factor) + 1) / 2

        def distances(prompts: Sequence[str], own: Sequence[int], blocked: NeuronSet | None = None) -> torch.Tensor:
            rows = zip(prompts, generators(own), strict=True)
            pictures = [self(p, generator=g, neurons=blocked, output_type="pt", **sampling).images for p, g in rows]
            return picture_distance(torch.cat(pictures).cpu(), wanted)

        same = [prompt] * len(seeds)
        usual = distances(ordinary, range(len(ordinary)))
        return Copies(distances(same, seeds), distances(same, seeds, neurons), usual)

    def probe(self, scope: str = "down+mid", config: ProbeConfig | None = None, rows: int = 80) -> Probe:
        """What scores and searches ask the network with; it holds the empty prompt where guidance needs it."""
        self.latent_shape()  # refuses what cannot be probed
        config, empty = config or ProbeConfig(), None
        if config.guidance:
            with self._in_use():
                (empty,) = self._encoded([""])
        return make_probe(self._denoiser(), scope, config, rows, empty)


def _blank(adapter: Adapter, cond: Condition) -> torch.Tensor:
    """The same noise for every caption, as the node samples it: values depend on it little, of UNets not at all."""
    noise = torch.randn(1, adapter.channels, 16, 16, generator=torch.Generator().manual_seed(1))
    return noise.expand(cond.count, -1, -1, -1).to(adapter.device)
