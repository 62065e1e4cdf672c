"""NEMO nodes: what is usual for a model, whether a prompt is memorized, and by which neurons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from comfy_api.latest import io, ui

from ..engine.copies.nearest import overlay
from ..engine.errors import refuse
from ..engine.io.tables import lines_of
from ..engine.nemo import (
    PARTS,
    Agreement,
    Calibration,
    FewStepConfig,
    FewStepSampler,
    NeuronSet,
    ProbeConfig,
    SampleThreshold,
    ScoreThreshold,
    SearchConfig,
    find_neurons,
    gather,
    make_probe,
    sample_agreement,
    score_prompts,
    value_activations,
    value_sites,
)
from ..engine.nemo.adjust import Adjusted, recommended
from ..engine.nemo.adjust import adjust as adjust_embedding
from ..engine.nemo.calibration import KEPT_CAPTIONS, PUBLISHED
from ..engine.nemo.dose import dose_lines, dose_picture, samples_agreeing
from ..engine.nemo.few_step_detection import UsualSamples
from ..engine.nemo.neuron_effects import BRIGHT, DARK, heat_map
from ..engine.nemo.neuron_statistics import NeuronStatistics, published_statistics
from ..engine.nemo.sites import SCOPES
from ..engine.network.condition import Condition
from ..engine.settings.nemo_options import METHODS, check_method
from ..engine.tracing.fingerprint import width_of
from .captions import banded, captioned
from .comfy import saved
from .comfy.carried import with_foreign
from .comfy.conditioning import condition_of, literal, prompt_conditions
from .comfy.model import (
    active_fingerprint,
    allow_gradients,
    backbone_of,
    blank_latents,
    decode,
    denoiser_of,
    differentiable,
    fingerprint,
)
from .comfy.nemo import previews
from .comfy.progress import progress, text_on
from .comfy.prompt_words import text_behind, words_at
from .config_inputs import input_of, inputs_of, settings_from
from .sockets import NEMOCalibrationSocket, NeuronsSocket, under_advanced

CATEGORY = "Vitrine/memorization"
STATISTICS, MEASURED = "vitrine_statistics", "none: measure captions"
"""Folder of published files, and the entry that takes none."""
EVERYTHING = "everything"
PROBE = inputs_of(ProbeConfig, "seeds", "timestep_index")
PROMPTS = io.String.Input(
    "prompts",
    multiline=True,
    default="",
    placeholder="a dog in the snow\na street at night",
    tooltip="Ordinary captions of the kind you use, one a line, four at least: the more the better, 500 or more.",
)
_FEW_STEPS = [
    input_of(FewStepConfig, "seeds", "samples"),
    input_of(FewStepConfig, "steps"),
    input_of(FewStepConfig, "guidance", "cfg"),
    input_of(FewStepConfig, "first_seed"),
]


def _few_steps(options: Mapping[str, Any]) -> FewStepConfig:
    """The samples of detection, from a node's widgets."""
    named = {"samples": "seeds", "cfg": "guidance"}
    return settings_from(FewStepConfig, {named.get(k, k): v for k, v in options.items() if k != "seeds"})


def lines(prompts: str, least: int) -> list[str]:
    """Prompts, one a line."""
    texts = lines_of(prompts)
    if len(texts) < least:
        raise refuse("prompts", f"{len(texts)} lines", f"{least} or more, one a line", "paste ordinary captions")
    return texts


def shape_of(latents: torch.Tensor) -> tuple[int, int, int]:
    """(C, h, w) of one picture's latent, with or without a frame axis."""
    channels, *frames, height, width = latents.shape[1:]
    if frames not in ([], [1]):
        remedy = "connect Empty Latent Image, or a length of 1"
        raise refuse("latent", f"a video of {frames[0]} latent frames", "a still picture", remedy)
    return channels, height, width


class NEMOCalibrate(io.ComfyNode):
    """What is usual for a model: its neurons, its few-step samples, and its one-step score."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Model, text encoder and captions in; the calibration out."""
        return io.Schema(
            node_id="VitrineNEMOCalibrate",
            display_name="Calibrate Copy Detection (NEMO)",
            category=CATEGORY,
            description="Once for a model: how active its neurons are for ordinary captions, how far samples of one "
            "caption differ, and the score above which a prompt is memorized.",
            inputs=under_advanced(("samples", "steps", "cfg", "first_seed", "seeds", "timestep_index"), [
                io.Model.Input("model", tooltip="The model to calibrate for."),
                io.Clip.Input("clip", tooltip="Its text encoder."),
                io.Latent.Input("latent", tooltip="Gives the size: connect Empty Latent Image."),
                PROMPTS,
                io.Combo.Input(
                    "measure", options=[EVERYTHING, *PARTS], default=EVERYTHING,
                    tooltip="statistics is for Find Copying Neurons (NEMO), samples and score for "
                    "Detect a Copied Prompt (NEMO); everything takes longest.",
                ),
                io.Combo.Input("scope", options=list(SCOPES), tooltip="down+mid: as published; all: up stage too."),
                *_FEW_STEPS, *PROBE,
                io.Combo.Input(
                    "published", options=[MEASURED, *saved.listed(STATISTICS, ".pt")], default=MEASURED, optional=True,
                    advanced=True,
                    tooltip="The authors' statistics of SD 1.4, a .pt file in models/vitrine_statistics, "
                    "instead of captions. The threshold is then 0.428.",
                ),
            ]),
            outputs=[
                NEMOCalibrationSocket.Output(
                    display_name="CALIBRATION",
                    tooltip="For Detect a Copied Prompt (NEMO) and Find Copying Neurons (NEMO), same model.",
                ),
                io.Float.Output(
                    display_name="tau",
                    tooltip="Threshold of the one-step score, for Verify Blocking (NEMO) and Check for Copies (NEMO); "
                    "0 if it was not measured.",
                ),
                io.String.Output(display_name="report", tooltip="What was measured, one part a line."),
            ],
        )  # fmt: skip

    @classmethod
    def fingerprint_inputs(cls, published: str = MEASURED, **_: Any) -> str:
        """Runs again when the published file has changed."""
        return "" if published == MEASURED else saved.changed(STATISTICS, published)

    @classmethod
    def execute(
        cls,
        model: Any,
        clip: Any,
        latent: dict,
        prompts: str,
        measure: str = EVERYTHING,
        scope: str = SCOPES[0],
        published: str = MEASURED,
        **options: Any,
    ) -> io.NodeOutput:
        """Interrupt works between two forwards."""
        if published != MEASURED:
            path = saved.path_of(STATISTICS, published)
            calibration = Calibration(published_statistics(path, backbone_of(model)), score=PUBLISHED)
            return io.NodeOutput(calibration, PUBLISHED.tau, f"{calibration.text()}, as published")
        parts = PARTS if measure == EVERYTHING else (measure,)
        texts, blank = lines(prompts, 2 if parts == ("statistics",) else 4), blank_latents(model, latent)[:1]
        config, probe = _few_steps(options), settings_from(ProbeConfig, options)
        measured: dict[str, Any] = {}
        if "statistics" in parts:
            measured["statistics"] = _statistics(model, clip, texts, scope)
        if "samples" in parts:
            measured["samples"] = _usual_samples(model, clip, texts, blank, config)
        if "score" in parts:
            conds, asked = prompt_conditions(model, clip, texts, blank), make_probe(denoiser_of(model), config=probe)
            scores, _ = score_prompts(asked, conds, shape_of(blank), 1.0, progress())
            measured["score"] = ScoreThreshold.of([s.value for s in scores], probe, fingerprint(model))
        calibration = Calibration(**measured, captions=tuple(texts[:KEPT_CAPTIONS]))
        tau = 0.0 if calibration.score is None else calibration.score.tau
        return io.NodeOutput(calibration, tau, calibration.text())


def _statistics(model: Any, clip: Any, texts: list[str], scope: str) -> NeuronStatistics:
    """One text encoding a caption; no denoising at all where the values depend on the text alone."""
    denoiser, sites = denoiser_of(model), value_sites(backbone_of(model), scope)
    channels = model.get_model_object("latent_format").latent_channels
    blank = torch.randn(1, channels, 16, 16, generator=torch.Generator().manual_seed(1)).to(model.load_device)

    def batches() -> Any:
        for text in texts:
            (cond,) = prompt_conditions(model, clip, [text], blank)
            yield value_activations(denoiser, cond, sites, blank)

    return gather(batches(), [s.address for s in sites], active_fingerprint(model), len(texts), progress())


def _usual_samples(
    model: Any, clip: Any, texts: list[str], blank: torch.Tensor, config: FewStepConfig
) -> SampleThreshold:
    sampler, usual, after = _sampler_of(model, literal(clip, ""), blank, config), UsualSamples(), progress()
    for start in range(0, len(texts), sampler.at_once):
        conds = prompt_conditions(model, clip, texts[start : start + sampler.at_once], blank)
        usual.add(sample_agreement(sampler, conds, shape_of(blank)))
        after(len(usual.distances), len(texts), None)
    return usual.threshold(config, fingerprint(model))


def _sampler_of(
    model: Any,
    negative: list,
    blank: torch.Tensor,
    config: FewStepConfig,
    threshold: SampleThreshold | None = None,
) -> FewStepSampler:
    """Samples in few steps, guided against a negative prompt."""
    if threshold is not None:
        threshold.check(fingerprint(model))
    empty = condition_of(model, negative, blank)
    return FewStepSampler(denoiser_of(model), config, empty, value_sites(backbone_of(model), "all"), threshold)


class NEMODetect(io.ComfyNode):
    """Is a prompt memorized, judged by samples or by one-step predictions."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Model and prompt in; verdict, pictures and map out."""
        return io.Schema(
            node_id="VitrineNEMODetect",
            display_name="Detect a Copied Prompt (NEMO)",
            category=CATEGORY,
            description="A memorized prompt gives one picture from every seed: compares its samples of a few steps, or "
            "its one-step predictions as published. Shows them, and where in the picture samples agree.",
            is_output_node=True,
            hidden=[io.Hidden.unique_id],
            inputs=under_advanced(("samples", "steps", "cfg", "first_seed", "seeds", "timestep_index"), [
                io.Model.Input("model", tooltip="The model to test, with its LoRA."),
                io.Conditioning.Input("positive", tooltip="The prompt."),
                io.Conditioning.Input(
                    "negative", tooltip="An empty prompt, as the calibration's samples have; one step takes none.",
                ),
                io.Latent.Input("latent", tooltip="Gives the size: connect Empty Latent Image."),
                io.Combo.Input(
                    "method", options=list(METHODS),
                    tooltip="samples tells most; one step is the published score of one-step predictions.",
                ),
                *_FEW_STEPS, *PROBE,
                NEMOCalibrationSocket.Input(
                    "calibration", optional=True,
                    tooltip="From Calibrate Copy Detection (NEMO): a verdict needs it, and its settings are used then.",
                ),
                io.Vae.Input("vae", optional=True, tooltip="Connect it to see the pictures."),
            ]),
            outputs=[
                io.Boolean.Output(display_name="memorized", tooltip="True if the prompt is memorized."),
                io.Float.Output(
                    display_name="value", tooltip="How far the samples differ, less is more alike; or the score of one "
                    "step, more is more alike.",
                ),
                io.String.Output(display_name="report", tooltip="Verdict, seeds, settings and threshold."),
                io.Image.Output(display_name="pictures", tooltip="One of each seed (with a VAE)."),
                io.Image.Output(display_name="where", tooltip="In colour, where samples agree (VAE and calibration)."),
            ],
        )  # fmt: skip

    @classmethod
    def execute(
        cls,
        model: Any,
        positive: list,
        negative: list,
        latent: dict,
        method: str = METHODS[0],
        calibration: Calibration | None = None,
        vae: Any = None,
        **options: Any,
    ) -> io.NodeOutput:
        """A few steps of ``samples`` rows, twice as many with guidance; or one forward of ``seeds`` rows."""
        blank = blank_latents(model, latent)[:1]
        if check_method(method):
            probe = settings_from(ProbeConfig, options)
            return _one_step(cls, model, positive, blank, probe, calibration, vae)
        threshold = None if calibration is None else calibration.known("samples")
        config = _few_steps(options) if threshold is None else threshold.config
        sampler = _sampler_of(model, negative, blank, config, threshold)
        (agreement,) = sample_agreement(sampler, [condition_of(model, positive, blank)], shape_of(blank), progress())
        pictures, where = _shown(model, vae, agreement)
        text = with_foreign(agreement.text(), positive, negative)
        shown = text_on(text).as_dict()
        if vae is not None:
            named = captioned(pictures, [f"seed {config.first_seed + i}" for i in range(len(pictures))])
            marked = [] if threshold is None else [*captioned(where, [f"{agreement.area:.0%} agrees"])]
            shown = ui.PreviewImage(torch.stack([*named, *marked]), cls=cls).as_dict() | shown
        memorized = agreement.threshold is not None and agreement.memorized
        return io.NodeOutput(memorized, agreement.distance, text, pictures, where, ui=shown)


def _one_step(
    cls: Any,
    model: Any,
    positive: list,
    blank: torch.Tensor,
    config: ProbeConfig,
    calibration: Calibration | None,
    vae: Any,
) -> io.NodeOutput:
    """The published score of a prompt, with the predictions that it compares."""
    known = None if calibration is None else calibration.known("score").check(fingerprint(model))
    probe = make_probe(denoiser_of(model), config=config if known is None else known.probe)
    cond, shape = condition_of(model, positive, blank, probe.t), shape_of(blank)
    ((score,), _) = score_prompts(probe, [cond], shape, known and known.tau, progress())
    memorized = known is not None and score.memorized
    text = with_foreign(score.text(probe.config), positive)
    nothing, shown = torch.zeros(1, 8, 8, 3), text_on(text).as_dict()
    pictures = nothing if vae is None else previews(model, vae, probe, cond, shape)
    if vae is not None:
        shown = (
            ui.PreviewImage(
                captioned(pictures, [f"prediction {i + 1}" for i in range(len(pictures))]), cls=cls
            ).as_dict()
            | shown
        )
    return io.NodeOutput(memorized, score.value, text, pictures, nothing, ui=shown)


def _shown(model: Any, vae: Any, agreement: Agreement) -> tuple[torch.Tensor, torch.Tensor]:
    """IMAGE of the samples, and of the first with what all agree on in colour."""
    assert agreement.samples is not None
    if vae is None:
        return torch.zeros(1, 8, 8, 3), torch.zeros(1, 8, 8, 3)
    pictures = decode(model, vae, agreement.samples.to(model.load_device))
    if agreement.threshold is None:
        return pictures, torch.zeros_like(pictures[:1])
    return pictures, overlay(pictures[0].movedim(-1, 0), agreement.map).movedim(0, -1)[None]


class NEMOFindNeurons(io.ComfyNode):
    """The neurons that encode a memorized picture."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Model, conditioning and statistics in; neurons, report and heat map out."""
        return io.Schema(
            node_id="VitrineNEMOFindNeurons",
            display_name="Find Copying Neurons (NEMO)",
            category=CATEGORY,
            is_output_node=True,  # what it shows can be all one wants
            description="Searches the few value neurons whose blocking changes what a memorized prompt predicts. With "
            "a negative prompt, samples then decide how strongly they are blocked, and say whether that cures.",
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
            inputs=under_advanced(("scope", "adjust"), [
                io.Model.Input("model", tooltip="The model to search."),
                io.Conditioning.Input("positive", tooltip="The prompt to search."),
                io.Latent.Input("latent", tooltip="Gives the size: connect Empty Latent Image."),
                NEMOCalibrationSocket.Input("calibration", tooltip="From Calibrate Copy Detection (NEMO), same model."),
                *inputs_of(SearchConfig, "effect_fraction", "mode"),
                *PROBE,
                io.Combo.Input("scope", options=list(SCOPES), tooltip="Layers that are searched first."),
                *inputs_of(SearchConfig, without=("tau", "effect_fraction", "mode", "sample_steps"), optional=True),
                io.Conditioning.Input(
                    "negative", optional=True,
                    tooltip="An empty prompt: samples then choose the factor and give the verdict, where the "
                    "calibration has them.",
                ),
                io.Clip.Input(
                    "clip", optional=True,
                    tooltip="The prompt's text encoder: lists neurons with words instead of positions, and measures "
                    "what blocking costs the calibration's captions.",
                ),
                io.Boolean.Input(
                    "adjust", default=False, optional=True,
                    tooltip="Also tries the other remedy, which leaves the model as it is: moves this prompt's "
                    "embedding, and compares both. Needs negative prompt and CLIP; about 3000 more evaluations.",
                ),
                *inputs_of(SearchConfig, "sample_steps", optional=True),
            ]),
            outputs=[
                NeuronsSocket.Output(display_name="NEURONS", tooltip="For Neuron Blocker, Bake, Save Neurons."),
                io.String.Output(display_name="report", tooltip="Verdict, scores, neurons of each layer."),
                io.Image.Output(display_name="heat_map", tooltip="Layers by neurons; kept ones are bright."),
                io.Image.Output(
                    display_name="doses", tooltip="Samples that still agree at each dose tried, against what it costs "
                    "ordinary captions (with a negative prompt).",
                ),
                io.Conditioning.Output(
                    display_name="adjusted", tooltip="The prompt with its embedding moved, to sample the untouched "
                    "model with; the prompt itself unless adjust is on.",
                ),
            ],
        )  # fmt: skip

    @classmethod
    def execute(
        cls,
        model: Any,
        positive: list,
        latent: dict,
        calibration: Calibration,
        scope: str,
        negative: list | None = None,
        clip: Any = None,
        adjust: bool = False,
        **options: Any,
    ) -> io.NodeOutput:
        """Search, judge; interrupt works between two forwards."""
        model_id, statistics = fingerprint(model), calibration.known("statistics")
        calibration.check(model_id)
        statistics.check(backbone_of(model), active_fingerprint(model))
        blank, asked = blank_latents(model, latent)[:1], settings_from(ProbeConfig, options)
        config = settings_from(SearchConfig, options, tau=calibration.tau_at(asked))
        probe = make_probe(denoiser_of(model), scope, asked, config.rows)
        cond, shape, sampler = condition_of(model, positive, blank), shape_of(blank), None
        if negative is not None and calibration.samples is not None:
            sampler = _sampler_of(model, negative, blank, calibration.samples.config, calibration.samples)
            if clip is not None:
                sampler.ordinary = prompt_conditions(model, clip, list(calibration.captions), blank)
        if adjust and (sampler is None or not sampler.ordinary):
            accepted = "a negative prompt, CLIP, and a calibration with samples"
            raise refuse("adjust", "without what it compares with", accepted, "connect them, or switch adjust off")
        prompt = text_behind(cls.hidden, "positive", clip, positive)
        (result,) = find_neurons(probe, [prompt or "prompt"], [cond], statistics, shape, config, progress(), sampler)
        if clip is not None and prompt is not None and cond.text is not None:
            result = result.with_words(words_at(clip, prompt, cond.text.shape[1]))
        neurons = result.neurons(model_id)
        sites = value_sites(backbone_of(model), "all")
        searched = {site.address for site in probe.sites} | set(neurons.neurons)
        widths = {s.address: width_of(backbone_of(model), s) for s in sites if s.address in searched}
        text, picture, doses = describe(neurons), heat_map(neurons, widths), torch.zeros(1, 8, 8, 3)
        text = with_foreign(text, positive, negative)
        shown = ui.PreviewImage(by_layer(neurons, widths), cls=cls).as_dict()
        if result.curve is not None:
            doses = torch.from_numpy(np.asarray(dose_picture(result.curve)).astype(np.float32) / 255)[None]
            shown["images"] = [*shown["images"], *ui.PreviewImage(doses, cls=cls).as_dict()["images"]]
        other = positive
        if adjust and sampler is not None:
            moved = _adjusted(model, sampler, cond, shape, config.sample_steps)
            words = moved.condition.text
            other = positive if words is None else [[words.cpu(), positive[0][1]]]
            text += f"\n{moved.text()}" + ("" if result.curve is None else f"\n{recommended(result.curve, moved)}")
        elif result.curve is not None and result.curve.verdict != "cured":
            text += f"\n{recommended(result.curve)}"
        return io.NodeOutput(neurons, text, picture[None], doses, other, ui=shown | text_on(text).as_dict())


def _adjusted(
    model: Any, sampler: FewStepSampler, cond: Condition, shape: tuple[int, int, int], sample_steps: int
) -> Adjusted:
    with torch.inference_mode(False), differentiable():  # nodes run in inference mode, where there are no gradients
        allow_gradients(model)
        own = cond.to(model.load_device, copy=True)
        return adjust_embedding(sampler, own, shape, progress=progress(model), sample_steps=sample_steps)


def by_layer(neurons: NeuronSet, widths: Mapping[str, int]) -> torch.Tensor:
    """The heat map with each layer's name above it, and what the colours mean below."""
    kept = {a: neurons.neurons.get(a, ()) for a in widths}
    bands = {f"{a}: {len(kept[a])} of {w}": heat_map(NeuronSet({a: kept[a]}), {a: w}) for a, w in widths.items()}
    bright, dark = ("#{:02x}{:02x}{:02x}".format(*(round(255 * v) for v in c)) for c in (BRIGHT, DARK))
    return banded(bands, {bright: "holds the picture", dark: "does not"})


def describe(neurons: NeuronSet) -> str:
    """Verdict and neurons by layer, in words."""
    own = neurons.factor if isinstance(neurons.factor, float) else "of each set"
    verdict = neurons.info.get("verdict", "imported")
    if verdict == "reduced" and "doses" in neurons.info:
        verdict = "reduced, not cured"
    doses = neurons.info.get("doses")
    judged = f"{samples_agreeing(doses['points'][doses['chosen']])}; " if doses else ""
    lines = [f"{verdict}: {judged}{len(neurons)} neurons, factor {own}"]
    if "score_after" in neurons.info:
        lines.append(
            f"seeds agree by {neurons.info['score_before']:.3f} before, {neurons.info['score_after']:.3f} after"
            f" ({neurons.info.get('metric', 'MS-SSIM')})"
        )
    if "samples_after" in neurons.info:
        before, after = (neurons.info[f"samples_{when}"] for when in ("before", "after"))
        lines.append(
            f"{after['samples']} samples differ by {before['distance']:.4f} before, {after['distance']:.4f} after"
            f" (memorized is below {after['threshold']:.4f}; {after['settings']['steps']} steps, guidance "
            f"{after['settings']['guidance']:g}, first seed {after['settings']['first_seed']})"
        )
    lines += dose_lines(doses)
    return "\n".join(lines + [f"{a}: {' '.join(map(str, n))}" for a, n in neurons.neurons.items()])


NODES = [NEMOCalibrate, NEMODetect, NEMOFindNeurons]
