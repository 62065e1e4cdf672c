"""Spaces and what belongs in them: build one from a folder of LoRAs, train directions, turn a picture into a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from comfy_api.latest import io

from ..engine.errors import refuse
from ..engine.settings.w2w_options import preset as named_preset
from ..engine.w2w import (
    BuildConfig,
    InvertConfig,
    Posterior,
    Space,
    W2WModel,
    described,
    direction,
    invert_below,
    latent_mask,
    member_names,
    partial_inversion,
    quality,
    reach,
    with_directions,
)
from ..engine.w2w.space.directions import METHODS, beats_chance
from ..engine.w2w.space.labels import parse_labels
from .comfy import saved
from .comfy import w2w as comfy_w2w
from .comfy.carried import with_foreign
from .comfy.conditioning import condition_of
from .comfy.model import allow_gradients, denoiser_of, differentiable, encode, encode_samples
from .comfy.pictures import as_masks, as_pictures
from .comfy.progress import progress, text_on
from .config_inputs import input_of, inputs_of, settings_from, values_of, with_values
from .sockets import W2WModelSocket, W2WSpaceSocket, under_advanced
from .w2w import CATEGORY, SPACE

_CUSTOM = "custom"


class BuildSpace(io.ComfyNode):
    """A folder of LoRAs becomes a space."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """A folder in; the space and its summary out."""
        return io.Schema(
            node_id="VitrineBuildW2WSpace",
            display_name="Build LoRA Space (W2W)",
            category=CATEGORY,
            is_output_node=True,  # what it shows can be all one wants
            description="Principal components of all LoRAs in a folder below models/loras: kohya, diffusers, PEFT and "
            "ComfyUI names, any ranks. Bad files are left out and named. Saved in models/w2w.",
            hidden=[io.Hidden.unique_id],
            inputs=under_advanced(("components", "linked"), [
                io.Combo.Input("folder", options=list(comfy_w2w.lora_folders()) or ["no folder with two LoRAs"],
                               tooltip="A folder below models/loras with LoRAs of one kind and one base model."),
                io.String.Input("name", default="my_space", tooltip="File name in models/w2w."),
                *inputs_of(BuildConfig, "mode", "components", "base"),
                io.Model.Input("model", optional=True,
                               tooltip="The base model, from a checkpoint loader: only with it DoRAs are read too."),
                *inputs_of(BuildConfig, "linked", optional=True),
            ]),
            outputs=[
                W2WSpaceSocket.Output(display_name="SPACE", tooltip="Also saved, for Load LoRA Space (W2W)."),
                io.String.Output(display_name="report", tooltip="What was found, what was left out, how it was built."),
            ],
        )  # fmt: skip

    @classmethod
    def validate_inputs(cls, folder: str | None = None) -> bool | str:
        """What to put where, as after opening a template: a folder that one does not have yet."""
        if folder is None or folder in comfy_w2w.lora_folders():
            return True
        remedy = f"put them into models/loras/{folder}, press R in the page, or choose another folder"
        return f"folder: there is no {folder} with two LoRAs or more; {remedy}"

    @classmethod
    def fingerprint_inputs(cls, folder: str, **others: Any) -> str:
        """Runs again when the folder has other LoRAs, or one of them has changed."""
        return saved.stamp(comfy_w2w.lora_folders().get(folder))

    @classmethod
    def execute(cls, folder: str, name: str, model: Any = None, **options: Any) -> io.NodeOutput:
        """``build_space``; after an interruption it resumes."""
        built = comfy_w2w.build(folder, name, settings_from(BuildConfig, options), model)
        return io.NodeOutput(built.space, built.summary(), ui=text_on(built.summary()))


def learned(label: str, balanced: float, models: int) -> str:
    """Whether a slider learned anything from so many labelled models, and what to do where it did not."""
    right = f"right for {balanced:.0%} of models left out of training, both kinds counting equally; chance is 50 %"
    if beats_chance(balanced, models):
        return f"{label} works: {right} ({models} labelled models)"
    return f"{label} is useless: {right}. Label more than these {models} models, or look whether the labels are right"


class TrainDirection(io.ComfyNode):
    """A named slider from labelled models."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Space and labels in; the space with one more direction out."""
        return io.Schema(
            node_id="VitrineTrainW2WDirection",
            display_name="Slider from Labels (W2W)",
            category=CATEGORY,
            is_output_node=True,  # what it shows can be all one wants
            description="Learns what an attribute is in a space from labels of its models: two groups of files, or a "
            "number for each (scores of any kind).",
            hidden=[io.Hidden.unique_id],
            inputs=[
                SPACE,
                io.String.Input("label", default="my attribute", tooltip="What the slider is called."),
                io.String.Input("labels", default="", multiline=True,
                                tooltip="One a line: file name or pattern, then a number: old_* 1, young_* 0."),
                io.Combo.Input("method", options=list(METHODS), default="means",
                               tooltip="least_squares is the paper's; logistic needs scikit-learn; means is the "
                               "difference of two groups, best for few labels."),
                io.Int.Input("components", default=0, min=0, max=100_000,
                             tooltip="Components used; 0: a third of the number of models."),
                io.String.Input("save_as", default="", tooltip="Save the space under this name; empty saves nothing."),
            ],
            outputs=[
                W2WSpaceSocket.Output(display_name="SPACE", tooltip="With the direction, for Person Sliders (W2W)."),
                io.String.Output(display_name="report", tooltip="Held-out accuracy, reach, overlap with the others."),
            ],
        )  # fmt: skip

    @classmethod
    def execute(
        cls, space: Space, label: str, labels: str, method: str, components: int, save_as: str
    ) -> io.NodeOutput:
        """``direction`` and its ``quality``."""
        y, used = parse_labels(labels, member_names(space)), components or None
        if not label.strip():
            raise refuse("label", label, "a name for the slider", "write one")
        vector = direction(space, y, method, used)
        held_out = quality(space, {label: y}, method, used)
        extended = with_directions(space, {label.strip(): vector})
        known = int((~y.isnan()).sum())
        lines = [learned(label, held_out.balanced[label], known), f"training models reach {reach(space, vector):.1f}"]
        lines += overlaps(space, vector)
        if save_as:
            lines.append(f"saved: {comfy_w2w.save_space(extended, save_as)}")
        text = "\n".join(lines)
        return io.NodeOutput(extended, text, ui=text_on(text))


def overlaps(space: Space, vector: torch.Tensor) -> list[str]:
    """A line for each slider of the space that a new direction (K,) would move too."""
    cosines = {o: float(torch.nn.functional.cosine_similarity(vector, v, dim=0)) for o, v in space.directions.items()}
    return [
        f"overlaps with {other}: cosine {cosine:+.2f}; protect it in Person Sliders (W2W)"
        for other, cosine in cosines.items()
        if abs(cosine) > 0.2
    ]


class W2WInvert(io.ComfyNode):
    """One picture becomes a model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """A picture in; the model of the space that explains it out."""
        return io.Schema(
            node_id="VitrineW2WInvert",
            display_name="Person from Picture (W2W)",
            category=CATEGORY,
            is_output_node=True,  # what it shows can be all one wants
            description="Finds the model of the space that fits one picture, for example the person in it; a mask "
                        "keeps the background out. Interrupting keeps the best so far; the same inputs, seed included, "
                        "resume there.",
            hidden=[io.Hidden.unique_id],
            inputs=under_advanced(("together", "posterior"), [
                io.Model.Input("model", tooltip="The base model the space was made for."),
                io.Vae.Input("vae", tooltip="Its VAE."),
                io.Conditioning.Input("positive", tooltip="The prompt the LoRAs were trained with: sks person."),
                SPACE,
                io.Image.Input("image", tooltip="One picture; of a batch each becomes a model, unless together."),
                with_values(
                    "preset", ["quick", "photo", "out_of_distribution", _CUSTOM],
                    {_CUSTOM: [
                        *inputs_of(InvertConfig, "steps", "lr"),
                        input_of(InvertConfig, "batch", default=4),
                        *inputs_of(InvertConfig, "components", "prior"),
                    ]},
                    tooltip="photo, out_of_distribution: the paper's. quick: fewer steps, larger batches. "
                            "custom takes the values below.",
                ),
                input_of(InvertConfig, "seed", control_after_generate=True),
                io.Mask.Input("mask", optional=True, tooltip="White where the subject is; same size as the picture."),
                *inputs_of(InvertConfig, "together", "posterior", optional=True),
            ]),
            outputs=[
                W2WModelSocket.Output(
                    display_name="W2W_MODEL",
                    tooltip="For Apply Person (W2W), Person Sliders (W2W), Blend People (W2W)."
                ),
                io.String.Output(display_name="report", tooltip="Loss on held-out noise, nearest training models."),
            ],
        )  # fmt: skip

    @classmethod
    def execute(
        cls,
        model: Any,
        vae: Any,
        positive: list,
        space: Space,
        image: torch.Tensor,
        preset: dict[str, Any],
        mask: torch.Tensor | None = None,
        **options: Any,
    ) -> io.NodeOutput:
        """``invert_below`` outside inference mode: the same inputs go on where they were stopped."""
        choice = preset["preset"]
        if choice == _CUSTOM:
            config = settings_from(InvertConfig, preset, antithetic=preset["batch"] > 1)
        else:
            config = named_preset(choice)
        config = replace(config, **values_of(InvertConfig, options))
        image = as_pictures(image)
        mask = None if mask is None else as_masks(mask, image)
        latents = encode(model, vae, image)
        small = None if mask is None else latent_mask(mask, *latents.shape[-2:])
        denoiser, cond = denoiser_of(model), condition_of(model, positive, latents[:1])
        trained = latents if config.posterior == "mean" else _posterior(model, vae, image, latents)
        with torch.inference_mode(False), differentiable():  # nodes run in inference mode, where there are no gradients
            allow_gradients(model)
            try:
                inversion = invert_below(
                    saved.folder(comfy_w2w.FOLDER),
                    denoiser,
                    space,
                    trained.clone(),
                    cond.to(model.load_device, copy=True),
                    config,
                    None if small is None else small.clone(),
                    progress=progress(model),
                )
            except BaseException as error:  # the run stops here; Load Person (W2W) finds what was best so far
                partial = partial_inversion(error)
                if partial is not None and partial.steps:
                    best = W2WModel(partial.coefficients, space.identity, ({"invert": {"steps": partial.steps}},))
                    best.save(saved.folder(comfy_w2w.FOLDER) / "interrupted.w2wmodel.safetensors")
                raise
        inverted = W2WModel(
            inversion.coefficients, space.identity, ({"invert": {"steps": inversion.steps, "preset": choice}},)
        )
        first, last = inversion.losses[0][1][0], min(row[0] for _, row in inversion.losses)
        text = f"{inversion.steps} steps: held-out loss {first:.4f} -> {last:.4f}\n"
        text = with_foreign(text + described(space, inverted.coefficients), positive)
        return io.NodeOutput(inverted, text, ui=text_on(text))


def _posterior(model: Any, vae: Any, image: torch.Tensor, means: torch.Tensor) -> Posterior:
    """Scaled means and deviations; latents are scaled linearly, so that noise of 1 adds one deviation."""
    return Posterior(means, encode_samples(model, vae, image, torch.ones) - means)


NODES: list[type[io.ComfyNode]] = [BuildSpace, TrainDirection, W2WInvert]
