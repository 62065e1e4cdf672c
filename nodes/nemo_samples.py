"""NEMO nodes that judge a prompt by samples of a few steps: what is usual, and whether a prompt is memorized."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io, ui

from ..engine.copies.nearest import overlay
from ..engine.nemo import Agreement, FewStepConfig, FewStepSampler, SampleThreshold, sample_agreement, value_sites
from ..engine.nemo.partial_scores import UsualSamples
from .captions import captioned
from .comfy.conditioning import condition_of, literal, prompt_conditions
from .comfy.model import backbone_of, blank_latents, decode, denoiser_of, fingerprint
from .comfy.progress import progress, text_on
from .nemo import CATEGORY, PROMPTS, lines, shape_of
from .sockets import SampleThresholdSocket, under_advanced

_SAMPLES = io.Int.Input("samples", default=4, min=2, max=16, tooltip="Of each prompt, compared with each other.")
_STEPS = io.Int.Input("steps", default=4, min=1, max=50, tooltip="Of these samples: a few decide the picture.")
_CFG = io.Float.Input("cfg", default=3.0, min=0.0, max=100.0, step=0.1, tooltip="As you sample; 1 is without.")
_FIRST = io.Int.Input("first_seed", default=1, min=0, max=2**31, tooltip="Of the samples' noises.")


def sampler_of(
    model: Any, negative: list, blank: torch.Tensor, config: FewStepConfig, threshold: SampleThreshold | None = None
) -> FewStepSampler:
    """Samples in few steps, guided against a negative prompt."""
    if threshold is not None:
        threshold.check(fingerprint(model))
    empty = condition_of(model, negative, blank)
    return FewStepSampler(denoiser_of(model), config, empty, value_sites(backbone_of(model), "all"), threshold)


class NEMOSampleThreshold(io.ComfyNode):
    """How far samples of one ordinary caption usually differ."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Captions in, the threshold out."""
        return io.Schema(
            node_id="VitrineNEMOSampleThreshold",
            display_name="NEMO Sample Threshold",
            category=CATEGORY,
            description="Samples ordinary captions in a few steps from several seeds: how far samples of one caption "
            "usually differ on this model. NEMO Detect compares a prompt with it.",
            search_aliases=["calibrate detection", "memorization threshold", "usual distance"],
            inputs=under_advanced(("first_seed",), [
                io.Model.Input("model", tooltip="The model to calibrate for."),
                io.Clip.Input("clip", tooltip="Its text encoder."),
                io.Latent.Input("latent", tooltip="Gives the size: connect Empty Latent Image."),
                PROMPTS, _SAMPLES, _STEPS, _CFG, _FIRST,
            ]),
            outputs=[
                SampleThresholdSocket.Output(
                    display_name="SAMPLE_THRESHOLD", tooltip="For NEMO Detect and NEMO Find Neurons, same model."
                ),
                io.String.Output(display_name="report", tooltip="What is usual, and where memorized begins."),
            ],
        )  # fmt: skip

    @classmethod
    def execute(
        cls, model: Any, clip: Any, latent: dict, prompts: str, samples: int, steps: int, cfg: float, first_seed: int
    ) -> io.NodeOutput:
        """Interrupt works between two forwards."""
        texts, blank = lines(prompts, 4), blank_latents(model, latent)[:1]
        config = FewStepConfig(samples, first_seed, steps, cfg)
        sampler, usual, after = sampler_of(model, literal(clip, ""), blank, config), UsualSamples(), progress()
        for start in range(0, len(texts), sampler.at_once):
            conds = prompt_conditions(model, clip, texts[start : start + sampler.at_once], blank)
            usual.add(sample_agreement(sampler, conds, shape_of(blank)))
            after(len(usual.distances), len(texts), None)
        threshold = usual.threshold(config, fingerprint(model))
        return io.NodeOutput(threshold, threshold.text())


class NEMODetect(io.ComfyNode):
    """Is a prompt memorized, judged by samples."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Model and prompt in; verdict, samples and map out."""
        return io.Schema(
            node_id="VitrineNEMODetect",
            display_name="NEMO Detect",
            category=CATEGORY,
            description="Samples a prompt in a few steps from several seeds: a memorized prompt gives one picture from "
            "every seed. Shows the samples, and where in the picture they agree.",
            search_aliases=["is this prompt memorized", "did my lora copy", "overfitting", "copyright"],
            is_output_node=True,
            hidden=[io.Hidden.unique_id],
            inputs=under_advanced(("samples", "steps", "cfg", "first_seed"), [
                io.Model.Input("model", tooltip="The model to test, with its LoRA."),
                io.Conditioning.Input("positive", tooltip="The prompt."),
                io.Conditioning.Input("negative", tooltip="An empty prompt, as the threshold's samples have."),
                io.Latent.Input("latent", tooltip="Gives the size: connect Empty Latent Image."),
                _SAMPLES, _STEPS, _CFG, _FIRST,
                SampleThresholdSocket.Input(
                    "threshold", optional=True,
                    tooltip="From NEMO Sample Threshold: a verdict needs it, and its settings are used then.",
                ),
                io.Vae.Input("vae", optional=True, tooltip="Connect it to see the samples."),
            ]),
            outputs=[
                io.Boolean.Output(
                    display_name="memorized", tooltip="True if the samples differ less than those of ordinary captions."
                ),
                io.Float.Output(display_name="distance", tooltip="How far the samples differ: less is more alike."),
                io.String.Output(display_name="report", tooltip="Verdict, samples, seeds, settings and threshold."),
                io.Image.Output(display_name="samples", tooltip="One of each seed (with a VAE)."),
                io.Image.Output(display_name="where", tooltip="In colour, where samples agree (VAE and threshold)."),
            ],
        )  # fmt: skip

    @classmethod
    def execute(
        cls, model: Any, positive: list, negative: list, latent: dict, samples: int, steps: int, cfg: float,
        first_seed: int, threshold: SampleThreshold | None = None, vae: Any = None,
    ) -> io.NodeOutput:  # fmt: skip
        """A few steps of ``samples`` rows, twice as many with guidance."""
        blank = blank_latents(model, latent)[:1]
        config = FewStepConfig(samples, first_seed, steps, cfg) if threshold is None else threshold.config
        sampler = sampler_of(model, negative, blank, config, threshold)
        (agreement,) = sample_agreement(sampler, [condition_of(model, positive, blank)], shape_of(blank), progress())
        pictures, where = _shown(model, vae, agreement)
        text = agreement.text()
        shown = text_on(text).as_dict()
        if vae is not None:
            first = config.first_seed
            names = [f"seed {first + i}" for i in range(len(pictures))]
            named = captioned(pictures, names)
            marked = [] if threshold is None else [*captioned(where, [f"{agreement.area:.0%} agrees"])]
            shown = ui.PreviewImage(torch.stack([*named, *marked]), cls=cls).as_dict() | shown
        memorized = agreement.threshold is not None and agreement.memorized
        return io.NodeOutput(memorized, agreement.distance, text, pictures, where, ui=shown)


def _shown(model: Any, vae: Any, agreement: Agreement) -> tuple[torch.Tensor, torch.Tensor]:
    """IMAGE of the samples, and of the first with what all agree on in colour."""
    assert agreement.samples is not None
    if vae is None:
        return torch.zeros(1, 8, 8, 3), torch.zeros(1, 8, 8, 3)
    pictures = decode(model, vae, agreement.samples.to(model.load_device))
    if agreement.threshold is None:
        return pictures, torch.zeros_like(pictures[:1])
    return pictures, overlay(pictures[0].movedim(-1, 0), agreement.map).movedim(0, -1)[None]


NODES = [NEMOSampleThreshold, NEMODetect]
