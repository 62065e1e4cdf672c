"""NEMO as a diffusers pipeline: calibrate, detect, find the neurons that memorize, sample with them blocked, verify."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput

from ..activations.picture_latents import to_pixels
from ..diffusion.noise import generators
from ..errors import refuse
from ..families import FAMILIES, family_of
from ..nemo import (
    PARTS,
    Agreement,
    BlockConfig,
    Calibration,
    Copies,
    FewStepConfig,
    FewStepSampler,
    NeuronSet,
    NeuronStatistics,
    ProbeConfig,
    Result,
    RunningStatistics,
    SampleThreshold,
    Score,
    ScoreThreshold,
    SearchConfig,
    Verification,
    VerifyConfig,
    block,
    find_neurons,
    keep_scores,
    kept_scores,
    make_probe,
    picture_distance,
    sample_agreement,
    score_prompts,
    value_activations,
    value_sites,
    verify,
)
from ..nemo.adjust import AdjustConfig, Adjusted, adjust
from ..nemo.block import RunningForward
from ..nemo.calibration import KEPT_CAPTIONS, PUBLISHED
from ..nemo.few_step_detection import UsualSamples, keep_agreements, kept_agreements
from ..nemo.neuron_statistics import published_statistics
from ..nemo.noise_similarity import Probe, Request, probe_noise
from ..network.condition import Condition
from ..runtime.footprint import memory_bytes, rows_within
from ..runtime.forward_hooks import hook_before
from ..runtime.processes import ALONE, Workers
from ..runtime.progress import Progress, silent
from ..settings.nemo_options import METHODS, check_method
from ..tracing.fingerprint import active_fingerprint_of, fingerprint_of
from .adapter import Adapter, network_of
from .components import components_of
from .conventions import refuse_unknown
from .nemo_prompts import TOGETHER, UNUSED, PromptJobs, one_each, text_of, texts_of
from .prompt_rows import noted_prompts
from .sampling_clock import share_of

_SHARE = 2
"""Share of a budget that one forward may take."""
Neurons = NeuronSet | list[NeuronSet]


class NEMOPipeline(PromptJobs):
    """Any pipeline with the NEMO tools (Hintersdorf et al., NeurIPS 2024), which still samples itself.

    Transformers' neurons are the values of the text stream in joint attention, or of cross-attention. No paper has
    published what the method does there.

    Example:
        >>> pipe = NEMOPipeline.from_pipe(StableDiffusionPipeline.from_pretrained("path/to/model"))
        >>> calibration = pipe.calibrate(ordinary_captions)
        >>> (result,) = pipe.find(["a suspicious prompt"], calibration)
        >>> images = pipe("a suspicious prompt", neurons=pipe.neurons(result)).images
    """

    @torch.no_grad()
    def __call__(
        self, *args: Any, neurons: Neurons | None = None, block_config: BlockConfig | None = None, **kwargs: Any
    ) -> ImagePipelineOutput:
        """Sample as the stock pipeline does, with neurons blocked meanwhile.

        Args:
            neurons: one set, or several that are merged; None or an empty set samples untouched.
            block_config: factor, branch, part of sampling; the default takes the sets' own factors, in both branches,
                all the time.
        """
        refuse_unknown(type(self), kwargs)
        stock: Any = super().__call__
        with self._in_use(), blocked(self, neurons, block_config):
            pictures: ImagePipelineOutput = stock(*args, **kwargs)
        return pictures

    def calibrate(
        self,
        prompts: str | Iterable[str],
        parts: Sequence[str] = PARTS,
        scope: str = "down+mid",
        probe: ProbeConfig | None = None,
        few_steps: FewStepConfig | None = None,
        scored: int | None = None,
        progress: Progress = silent,
        state: str | Path | None = None,
        memory: int | str | None = None,
        workers: Workers = ALONE,
    ) -> Calibration:
        """What is usual for ordinary captions (500 or more; the paper took 50,000 for the neurons), once for a model.

        Args:
            parts: ``statistics`` of the neurons, which a search needs; ``samples``, how much few-step samples differ,
                and ``score``, the threshold of one-step predictions: detection needs one of both.
            scope: layers of the statistics, ``down+mid`` (published) or ``all``.
            probe, few_steps: how prompts are scored in one step, and sampled in a few; detection takes the same.
            scored: captions that are scored and sampled, from the first on; None is all. 200 are a good number.
            state: a folder for what is measured so far; the same call resumes from it, also after the process was
                killed.
            memory: budget in bytes or as "2GB" for what is needed beyond the models; it decides how many captions are
                encoded, and how many rows go through the UNet, at once: 64 and 80 at most.
            workers: processes that share the captions, from :func:`~vitrine.engine.runtime.processes.launched`; each
                returns the whole, equal to what one process gives but for rounding.
        """
        if not parts or not set(parts) <= set(PARTS):
            raise refuse("parts", tuple(parts), f"some of {', '.join(PARTS)}", "None of the others is measured")
        texts, probe, few_steps = texts_of(prompts), probe or ProbeConfig(), few_steps or FewStepConfig()
        chosen = texts[:scored]
        # batch rows of the network; the statistics have the text encoder and value projections only
        rows = {
            "statistics": 0.2 * len(texts),
            "samples": len(chosen) * few_steps.rows,
            "score": len(chosen) * probe.seeds * (2 if probe.guidance else 1),
        }
        whole, measured = sum(rows[part] for part in parts), dict[str, Any]()

        def bar(part: str) -> Progress:
            before = sum(rows[earlier] for earlier in measured)

            def after(step: int, total: int, preview: torch.Tensor | None = None) -> None:
                progress(round(1000 * (before + rows[part] * step / max(1, total)) / whole), 1000, preview)

            return after

        def kept(part: str) -> Path | None:
            return None if state is None else Path(state) / f"{part}.safetensors"

        for part in (part for part in PARTS if part in parts):
            after, file = bar(part), kept(part)
            if part == "statistics":
                measured[part] = self._statistics(texts, scope, after, file, memory, workers)
            elif part == "samples":
                measured[part] = self._usual_samples(chosen, few_steps, after, file, workers)
            else:
                scores = self._score(chosen, 1.0, probe, after, file, memory, workers)
                model = fingerprint_of(self._network)
                measured[part] = ScoreThreshold.of([s.value for s in scores], probe, model)
        return Calibration(**measured, captions=tuple(texts[:KEPT_CAPTIONS]))

    def import_statistics(self, path: str | Path) -> Calibration:
        """The authors' published statistics and threshold of SD 1.4, from their ``.pt`` file; nothing is unpickled."""
        return Calibration(published_statistics(path, self._network), score=PUBLISHED)

    def _statistics(
        self,
        texts: list[str],
        scope: str,
        progress: Progress,
        state: Path | None,
        memory: int | str | None,
        workers: Workers,
    ) -> NeuronStatistics:
        """Mean and deviation of every value neuron over the captions."""
        denoiser, sites = self._denoiser(), value_sites(self._network, scope)
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

    def _usual_samples(
        self, texts: list[str], config: FewStepConfig, progress: Progress, state: Path | None, workers: Workers
    ) -> SampleThreshold:
        """How much few-step samples of one caption usually differ."""
        sampler = self.sampler(config)
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

    def detect(
        self,
        prompts: str | Iterable[str],
        calibration: Calibration | None = None,
        method: str = METHODS[0],
        config: FewStepConfig | ProbeConfig | None = None,
        progress: Progress = silent,
        state: str | Path | None = None,
        memory: int | str | None = None,
        workers: Workers = ALONE,
        keep: bool = False,
    ) -> list[Any]:
        """Which prompts are memorized: they give one picture from every seed.

        By the method ``samples`` an :class:`~vitrine.engine.nemo.Agreement` of a few samples in a few steps for each
        prompt; by ``one step`` its :class:`~vitrine.engine.nemo.Score`, which is published: how alike the one-step
        predictions from different noises are. Without a calibration there is a number, but no verdict.

        Args:
            calibration: of this model, with the part ``samples``, or ``score`` for the method ``one step``.
            config: how prompts are sampled or scored; None takes the calibration's own settings, or the defaults.
            state: a file for the results so far; the same call resumes from it, also after the process was killed.
            memory, workers: as in :meth:`calibrate`; the memory is that of the method ``one step``.
            keep: the samples too, from which the map of where they agree is made.
        """
        texts, known = texts_of(prompts), calibration or Calibration()
        file = None if state is None else Path(state)
        if check_method(method):
            if keep:
                raise refuse("keep", True, "False with the method one step", "it makes no samples")
            score = known.known("score").check(fingerprint_of(self._network)) if calibration is not None else None
            if config is None and score is not None:
                config = score.probe
            if config is not None and not isinstance(config, ProbeConfig):
                raise refuse("config", type(config).__name__, "a ProbeConfig", "the method one step takes no samples")
            return self._score(texts, score and score.tau, config, progress, file, memory, workers)
        if config is not None and not isinstance(config, FewStepConfig):
            raise refuse("config", type(config).__name__, "a FewStepConfig", "the method samples makes no score")
        threshold = known.known("samples") if calibration is not None else None
        return self._agreements(texts, threshold, config, progress, file, workers, keep)

    def _agreements(
        self,
        texts: list[str],
        threshold: SampleThreshold | None,
        config: FewStepConfig | None,
        progress: Progress,
        state: Path | None,
        workers: Workers,
        keep: bool,
    ) -> list[Agreement]:
        """How alike few-step samples of each prompt are."""
        if keep and (state is not None or workers.count > 1):
            raise refuse("keep", True, "False with a state or several processes", "detect again what is memorized")
        sampler = self.sampler(config, threshold)
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

    def _score(
        self,
        texts: list[str],
        tau: float | None,
        config: ProbeConfig | None,
        progress: Progress,
        state: Path | None,
        memory: int | str | None,
        workers: Workers,
    ) -> list[Score]:
        """The published score of each prompt; prompts are encoded some at a time, and only their scores are kept."""
        probe = self.probe("down+mid", config)
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

    def find(
        self,
        prompts: str | Iterable[str],
        calibration: Calibration,
        config: SearchConfig | None = None,
        probe: ProbeConfig | None = None,
        scope: str = "down+mid",
        progress: Progress = silent,
    ) -> list[Result]:
        """Search every prompt, all in lockstep; under ``protocol="nemo"`` only those above tau, as published.

        Where the calibration has ``samples``, few-step samples decide at which dose the neurons are blocked.

        Args:
            calibration: of this model, with ``statistics``; the published protocol needs its ``score``, or a tau.
            config: None is the defaults; where it has no tau, the calibration's is taken.
            probe: None is the calibration's, or the default.
            scope: layers that are searched first, ``down+mid`` (published) or ``all``.
        """
        statistics: NeuronStatistics = calibration.known("statistics")
        statistics.check(self._network)
        texts, config = texts_of(prompts), config or SearchConfig()
        if probe is None:
            probe = ProbeConfig() if calibration.score is None else calibration.score.probe
        if config.tau is None:
            config = replace(config, tau=calibration.tau_at(probe))
        sampler = None
        if calibration.samples is not None and not config.published:
            sampler = self.sampler(threshold=calibration.samples)
        prober = self.probe(scope, probe, config.rows)
        with self._in_use():
            conds = [row for batch in self._encoded(texts) for row in one_each(batch)]
            if sampler is not None and calibration.captions:
                captions = self._encoded(list(calibration.captions))
                sampler.ordinary = [row for batch in captions for row in one_each(batch)]
            return find_neurons(prober, texts, conds, statistics, self.latent_shape(), config, progress, sampler)

    def adjust(
        self, prompt: str, calibration: Calibration, config: AdjustConfig | None = None, progress: Progress = silent
    ) -> Adjusted:
        """The other remedy, which leaves the model as it is: move one prompt's embedding until guidance stops pulling.

        Sample with ``prompt_embeds=adjusted.condition.text``. It takes about 1300 evaluations, and leaves less of what
        the prompt asks for than blocking does; :func:`~vitrine.engine.nemo.adjust.recommended` compares both.

        Args:
            calibration: of this model, with ``samples``.
        """
        sampler = self.sampler(threshold=calibration.known("samples"))
        with self._in_use():
            (cond,) = self._encoded([prompt])
            captions = self._encoded(list(calibration.captions))
            sampler.ordinary = [row for batch in captions for row in one_each(batch)]
            return adjust(sampler, cond, self.latent_shape(), config or AdjustConfig(), progress)

    def search_inputs(self, calibration: Calibration) -> dict[str, object]:
        """What a search depends on besides its settings and the prompt, for a :class:`~vitrine.engine.jobs.run.Run`."""
        parts = {part: getattr(calibration, part) for part in PARTS}
        kept = {"captions": list(calibration.captions), "size": self.predicted_size}
        return {**components_of(self, UNUSED), **parts, **kept}

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
        self,
        prompt: str,
        neurons: NeuronSet,
        picture: Any,
        ordinary: Sequence[str],
        seeds: Sequence[int] = range(1000, 1010),
        **sampling: Any,
    ) -> Copies:
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

    def sampler(
        self, config: FewStepConfig | None = None, threshold: SampleThreshold | None = None, rows: int = 80
    ) -> FewStepSampler:
        """What :meth:`detect` samples with."""
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


@contextmanager
def blocked(pipe: DiffusionPipeline, neurons: Neurons | None, config: BlockConfig | None) -> Iterator[None]:
    """Neurons of a pipeline's network, blocked in whatever it samples while the block is open."""
    sets = [neurons] if isinstance(neurons, NeuronSet) else list(neurons or [])
    if not any(map(len, sets)):
        yield
        return
    net = network_of(pipe)
    config, running = config or BlockConfig(), RunningForward()
    if config.branch == "cond" and not family_of(net).stacked:
        accepted = f"'both', or a pipeline of {', '.join(family.name for family in FAMILIES if family.stacked)}"
        raise refuse("branch", config.branch, accepted, "this one's order of prompt and negative prompt is not known")
    elapsed = share_of(pipe, net)

    def follow(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        running.update(config, elapsed(args, kwargs), lambda: rows.of(args, kwargs))

    with noted_prompts(pipe) as rows, block(net, sets[0].merged(*sets[1:]), config, running=running):
        handle = hook_before(net, follow, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


def _blank(adapter: Adapter, cond: Condition) -> torch.Tensor:
    """The same noise for every caption, as the node samples it: values depend on it little, of UNets not at all."""
    noise = torch.randn(1, adapter.channels, 16, 16, generator=torch.Generator().manual_seed(1))
    return noise.expand(cond.count, -1, -1, -1).to(adapter.device)
