"""Models of a space as files: saved as LoRAs, loaded, encoded from somebody's LoRA."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io

from ..engine.errors import refuse
from ..engine.io.file_names import safe_name
from ..engine.w2w import (
    Space,
    W2WModel,
    change_kept,
    described,
    encode,
    layer_sizes,
    materialise,
    read_lora,
    slider_lora,
    write_lora,
)
from ..engine.w2w import member as training_model
from .comfy import saved
from .comfy import w2w as comfy_w2w
from .comfy.progress import text_on
from .sockets import W2WModelSocket, W2WSpaceSocket, under_advanced
from .w2w import CATEGORY, MODEL, SPACE

NO_LORA = "(the file above)"


class SaveW2WLora(io.ComfyNode):
    """A model of the space as LoRA files."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Space and model in; files out."""
        return io.Schema(
            node_id="VitrineSaveW2WLora",
            display_name="Save Person as LoRA (W2W)",
            category=CATEGORY,
            description="Writes a model as a LoRA into models/loras/vitrine, where Load LoRA lists it: in kohya names "
            "(ComfyUI, A1111, diffusers) or diffusers names, of any rank and precision. Load Person (W2W) lists the "
            "model itself, for later edits.",
            search_aliases=[
                "weights2weights", "export LoRA", "save identity", "save person", "merge lora", "lora slider export",
            ],
            is_output_node=True,
            hidden=[io.Hidden.unique_id],
            inputs=under_advanced(("rank", "dtype", "one_sided"), [
                SPACE, MODEL,
                io.String.Input("name", default="person", tooltip="File name without folder or ending."),
                io.Combo.Input("names", options=["auto", "kohya", "diffusers"], default="auto",
                               tooltip="auto: what most programs load, kohya for UNets. diffusers names of a UNet load "
                               "in diffusers only."),
                io.Int.Input("rank", default=0, min=0, max=4096, optional=True,
                             tooltip="At most this many factors a layer; 0 keeps the model exact. The preview says how "
                                     "much a rank keeps."),
                io.Combo.Input("dtype", options=["float32", "float16", "bfloat16"], default="float32", optional=True,
                               tooltip="Precision of the file; float16 halves it."),
                W2WModelSocket.Input("slider_from", optional=True,
                                     tooltip="With it the file is a slider: strength 0 is this model, 1 the other."),
                io.Boolean.Input("one_sided", default=False, optional=True,
                                 tooltip="Slider exact at strength 1; off: even from -1 to 1. The preview says what it "
                                 "misses."),
            ]),
            outputs=[io.String.Output(display_name="path", tooltip="The LoRA file.")],
        )  # fmt: skip

    @classmethod
    def execute(
        cls,
        space: Space,
        w2w_model: W2WModel,
        name: str,
        names: str,
        rank: int = 0,
        dtype: str = "float32",
        slider_from: W2WModel | None = None,
        one_sided: bool = False,
    ) -> io.NodeOutput:
        """Files are written whole; those of the same name are replaced."""
        coefficients = w2w_model.only(space)
        if slider_from is None:
            lora = materialise(space, coefficients, rank or None)
            kept = f"\nrank {rank} keeps {change_kept(space, coefficients, lora):.1%} of the change" if rank else ""
        else:
            before = slider_from.only(space)
            slider = slider_lora(space, before, coefficients, rank or None, one_sided)
            lora, kept = slider.lora, f"\n{slider.summary()}"
        path = write_lora(saved.lora_file(name), lora, names, dtype=getattr(torch, dtype))
        model_path = w2w_model.save(saved.folder(comfy_w2w.FOLDER) / f"{safe_name(name)}.w2wmodel.safetensors")
        return io.NodeOutput(str(path), ui=text_on(f"{saved.shown(path)}\n{saved.shown(model_path)}{kept}"))


class LoadW2WModel(io.ComfyNode):
    """A saved model, somebody's LoRA, or one of the training models."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """A file or a name in, the model out."""
        files = saved.listed(comfy_w2w.FOLDER, ".w2wmodel.safetensors")
        return io.Schema(
            node_id="VitrineLoadW2WModel",
            display_name="Load Person (W2W)",
            category=CATEGORY,
            is_output_node=True,  # what it shows can be all one wants
            description="Reads a model from models/vitrine_w2w; one of another space is refused when it is used. With "
                        "a space also encodes a LoRA of your own, and says how much of it the space covers, or takes a "
                        "training model by name.",
            search_aliases=["weights2weights", "load identity", "load person", "encode LoRA", "my LoRA", "member"],
            hidden=[io.Hidden.unique_id],
            inputs=[
                io.Combo.Input("file", options=files or ["none saved yet"],
                               tooltip="A saved model, unless a LoRA or a member is chosen below."),
                W2WSpaceSocket.Input("space", optional=True, tooltip="The space in which to find a LoRA or member."),
                io.Combo.Input("lora", options=[NO_LORA, *comfy_w2w.loras()], default=NO_LORA, optional=True,
                               tooltip="A LoRA in models/loras, to be encoded: the space's nearest model."),
                io.String.Input("member", default="", optional=True,
                                tooltip="A training model of the space by its name, such as person-0007."),
            ],
            outputs=[
                W2WModelSocket.Output(display_name="W2W_MODEL", tooltip="As it was saved, or encoded."),
                io.String.Output(display_name="report", tooltip="How much the space covers, nearest training models."),
            ],
        )  # fmt: skip

    @classmethod
    def fingerprint_inputs(cls, file: str, space: Any = None, lora: str = NO_LORA, member: str = "") -> str:
        """Runs again when the file has changed."""
        if lora != NO_LORA and not (member or "").strip():
            return saved.stamp_of("loras", lora)
        return "" if member else saved.changed(comfy_w2w.FOLDER, file)

    @classmethod
    def execute(cls, file: str, space: Space | None = None, lora: str = NO_LORA, member: str = "") -> io.NodeOutput:
        """Load or encode; broken files are named."""
        if lora == NO_LORA and not member.strip():
            model = W2WModel.load(saved.path_of(comfy_w2w.FOLDER, file))
            text = described(space, model.belongs(space).coefficients) if space is not None else ""
            return io.NodeOutput(model, text)
        if space is None:
            raise refuse("space", "none", "the space of the LoRA or member", "connect Load LoRA Space (W2W)")
        encoding = (
            training_model(space, member.strip())
            if member.strip()
            else encode(space, read_lora(comfy_w2w.lora_path(lora), sizes=layer_sizes(space)), lora)
        )
        text = encoding.summary(space)
        return io.NodeOutput(encoding.model, text, ui=text_on(text))


NODES: list[type[io.ComfyNode]] = [SaveW2WLora, LoadW2WModel]
