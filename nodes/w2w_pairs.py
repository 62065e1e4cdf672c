"""A slider from pictures before and after; those from labels are in ``w2w_make.py``."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io

from ..engine.errors import refuse
from ..engine.w2w import PairConfig, Pairs, Space, W2WModel, blended, train_pair_slider, with_pair_slider
from .comfy import w2w as comfy_w2w
from .comfy.carried import with_foreign
from .comfy.conditioning import condition_of
from .comfy.model import allow_gradients, denoiser_of, differentiable, encode
from .comfy.pictures import as_pictures
from .comfy.progress import progress, text_on
from .config_inputs import input_of, inputs_of, settings_from
from .sockets import W2WModelSocket, W2WSpaceSocket, under_advanced
from .w2w import CATEGORY, SPACE
from .w2w_make import overlaps


class TrainSlider(io.ComfyNode):
    """A named slider from pairs of pictures."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Model, space and pictures before and after in; the space with one more direction out."""
        return io.Schema(
            node_id="VitrineTrainW2WSlider",
            display_name="Slider from Pictures (W2W)",
            category=CATEGORY,
            is_output_node=True,  # what it shows can be all one wants
            description="Makes a slider from pictures before and after: the change is learned, and what stays the same "
            "in both is left alone.",
            search_aliases=[
                "weights2weights", "own slider", "make slider", "slider from pictures", "make a slider from pictures",
                "before and after", "concept slider", "image pair slider", "train slider", "lora slider",
            ],
            hidden=[io.Hidden.unique_id],
            inputs=under_advanced(("start_timestep", "save_as", "lr"), [
                io.Model.Input("model", tooltip="The base model the space was made for."),
                io.Vae.Input("vae", tooltip="Its VAE."),
                io.Conditioning.Input(
                    "positive", tooltip="What the pictures show apart from the change: sks person, or a face."
                ),
                SPACE,
                io.Image.Input("before", tooltip="Pictures without the change."),
                io.Image.Input("after", tooltip="The same pictures with it, in the same order and of the same size."),
                io.String.Input("label", default="my slider", tooltip="What the slider is called."),
                *inputs_of(PairConfig, "steps"),
                input_of(PairConfig, "seed", control_after_generate=True),
                *inputs_of(PairConfig, "start_timestep"),
                io.String.Input("save_as", default="", tooltip="Save the space under this name; empty saves nothing."),
                *inputs_of(PairConfig, "lr"),
                W2WModelSocket.Input("w2w_model", optional=True,
                                     tooltip="Who is in the pictures. None: the mean of the space's models."),
            ]),
            outputs=[
                W2WSpaceSocket.Output(display_name="SPACE", tooltip="With the slider, for Person Sliders (W2W)."),
                io.Float.Output(display_name="strength", tooltip="At this strength it does what the pictures show."),
                io.String.Output(display_name="report", tooltip="Strength, overlap with the other sliders."),
            ],
        )  # fmt: skip

    @classmethod
    def execute(
        cls,
        model: Any,
        vae: Any,
        positive: list,
        space: Space,
        before: torch.Tensor,
        after: torch.Tensor,
        label: str,
        save_as: str,
        w2w_model: W2WModel | None = None,
        **options: Any,
    ) -> io.NodeOutput:
        """``train_pair_slider`` outside inference mode; interrupt works between two steps."""
        name = label.strip()
        if not name:
            raise refuse("label", label, "a name for the slider", "write one")
        before, after = as_pictures(before, "before"), as_pictures(after, "after")
        shown = blended(before.movedim(-1, 1), after.movedim(-1, 1)).movedim(2, -1)
        latents = torch.stack([encode(model, vae, row) for row in shown])
        cond = condition_of(model, positive, latents[0, :1])
        rows = torch.zeros(1, space.dimension) if w2w_model is None else w2w_model.belongs(space).coefficients
        with torch.inference_mode(False), differentiable():  # nodes run in inference mode, where there are no gradients
            allow_gradients(model)
            config = settings_from(PairConfig, options)
            pairs = Pairs(latents.clone(), cond.to(model.load_device, copy=True), rows.clone())
            change = train_pair_slider(denoiser_of(model), space, pairs, config, progress=progress(model))
        extended = with_pair_slider(space, name, change)
        strength = float(extended.info["pair_sliders"][name])
        lines = [f"{name}: {len(before)} pairs, {config.steps} steps; does what they show at strength {strength:.2f}"]
        lines += overlaps(space, extended.directions[name])
        if save_as:
            lines.append(f"saved: {comfy_w2w.save_space(extended, save_as)}")
        text = with_foreign("\n".join(lines), positive)
        return io.NodeOutput(extended, strength, text, ui=text_on(text))


NODES: list[type[io.ComfyNode]] = [TrainSlider]
