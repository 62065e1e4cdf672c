"""Sampling with control: a guider for Eq. 2, and one node that has it all."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch
from comfy_api.latest import io, ui

from ..engine.control import ControlWarning, GammaConfig, GuidanceConfig, SizeCondition, trained_settings
from ..engine.diffusion.guidance import scale_for_size
from ..engine.io.charts import curve_picture
from .comfy.carried import with_foreign
from .comfy.conditioning import PIXELS, with_sizes
from .comfy.control import weighted, weighting_of
from .comfy.control_guider import ControlGuider, run
from .comfy.model import latents_to_sample
from .comfy.schedule import SAMPLERS, SCHEDULERS, clock_of, run_sigmas
from .config_inputs import input_of, inputs_of
from .control_inputs import CATEGORY, GAMMA, pixels, reference_of
from .sockets import under_advanced

_STRENGTHS = [
    input_of(GuidanceConfig, "scale", "cfg", default=5.0),
    *inputs_of(GuidanceConfig, "size_guidance", "nesting"),
]
_NEGATIVE_SIZES = input_of(GuidanceConfig, "negative_sizes", optional=True)


class ControlCFGGuider(io.ComfyNode):
    """Guidance with a separate strength for control."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Prompts and strengths in."""
        return io.Schema(
            node_id="VitrineControlCFGGuider",
            display_name="Size CFG Guider",
            category=CATEGORY,
            description="Guides by the prompt and, with a separate strength, by size, crop and flip; skips "
            "evaluations that change nothing.",
            search_aliases=["control guider", "dual cfg", "size guidance", "control guidance strength"],
            inputs=[
                io.Model.Input("model", tooltip="From Size Weight Schedule or Load Size Checkpoint."),
                io.Conditioning.Input("positive", tooltip="The prompt, with Size and Crop Values."),
                io.Conditioning.Input("negative", tooltip="The negative prompt; negative_sizes says its sizes."),
                *_STRENGTHS,
                _NEGATIVE_SIZES,
            ],
            outputs=[io.Guider.Output(display_name="GUIDER", tooltip="For SamplerCustomAdvanced.")],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        positive: list,
        negative: list,
        cfg: float,
        size_guidance: float,
        nesting: str,
        negative_sizes: str = "picture",
    ) -> io.NodeOutput:
        """Eq. 2; the null control is derived from the positive."""
        config = GuidanceConfig(cfg, size_guidance, nesting, negative_sizes=negative_sizes)
        return io.NodeOutput(ControlGuider(model, positive, negative, config))


class ControlConditionedSampler(io.ComfyNode):
    """All of control conditioning in one sampler."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """What KSampler takes, the size conditions, the curve and the strengths."""
        return io.Schema(
            node_id="VitrineControlConditionedSampler",
            display_name="Size-Conditioned Sampler (Control)",
            category=CATEGORY,
            description="Samples with size and crop weighted over the noise level; shows the weight of every step.",
            search_aliases=[
                "berrada", "size conditioned sampler", "sdxl size sampler", "ksampler control", "micro conditioning",
                "original size", "sharp", "cropped heads",
            ],
            inputs=under_advanced((
                "sampler_name", "scheduler", "denoise", "nesting", "crop_left", "crop_top", "flip", "form", "clock",
                "reference", "reference_width", "reference_height", "upscale", "negative_sizes",
            ), [
                io.Model.Input("model", tooltip="SDXL, PixArt with size conditioning, or a model with a size "
                                                "checkpoint."),
                io.Conditioning.Input("positive", tooltip="The prompt; this node tells it the sizes below."),
                io.Conditioning.Input("negative", tooltip="The negative prompt; negative_sizes says its sizes."),
                io.Latent.Input("latent_image", tooltip="Size of the picture, or a picture to start from."),
                io.Int.Input("seed", default=0, min=0, max=2**64 - 1, control_after_generate=True, tooltip="Of noise."),
                io.Int.Input("steps", default=20, min=1, max=10000, tooltip="Sampling steps."),
                *_STRENGTHS,
                io.Combo.Input("sampler_name", options=SAMPLERS, tooltip="As in KSampler."),
                io.Combo.Input("scheduler", options=SCHEDULERS, tooltip="As in KSampler."),
                io.Float.Input(
                    "denoise", default=1.0, min=0.01, max=1.0, step=0.01, tooltip="Below 1 starts from the picture.",
                ),
                pixels("width", 1024, 0, "Width the picture is said to have had; 0 is its own."),
                pixels("height", 1024, 0, "Height the picture is said to have had; 0 is its own."),
                pixels("crop_left", 0, 0, "Pixels cropped at the left."),
                pixels("crop_top", 0, 0, "Pixels cropped at the top."),
                io.Boolean.Input("flip", default=False, tooltip="Condition on a mirrored picture; only size "
                                                                "checkpoints read it."),
                *GAMMA,
                io.Float.Input(
                    "upscale", default=1.0, min=0.1, max=16.0, step=0.05, advanced=True,
                    tooltip="Times larger than the size cfg was chosen for: cfg becomes 1 + upscale (cfg - 1).",
                ),
                _NEGATIVE_SIZES,
            ]),
            outputs=[
                io.Latent.Output(display_name="LATENT", tooltip="The sampled latent."),
                io.Image.Output(display_name="curve", tooltip="Weight of the size over the run's noise levels."),
                io.String.Output(
                    display_name="report", tooltip="Each step's timestep, noise level, weight and network calls."
                ),
            ],
        )  # fmt: skip

    @classmethod
    def execute(
        cls,
        model: Any,
        positive: list,
        negative: list,
        latent_image: dict,
        seed: int,
        steps: int,
        cfg: float,
        size_guidance: float,
        nesting: str,
        sampler_name: str,
        scheduler: str,
        denoise: float,
        width: int,
        height: int,
        crop_left: int,
        crop_top: int,
        flip: bool,
        form: str,
        alpha: float,
        clock: str,
        reference: str,
        reference_width: int,
        reference_height: int,
        upscale: float = 1.0,
        negative_sizes: str = "picture",
    ) -> io.NodeOutput:
        """Size and Crop Values, Size Weight Schedule, Size CFG Guider and a sampler in a row."""
        latents_to_sample(model, latent_image)
        gamma = GammaConfig(form, alpha, clock=clock)
        model, gamma, warned = _prepared(model, gamma, reference_of(reference, reference_width, reference_height))
        size = tuple(side * PIXELS for side in latent_image["samples"].shape[-2:])
        sizes = SizeCondition((height or size[0], width or size[1]), (crop_top, crop_left), size, flip)
        config = GuidanceConfig(scale_for_size(cfg, upscale), size_guidance, nesting, negative_sizes=negative_sizes)
        guider = ControlGuider(model, with_sizes(positive, sizes, size), negative, config)
        sigmas = run_sigmas(model, sampler_name, scheduler, steps, denoise)
        sampled = run(guider, latent_image, seed, sampler_name, sigmas)
        drawn = _curve(model, gamma, sigmas)
        summary = "\n".join([*warned, f"guidance {config.scale:g}", *_lines(guider)])
        summary = with_foreign(summary, positive, negative)
        return io.NodeOutput(sampled, drawn, summary, ui=ui.PreviewImage(drawn, cls=cls))


def _lines(guider: ControlGuider) -> list[str]:
    log = guider.log
    steps = [f"t {s.t:6.1f}  sigma {s.sigma:8.4f}  gamma {s.gamma:.4f}  evaluations {s.evaluations}" for s in log]
    return [f"{sum(s.evaluations for s in log)} evaluations", *steps]


def _prepared(model: Any, gamma: GammaConfig, reference: Any) -> tuple[Any, GammaConfig, list[str]]:
    """The model with a curve; a checkpoint's own wins over the widgets, and the summary says so."""
    before = weighting_of(model)
    if before is None or before.checkpoint is None:
        return weighted(model, gamma, reference), gamma, []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ControlWarning)
        gamma, _ = trained_settings(before.checkpoint.metadata, gamma)
    return model, gamma, [str(w.message) for w in caught]


def _curve(model: Any, gamma: GammaConfig, sigmas: torch.Tensor) -> torch.Tensor:
    """IMAGE (1, H, W, 3)."""
    levels = sigmas[sigmas > 0]
    weights = gamma.at(clock_of(model.get_model_object("model_sampling"))(levels)).tolist()
    points = [(math.log10(s), w) for s, w in zip(levels.tolist(), weights, strict=True)]
    title = (
        f"weight of the size, {len(points)} steps, {gamma.form} alpha {gamma.alpha:g}; a run goes from right to left"
    )
    picture = curve_picture(points, title, "log10 sigma", "gamma")
    return torch.from_numpy(np.asarray(picture).astype(np.float32) / 255)[None]


SAMPLING = [ControlCFGGuider, ControlConditionedSampler]
