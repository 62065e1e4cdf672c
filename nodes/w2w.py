"""Models as points of a space: load it, sample, edit, blend, apply to MODEL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from comfy_api.latest import io

from ..engine.errors import refuse
from ..engine.w2w import (
    EditConfig,
    SampleConfig,
    Space,
    SpaceMap,
    W2WModel,
    at_place,
    conditioned,
    contents,
    described,
    edit,
    edit_step,
    listed,
    map_of,
    map_picture,
    sample,
    sliders_of,
    usual_sampling,
)
from ..engine.w2w import (
    blend as blended,
)
from .comfy import choices, people
from .comfy import w2w as comfy_w2w
from .comfy.panel_state import HIDDEN, marked
from .comfy.progress import text_on
from .comfy.saved import lora_files
from .config_inputs import inputs_of, values_of
from .sockets import W2WModelSocket, W2WSpaceSocket, under_advanced

CATEGORY = "Vitrine/LoRA spaces"
SPACE = W2WSpaceSocket.Input("space", tooltip="From Load LoRA Space (W2W) or Build LoRA Space (W2W).")
MODEL = W2WModelSocket.Input("w2w_model", tooltip="A model of that space: sampled, inverted, edited or loaded.")
SLIDERS = 4


def _parts(text: str) -> list[str]:
    """The texts between commas or line ends."""
    return text.replace("\n", ",").split(",")


def place_in(text: str) -> tuple[float, float] | None:
    """A place of the map, "x y"; None for an empty text."""
    words = text.replace(",", " ").split()
    if not words:
        return None
    try:
        x, y = map(float, words)
        on_the_map = -1 <= x <= 1 and -1 <= y <= 1
    except ValueError:
        on_the_map = False
    if not on_the_map:
        raise refuse("map_position", text, "two numbers from -1 to 1, or nothing", "drag the person on the map")
    return x, y


def moved(space: Space, model: W2WModel, inputs: Mapping[str, Any]) -> W2WModel:
    """The model by *Person Sliders (W2W)*'s inputs: dragged to its place on the map, then along the sliders."""
    strengths: dict[str, float] = {}
    pairs = [(str(inputs.get(f"label_{i}", "")), inputs.get(f"strength_{i}", 0.0)) for i in range(1, SLIDERS + 1)]
    for label, strength in [*pairs, *sliders_of(_parts(str(inputs.get("more", ""))), ":").items()]:
        if label.strip():
            strengths[label.strip()] = strengths.get(label.strip(), 0.0) + float(strength)
    protect = tuple(p.strip() for p in str(inputs.get("protect", "")).split(",") if p.strip())
    config = EditConfig(protect)
    place, rows = place_in(str(inputs.get("map_position", ""))), model.belongs(space).coefficients
    if place is not None:
        drawn = usual_map(space)
        rows = torch.stack([at_place(space, drawn, row, place) for row in rows])
        model = model.moved_to(rows, place=list(place))
    return model.moved_to(edit(space, rows, strengths, config), **edit_step(strengths, config))


def usual_map(space: Space) -> SpaceMap:
    """The map in the space's file, or where it has none the first two components."""
    return map_of(space, method="auto" if "map" in space.info else "components")


class LoadSpace(io.ComfyNode):
    """A space from models/w2w, or the one that ships."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """A file in; the space and what it holds out."""
        files = comfy_w2w.space_files()
        return io.Schema(
            node_id="VitrineLoadW2WSpace",
            display_name="Load LoRA Space (W2W)",
            category=CATEGORY,
            is_output_node=True,  # what it shows can be all one wants
            description="Loads a space of models: principal directions of many LoRAs of one kind, with named "
            "attribute directions. 520 people of the portraits model ship with the pack.",
            hidden=[io.Hidden.unique_id],
            inputs=[
                io.Combo.Input("space_file", options=files or ["none built yet"], tooltip="A file in models/w2w."),
                io.Int.Input(
                    "components",
                    default=0,
                    min=0,
                    max=100_000,
                    tooltip="Use only the first principal components; 0 takes all.",
                ),
                io.String.Input(
                    "colour_by",
                    default="",
                    optional=True,
                    tooltip="Label that colours the map, such as beard; empty: one colour.",
                ),
            ],
            outputs=[
                W2WSpaceSocket.Output(display_name="SPACE", tooltip="For the other W2W nodes."),
                io.String.Output(display_name="report", tooltip="Models, components, variance and directions."),
                io.Image.Output(display_name="map", tooltip="All models in a plane, neighbours near one another."),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, space_file: str, **others: Any) -> str:
        """Runs again when the file, or a LoRA that it links to, has changed."""
        return comfy_w2w.space_stamp(space_file)

    @classmethod
    def execute(cls, space_file: str, components: int, colour_by: str = "") -> io.NodeOutput:
        """Load, say what it is, and draw the map in the file, or where it has none the first two components."""
        space = comfy_w2w.space(space_file)
        space = space.first(components) if components else space
        text = contents(space)
        return io.NodeOutput(space, text, _map(space, colour_by.strip()), ui=text_on(text))


def _map(space: Space, label: str) -> torch.Tensor:
    """(1, H, W, 3); white where the space holds too few models for a map."""
    if len(space.coefficients) < 3:
        return torch.ones(1, 768, 768, 3)
    return torch.from_numpy(np.asarray(map_picture(usual_map(space), label)) / 255).float()[None]


class W2WSample(io.ComfyNode):
    """A new model, sampled from the space."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Space and seed in; a model and its neighbours out."""
        return io.Schema(
            node_id="VitrineW2WSample",
            display_name="New Person (W2W)",
            category=CATEGORY,
            is_output_node=True,  # what it shows can be all one wants
            description="Samples a new model of the space, for example a person who does not exist, the same in every "
                        "picture. Says which training models are nearest.",
            hidden=[io.Hidden.unique_id],
            inputs=under_advanced(("components", "truncation", "attributes", "emphasis", "inherit"), [
                SPACE,
                io.Int.Input("seed", default=0, min=0, max=2**32, control_after_generate=True,
                             tooltip="Which model; the same seed always gives the same one."),
                *inputs_of(SampleConfig, "spread", "components", "truncation"),
                io.String.Input("wanted", default="", multiline=True,
                                tooltip="Attributes it must have, in deviations: beard: 1.5, glasses: -1"),
                *inputs_of(SampleConfig, "attributes"),
                *inputs_of(SampleConfig, "emphasis", "inherit", default=-1.0, optional=True),
            ]),
            outputs=[
                W2WModelSocket.Output(
                    display_name="W2W_MODEL",
                    tooltip="For Apply Person (W2W), Person Sliders (W2W), Blend People (W2W)."
                ),
                io.String.Output(display_name="report", tooltip="Nearest training models and strongest attributes."),
            ],
        )  # fmt: skip

    @classmethod
    def execute(
        cls,
        space: Space,
        seed: int,
        spread: float,
        wanted: str,
        attributes: str = "auto",
        **options: Any,
    ) -> io.NodeOutput:
        """``sample``, then ``conditioned``."""
        config = usual_sampling(
            space, attributes=None if attributes == "auto" else attributes, **values_of(SampleConfig, options)
        )
        config = replace(config, spread=spread * config.spread)
        targets = sliders_of(_parts(wanted), ":")
        rows = conditioned(space, sample(space, [seed], config), targets)
        model = W2WModel(rows, space.identity, ({"sample": {"seeds": [seed], **config.to_dict()} | targets},))
        text = described(space, model.coefficients)
        return io.NodeOutput(model, text, ui=text_on(text))


class W2WEdit(io.ComfyNode):
    """Sliders on a model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Space, model and sliders in; the edited model out."""
        pairs: list[Any] = []
        for i in range(1, SLIDERS + 1):
            pairs += [
                io.String.Input(
                    f"label_{i}", default="", tooltip="A direction of the space (see its report); empty for none."
                ),
                io.Float.Input(
                    f"strength_{i}",
                    default=0.0,
                    min=-20.0,
                    max=20.0,
                    step=0.05,
                    round=0.01,
                    tooltip="In standard deviations of the training models, which reach about 3.",
                ),
            ]
        return io.Schema(
            node_id="VitrineW2WEdit",
            display_name="Person Sliders (W2W)",
            category=CATEGORY,
            is_output_node=True,  # what it shows can be all one wants
            description="Moves a model along attribute directions: the same person with a beard, in every picture. "
            "Several sliders at once; their order does not matter.",
            inputs=under_advanced(("more", "map_position"), [
                SPACE, MODEL, *pairs,
                io.String.Input("protect", default="", tooltip="Labels that must not change, separated by commas."),
                io.String.Input("more", default="", multiline=True, optional=True,
                                tooltip="Further sliders, label: strength, separated by commas or lines."),
                io.String.Input("map_position", default="", optional=True,
                                tooltip="Where on the space's map the model is moved, x y from -1 to 1; empty leaves "
                                        "it where it is. Press the button and drag."),
                io.Model.Input("model", optional=True,
                               tooltip="Only for the picture in the panel: the base model of your own space."),
                io.Conditioning.Input("positive", optional=True, tooltip="Only for that picture: the prompt."),
                io.Vae.Input("vae", optional=True, tooltip="Only for that picture: the VAE of your own model."),
                io.Combo.Input("student", options=[people.ORDINARY_STEPS, *lora_files()], optional=True,
                               tooltip="Only for the picture while you drag: a one-step student of your own model, a "
                               "LoRA that One-Step Sampler (EMD) knows. Without one the picture comes on release."),
                io.Conditioning.Input("negative", optional=True,
                                      tooltip="Only for that picture: the negative prompt; without one there is no "
                                              "guidance."),
            ]),
            outputs=[
                W2WModelSocket.Output(display_name="W2W_MODEL", tooltip="The edited model; the input is unchanged."),
                io.String.Output(display_name="report", tooltip="Where it is now."),
            ],
            hidden=HIDDEN,
            has_intermediate_output=True,  # the panel learns what to show on a run from the cache, too
        )  # fmt: skip

    @classmethod
    def execute(
        cls,
        space: Space,
        w2w_model: W2WModel,
        protect: str,
        model: Any = None,
        positive: list | None = None,
        vae: Any = None,
        student: str = people.ORDINARY_STEPS,
        negative: list | None = None,
        **inputs: Any,
    ) -> io.NodeOutput:
        """``moved``; the panel on the page receives what the sliders act on."""
        choices.remember(cls.hidden, sorted(listed(space)))
        edited = moved(space, w2w_model, inputs | {"protect": protect})
        renderer, missing = people.renderer_of(space, model, positive, negative, vae, student)
        session = people.PanelSession(space, usual_map, w2w_model, partial(moved, space, w2w_model), renderer, missing)
        people.SESSIONS.remember(cls.hidden, session)
        text = described(space, edited.coefficients)
        return io.NodeOutput(edited, text, ui=marked(text_on(text), cls.hidden))


class W2WBlend(io.ComfyNode):
    """Between two models."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Two models and a blend in; one out."""
        return io.Schema(
            node_id="VitrineW2WBlend",
            display_name="Blend People (W2W)",
            category=CATEGORY,
            description="A model between two of the same space: a child of two people.",
            inputs=[
                SPACE,
                MODEL,
                W2WModelSocket.Input("other", tooltip="The second model, of the same space."),
                io.Float.Input(
                    "blend",
                    default=0.5,
                    min=-1.0,
                    max=2.0,
                    step=0.05,
                    tooltip="0 is the first, 1 the other; beyond exaggerates.",
                ),
            ],
            outputs=[W2WModelSocket.Output(display_name="W2W_MODEL", tooltip="The blend.")],
        )

    @classmethod
    def execute(cls, space: Space, w2w_model: W2WModel, other: W2WModel, blend: float) -> io.NodeOutput:
        """``blend``."""
        rows = [m.only(space) for m in (w2w_model, other)]
        return io.NodeOutput(w2w_model.moved_to(blended(rows, [1 - blend, blend])[None], blend=blend))


class ApplyW2W(io.ComfyNode):
    """A model of the space on MODEL."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """MODEL and a model of the space in; the patched MODEL out."""
        return io.Schema(
            node_id="VitrineApplyW2WModel",
            display_name="Apply Person (W2W)",
            category=CATEGORY,
            description="Turns MODEL into a model of the space, as an ordinary LoRA patch that stacks with LoRAs, NEMO "
            "and merges. With a late model, an edit begins at a chosen timestep and leaves the layout alone.",
            inputs=[
                io.Model.Input("model", tooltip="The base model the space was made for."),
                SPACE,
                MODEL,
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-2.0,
                    max=2.0,
                    step=0.05,
                    tooltip="As for a LoRA; 1 is the model itself.",
                ),
                *inputs_of(EditConfig, "start_timestep"),
                W2WModelSocket.Input(
                    "late_model", optional=True, tooltip="The edited model, from Person Sliders (W2W)."
                ),
            ],
            outputs=[io.Model.Output(display_name="MODEL", tooltip="A clone; the input stays as it was.")],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        space: Space,
        w2w_model: W2WModel,
        strength: float,
        start_timestep: float,
        late_model: W2WModel | None = None,
    ) -> io.NodeOutput:
        """Patched at once, or late inside each forward."""
        if late_model is not None:
            start_timestep = min(start_timestep, late_model.start)
        return io.NodeOutput(comfy_w2w.applied(model, space, w2w_model, late_model, start_timestep, strength))


NODES: list[type[io.ComfyNode]] = [LoadSpace, W2WSample, W2WEdit, W2WBlend, ApplyW2W]
