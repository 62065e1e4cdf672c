"""NEMO's jobs on a pipeline: calibrate, detect, find the neurons that memorize, verify, and count copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..activations.picture_latents import to_pixels
from ..diffusion.noise import generators
from ..errors import expect, refuse
from ..nemo import (
    PARTS,
    Agreement,
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
from ..nemo.calibration import KEPT_CAPTIONS, PUBLISHED
from ..nemo.few_step_detection import UsualSamples, keep_agreements, kept_agreements
from ..nemo.neuron_statistics import published_statistics
from ..nemo.noise_similarity import Probe, Request, probe_noise
from ..network.condition import Condition
from ..runtime.footprint import memory_bytes, rows_within
from ..runtime.processes import ALONE, Workers
from ..runtime.progress import Progress, silent
from ..settings.nemo_options import FULL_STEPS, METHODS, check_method
from ..tracing.fingerprint import active_fingerprint_of, fingerprint_of
from .adapter import Adapter
from .components import components_of
from .nemo_prompts import (
    TOGETHER,
    UNUSED,
    encoded_batches,
    job_run,
    latent_shape,
    latents_of,
    one_each,
    predicted_pixels,
    text_of,
    texts_of,
)

if TYPE_CHECKING:
    from .joined import TaskPipeline

_SHARE = 2
"""Share of a budget that one forward may take."""


def calibrate(
    pipe: TaskPipeline,
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
            measured[part] = _statistics(pipe, texts, scope, after, file, memory, workers)
        elif part == "samples":
            measured[part] = _usual_samples(pipe, chosen, few_steps, after, file, workers)
        else:
            scores = _scores(pipe, chosen, 1.0, probe, after, file, memory, workers)
            model = fingerprint_of(pipe._network)
            measured[part] = ScoreThreshold.of([s.value for s in scores], probe, model)
    return Calibration(**measured, captions=tuple(texts[:KEPT_CAPTIONS]))


def import_statistics(pipe: TaskPipeline, path: str | Path) -> Calibration:
    """The authors' published statistics and threshold of SD 1.4, from their ``.pt`` file; nothing is unpickled."""
    return Calibration(published_statistics(path, pipe._network), score=PUBLISHED)


def _statistics(
    pipe: TaskPipeline,
    texts: list[str],
    scope: str,
    progress: Progress,
    state: Path | None,
    memory: int | str | None,
    workers: Workers,
) -> NeuronStatistics:
    """Mean and deviation of every value neuron over the captions."""
    denoiser, sites = pipe._denoiser(), value_sites(pipe._network, scope)
    own = texts[workers.index :: workers.count]
    with pipe._in_use(), job_run(pipe, "statistics", texts, {"scope": scope}, state, workers) as run:
        running, model = RunningStatistics(s.address for s in sites), active_fingerprint_of(pipe._network)
        running.resume(run)

        def activations(batch: Condition) -> list[torch.Tensor]:
            return value_activations(denoiser, batch, sites, _blank(pipe._adapter, batch))

        def one() -> None:
            activations(next(encoded_batches(pipe, texts[:1])))

        size = TOGETHER if memory is None else rows_within(memory_bytes(memory) // _SHARE, one, TOGETHER)
        for batch in encoded_batches(pipe, own[running.count :], size):
            running.add(activations(batch))
            running.keep(run)
            progress(running.count, len(own), None)
        whole = RunningStatistics(running.addresses)
        whole.join(workers.gather(running))
        return whole.finish(model)


def _usual_samples(
    pipe: TaskPipeline,
    texts: list[str],
    config: FewStepConfig,
    progress: Progress,
    state: Path | None,
    workers: Workers,
) -> SampleThreshold:
    """How much few-step samples of one caption usually differ."""
    sampler = sampler_of(pipe, config)
    own = texts[workers.index :: workers.count]
    settings = {"settings": sampler.config, "latents": list(latent_shape(pipe))}
    with pipe._in_use(), job_run(pipe, "usual samples", texts, settings, state, workers) as run:
        usual = UsualSamples.resumed(run)
        for batch in encoded_batches(pipe, own[len(usual.distances) :], sampler.at_once):
            usual.add(sample_agreement(sampler, one_each(batch), latent_shape(pipe)))
            usual.keep(run)
            progress(len(usual.distances), len(own), None)
    whole = UsualSamples.joined(workers.gather(usual))
    return whole.threshold(sampler.config, fingerprint_of(pipe._network))


def _blank(adapter: Adapter, cond: Condition) -> torch.Tensor:
    """The same noise for every caption, as the node samples it: values depend on it little, of UNets not at all."""
    noise = torch.randn(1, adapter.channels, 16, 16, generator=torch.Generator().manual_seed(1))
    return noise.expand(cond.count, -1, -1, -1).to(adapter.device)


def detect(
    pipe: TaskPipeline,
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
        memory, workers: as in :func:`calibrate`; the memory is that of the method ``one step``.
        keep: the samples too, from which the map of where they agree is made.
    """
    if calibration is not None:
        _expect_calibration(calibration)
    texts, known = texts_of(prompts), calibration or Calibration()
    file = None if state is None else Path(state)
    if check_method(method):
        if keep:
            raise refuse("keep", True, "False with the method one step", "it makes no samples")
        score = known.known("score").check(fingerprint_of(pipe._network)) if calibration is not None else None
        if config is None and score is not None:
            config = score.probe
        if config is not None and not isinstance(config, ProbeConfig):
            raise refuse("config", type(config).__name__, "a ProbeConfig", "the method one step takes no samples")
        return _scores(pipe, texts, score and score.tau, config, progress, file, memory, workers)
    if config is not None and not isinstance(config, FewStepConfig):
        raise refuse("config", type(config).__name__, "a FewStepConfig", "the method samples makes no score")
    threshold = known.known("samples") if calibration is not None else None
    return _agreements(pipe, texts, threshold, config, progress, file, workers, keep)


def _agreements(
    pipe: TaskPipeline,
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
    sampler = sampler_of(pipe, config, threshold)
    own = texts[workers.index :: workers.count]
    settings = {"settings": sampler.config, "threshold": threshold, "latents": list(latent_shape(pipe))}
    with pipe._in_use(), job_run(pipe, "samples", texts, settings, state, workers) as run:
        agreements = kept_agreements(run, sampler.config, threshold)
        done = len(agreements)

        def after(step: int, total: int, preview: Any = None) -> None:
            progress(len(agreements) + step, len(own), preview)

        for batch in encoded_batches(pipe, own[done:]):
            agreements += sample_agreement(sampler, one_each(batch), latent_shape(pipe), after, keep=keep)
            keep_agreements(run, agreements)
    parts = workers.gather(agreements)
    return [parts[i % workers.count][i // workers.count] for i in range(len(texts))]


def _scores(
    pipe: TaskPipeline,
    texts: list[str],
    tau: float | None,
    config: ProbeConfig | None,
    progress: Progress,
    state: Path | None,
    memory: int | str | None,
    workers: Workers,
) -> list[Score]:
    """The published score of each prompt; prompts are encoded some at a time, and only their scores are kept."""
    probe = probe_of(pipe, "down+mid", config)
    own = texts[workers.index :: workers.count]
    settings = {"settings": probe.config, "latents": list(latent_shape(pipe))}
    with pipe._in_use(), job_run(pipe, "scores", texts, settings, state, workers) as run:
        scores = kept_scores(run, tau)
        done, size = len(scores), max(1, TOGETHER // probe.at_once) * probe.at_once
        if memory is not None and done < len(own):
            probe.rows, size = _fitting(pipe, probe, texts[:1], memory_bytes(memory) // _SHARE)

        def after(step: int, total: int, preview: torch.Tensor | None = None) -> None:
            progress(len(scores) + step, len(own), preview)

        for batch in encoded_batches(pipe, own[done:], size):
            conds = one_each(batch)
            scores += score_prompts(probe, conds, latent_shape(pipe), tau, after)[0]
            keep_scores(run, scores)
    parts = workers.gather(scores)
    return [parts[i % workers.count][i // workers.count] for i in range(len(texts))]


def _fitting(pipe: TaskPipeline, probe: Probe, texts: list[str], budget: int) -> tuple[int, int]:
    """How many rows fit through the UNet at once, and how many prompts through the text encoder."""
    (cond,) = encoded_batches(pipe, texts)
    noise = probe_noise(probe.config, latent_shape(pipe))[:1].to(text_of(cond))
    rows = rows_within(budget, lambda: probe.signals([Request(cond, noise, {})]), probe.rows)
    # signals and text states of the prompts that are encoded together wait for each other
    each = probe.config.seeds * noise.nbytes + 2 * text_of(cond).nbytes
    most = max(1, min(TOGETHER, budget // 4 // each))
    return rows, rows_within(budget, lambda: next(encoded_batches(pipe, texts)), most)


def find(
    pipe: TaskPipeline,
    prompts: str | Iterable[str],
    calibration: Calibration,
    config: SearchConfig | None = None,
    probe: ProbeConfig | None = None,
    scope: str = "down+mid",
    progress: Progress = silent,
) -> list[Result]:
    """Search every prompt, all in lockstep; under ``protocol="nemo"`` only those above tau, as published.

    Where the calibration has ``samples``, few-step and then full samples decide at which dose the neurons are blocked.

    Args:
        calibration: of this model, with ``statistics``; the published protocol needs its ``score``, or a tau.
        config: None is the defaults; where it has no tau, the calibration's is taken.
        probe: None is the calibration's, or the default.
        scope: layers that are searched first, ``down+mid`` (published) or ``all``.
    """
    _expect_calibration(calibration)
    statistics: NeuronStatistics = calibration.known("statistics")
    statistics.check(pipe._network)
    texts, config = texts_of(prompts), config or SearchConfig()
    if probe is None:
        probe = ProbeConfig() if calibration.score is None else calibration.score.probe
    if config.tau is None:
        config = replace(config, tau=calibration.tau_at(probe))
    sampler = None
    if calibration.samples is not None and not config.published:
        sampler = sampler_of(pipe, threshold=calibration.samples)
    prober = probe_of(pipe, scope, probe, config.rows)
    with pipe._in_use():
        conds = [row for batch in encoded_batches(pipe, texts) for row in one_each(batch)]
        if sampler is not None and calibration.captions:
            captions = encoded_batches(pipe, list(calibration.captions))
            sampler.ordinary = [row for batch in captions for row in one_each(batch)]
        return find_neurons(prober, texts, conds, statistics, latent_shape(pipe), config, progress, sampler)


def _expect_calibration(calibration: Any) -> None:
    expect(calibration, Calibration, "calibration", "pipe.calibrate measures one, Calibration.load(file) reads it")


def search_inputs(pipe: TaskPipeline, calibration: Calibration) -> dict[str, object]:
    """What a search depends on besides its settings and the prompt, for a :class:`~vitrine.engine.jobs.run.Run`."""
    parts = {part: getattr(calibration, part) for part in PARTS}
    kept = {"captions": list(calibration.captions), "size": predicted_pixels(pipe)}
    return {**components_of(pipe, UNUSED), **parts, **kept}


def neurons_of(pipe: TaskPipeline, result: Result) -> NeuronSet:
    """A result as a set to block or to save, which only this model accepts."""
    expect(result, Result, "result", "find gives one for each prompt: (result,) = pipe.find([prompt], calibration)")
    return result.neurons(fingerprint_of(pipe._network))


def adjust_prompt(
    pipe: TaskPipeline,
    prompt: str,
    calibration: Calibration,
    config: AdjustConfig | None = None,
    progress: Progress = silent,
    sample_steps: int = FULL_STEPS,
) -> Adjusted:
    """The other remedy, which leaves the model as it is: move one prompt's embedding until guidance stops pulling.

    Sample with ``prompt_embeds=adjusted.condition.text``. It takes about 3000 evaluations, and leaves less of what
    the prompt asks for than blocking does; :func:`~vitrine.engine.nemo.adjust.recommended` compares both.

    Args:
        calibration: of this model, with ``samples``.
        sample_steps: of its full samples, which decide whether it cures.
    """
    _expect_calibration(calibration)
    sampler = sampler_of(pipe, threshold=calibration.known("samples"))
    with pipe._in_use():
        (cond,) = encoded_batches(pipe, [prompt])
        captions = encoded_batches(pipe, list(calibration.captions))
        sampler.ordinary = [row for batch in captions for row in one_each(batch)]
        return adjust(sampler, cond, latent_shape(pipe), config or AdjustConfig(), progress, sample_steps)


def verify_blocking(
    pipe: TaskPipeline,
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
    prober = probe_of(pipe, "all", probe)
    with pipe._in_use():
        (cond,), reference = encoded_batches(pipe, [prompt]), None
        if picture is not None:
            reference = latents_of(pipe, picture)
        config = VerifyConfig(tau, seed)
        return verify(prober, cond, neurons, latent_shape(pipe), config, reference=reference, progress=progress)


def count_copies(
    pipe: TaskPipeline,
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
        raise refuse("seeds, ordinary", (len(seeds), len(ordinary)), "one at least of both", "ten of each are usual")
    wanted = (to_pixels(picture, None, pipe._adapter.factor) + 1) / 2

    def distances(prompts: Sequence[str], own: Sequence[int], blocked: NeuronSet | None = None) -> torch.Tensor:
        rows = zip(prompts, generators(own), strict=True)
        pictures = [pipe(p, generator=g, neurons=blocked, output_type="pt", **sampling).images for p, g in rows]
        return picture_distance(torch.cat(pictures).cpu(), wanted)

    same = [prompt] * len(seeds)
    usual = distances(ordinary, range(len(ordinary)))
    return Copies(distances(same, seeds), distances(same, seeds, neurons), usual)


def probe_of(pipe: TaskPipeline, scope: str = "down+mid", config: ProbeConfig | None = None, rows: int = 80) -> Probe:
    """What scores and searches ask the network with; it holds the empty prompt where guidance needs it."""
    latent_shape(pipe)  # refuses what cannot be probed
    config, empty = config or ProbeConfig(), None
    if config.guidance:
        with pipe._in_use():
            (empty,) = encoded_batches(pipe, [""])
    return make_probe(pipe._denoiser(), scope, config, rows, empty)


def sampler_of(
    pipe: TaskPipeline, config: FewStepConfig | None = None, threshold: SampleThreshold | None = None, rows: int = 80
) -> FewStepSampler:
    """What :func:`detect` samples with."""
    latent_shape(pipe)  # refuses what cannot be sampled here
    if threshold is not None:
        threshold.check(fingerprint_of(pipe._network))
    used = config or (FewStepConfig() if threshold is None else threshold.config)
    empty: Condition | None = None
    if used.guidance != 1:
        with pipe._in_use():
            (empty,) = encoded_batches(pipe, [""])
    sites = value_sites(pipe._network, "all")
    return FewStepSampler(pipe._denoiser(), used, empty, sites, threshold, rows)
