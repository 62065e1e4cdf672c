"""Detection by few-step samples, for NEMO's pipelines: which prompts are memorized, and what is usual."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import refuse
from ..nemo import Agreement, FewStepConfig, SampleThreshold, sample_agreement, value_sites
from ..nemo.few_step_detection import FewStepSampler
from ..nemo.partial_scores import UsualSamples, keep_agreements, kept_agreements
from ..network.condition import Condition
from ..runtime.processes import ALONE, Workers
from ..runtime.progress import Progress, silent
from ..tracing.fingerprint import fingerprint_of
from .nemo_prompts import PromptJobs, one_each, texts_of


class SampleDetection(PromptJobs):
    """The part of :class:`~vitrine.engine.pipelines.NEMOPipeline` that judges a prompt by its samples."""

    def detect(
        self, prompts: str | Iterable[str], threshold: SampleThreshold | None = None,
        config: FewStepConfig | None = None, progress: Progress = silent, state: str | Path | None = None,
        workers: Workers = ALONE, keep: bool = False,
    ) -> list[Agreement]:  # fmt: skip
        """Whether a few samples of each prompt, from different seeds, show one picture.

        The published score of one-step predictions is ``score``.

        Args:
            threshold: measured on this model by :meth:`calibrate_samples`; without it there is no verdict.
            config: how they are sampled; None takes the threshold's own settings, or the defaults.
            state: a file for the results so far; the same call resumes from it, also after the process was killed.
            workers: processes that share the prompts, as in ``statistics``.
            keep: the samples too, from which the map of where they agree is made.
        """
        if keep and (state is not None or workers.count > 1):
            raise refuse("keep", True, "False with a state or several processes", "detect again what is memorized")
        sampler = self.sampler(config, threshold)
        texts = texts_of(prompts)
        own = texts[workers.index :: workers.count]
        settings = {"settings": sampler.config, "threshold": threshold, "latents": list(self.latent_shape())}
        with self._in_use(), self._run("samples", texts, settings, state, workers) as run:
            agreements = kept_agreements(run, sampler.config, threshold)
            done = len(agreements)

            def after(step: int, total: int, preview: Any = None) -> None:
                progress(len(agreements) + step, len(own), preview)

            for batch in self._encoded(own[done:]):
                agreements += sample_agreement(sampler, one_each(batch), self.latent_shape(), after, keep=keep)
                keep_agreements(run, agreements)
        parts = workers.gather(agreements)
        return [parts[i % workers.count][i // workers.count] for i in range(len(texts))]

    def calibrate_samples(
        self, prompts: str | Iterable[str], config: FewStepConfig | None = None, progress: Progress = silent,
        state: str | Path | None = None, workers: Workers = ALONE,
    ) -> SampleThreshold:  # fmt: skip
        """What is usual for ordinary captions, 300 or more, under the settings that detection will use.

        Args:
            state, workers: as in :meth:`detect`.
        """
        sampler = self.sampler(config)
        texts = texts_of(prompts)
        own = texts[workers.index :: workers.count]
        settings = {"settings": sampler.config, "latents": list(self.latent_shape())}
        with self._in_use(), self._run("usual samples", texts, settings, state, workers) as run:
            usual = UsualSamples.resumed(run)
            for batch in self._encoded(own[len(usual.distances) :], sampler.at_once):
                usual.add(sample_agreement(sampler, one_each(batch), self.latent_shape()))
                usual.keep(run)
                progress(len(usual.distances), len(own), None)
        whole = UsualSamples.joined(workers.gather(usual))
        return whole.threshold(sampler.config, fingerprint_of(self._network))

    def sampler(
        self, config: FewStepConfig | None = None, threshold: SampleThreshold | None = None, rows: int = 80
    ) -> FewStepSampler:
        """What :meth:`detect` samples with; pass it to ``find``, and samples judge the search."""
        self.latent_shape()  # refuses what cannot be sampled here
        if threshold is not None:
            threshold.check(fingerprint_of(self._network))
        used = config or (FewStepConfig() if threshold is None else threshold.config)
        empty: Condition | None = None
        if used.guidance != 1:
            with self._in_use():
                (empty,) = self._encoded([""])
        sites = value_sites(self._network, "all")
        return FewStepSampler(self._denoiser(), used, empty, sites, threshold, rows)
