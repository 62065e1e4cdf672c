"""Look Inside (Activation Tap) nodes: read what is inside a model, for a picture or while it samples."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import torch
from comfy_api.latest import io, ui
from PIL import Image, ImageDraw

from ..engine.activations import Activations, PCABasis, TapConfig, massive_channels, pca_rgb
from ..engine.activations.correspondence import feature_maps
from ..engine.activations.gdf_protocol import PROTOCOLS
from ..engine.errors import VitrineError, refuse
from ..engine.io.file_names import safe_name
from ..engine.tracing.addresses import AUTO, resolve, sites_of
from .comfy import choices, saved
from .comfy.carried import foreign_keys
from .comfy.model import backbone_of
from .comfy.panel_state import HIDDEN, marked
from .comfy.patches import replaced_attention
from .comfy.pictures import as_pictures
from .comfy.progress import show_on, text_on
from .comfy.recording import Recorder, nothing_recorded, record_sampling
from .config_inputs import inputs_of
from .sockets import ActivationsSocket, RecorderSocket, under_advanced
from .tap_inputs import (
    HELP,
    added_selection,
    protocol_input,
    published_sites,
    remedy_inputs,
    selection_config,
    selection_inputs,
    tap_images,
)

CATEGORY = "Vitrine/activations"
_FOLDER = "vitrine_activations"
HALVES = ("cond", "uncond", "middle", "empty_negative_prompt", "null", "controlled_negative", "other")
"""What a recording calls the rows of a guider's conditionings."""


class ActivationTap(io.ComfyNode):
    """Tap a picture at one timestep."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Model, picture, prompt and layer in; activations and their picture out."""
        return io.Schema(
            node_id="VitrineActivationTap",
            display_name="Look Inside (Activation Tap)",
            category=CATEGORY,
            is_output_node=True,  # what it shows can be all one wants
            description="Noises a picture to one timestep, runs the model once, and keeps the activations of the "
                        "layers you name. The paper's message: which layer you tap matters more than anything else "
                        "(GDF, NeurIPS 2024).",
            inputs=under_advanced(("seed", "ensemble", "dtype", "modulate", "discard", "protocol"), [
                io.Model.Input("model", tooltip="Any SD1.x, SD2.x, SDXL, PixArt, SD3 or Flux model, LoRAs included."),
                io.Vae.Input("vae", tooltip="The model's VAE."),
                io.Image.Input("image", tooltip="One or more pictures; sides must be multiples of the VAE's factor."),
                io.Conditioning.Input("positive", tooltip="One plain prompt that fits the pictures."),
                *selection_inputs(),
                *inputs_of(TapConfig, "dtype", options=["float32", "float16"]),
                *remedy_inputs(),
                protocol_input(),
            ]),
            outputs=[
                ActivationsSocket.Output(display_name="ACTIVATIONS", tooltip="All tapped layers, for each picture."),
                io.Image.Output(display_name="IMAGE", tooltip="First layer as colours: three principal components."),
                io.String.Output(display_name="report", tooltip="Each layer with its size and massive channels."),
            ],
            hidden=HIDDEN,
            has_intermediate_output=True,
        )  # fmt: skip

    @classmethod
    def execute(
        cls,
        model: Any,
        vae: Any,
        image: torch.Tensor,
        positive: list,
        selection: str,
        layers: str,
        timestep: float,
        seed: int,
        ensemble: int,
        dtype: str,
        modulate: bool = False,
        discard: str = "",
        protocol: str = PROTOCOLS[0],
    ) -> io.NodeOutput:
        """Encode once, tap with ``tap_latents``, show the first site."""
        config = selection_config(selection, layers, timestep, seed, ensemble, (modulate, discard), dtype)
        backbone = backbone_of(model)
        choices.remember(cls.hidden, sites_of(backbone))
        resolve(backbone, list(config.addresses))
        taps = tap_images(model, vae, as_pictures(image), positive, config, protocol)
        drawn, shown = drawn_first(taps, cls)
        report = "\n".join(filter(None, (describe(taps), replaced_attention(model, taps), foreign_keys(positive))))
        return io.NodeOutput(taps, drawn, report, ui=marked(shown, cls.hidden))


def drawn_first(taps: Activations, cls: Any) -> tuple[Any, Any]:
    """IMAGE of the first site, and what the node shows; where only maps and text were tapped there is no picture."""
    if all(activation.grid is None for activation in taps.values()):
        return nothing_recorded(), text_on(describe(taps))
    drawn = picture(taps)
    return drawn, ui.PreviewImage(with_legend(drawn), cls=cls)


def describe(taps: Activations) -> str:
    """One line an address: name, rows, channels, grid; and the massive channels, if there are any."""
    lines = []
    for address, activation in taps.items():
        massive = massive_channels(activation.tensor) if activation.grid is not None else ()
        note = f"; massive channels: {' '.join(map(str, massive))}" if massive else ""
        lines.append(f"{address}: {' x '.join(map(str, activation.tensor.shape))}{note}")
    return "\n".join(lines)


class TapDuringSampling(io.ComfyNode):
    """A MODEL that records while it is sampled."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Model and layers in; a recording clone and its recorder out."""
        return io.Schema(
            node_id="VitrineTapDuringSampling",
            display_name="Tap During Sampling",
            category=CATEGORY,
            description="Records activations at chosen steps while a sampler runs. Sample with the MODEL output, then "
            "read the recorder with Collect Taps. The picture that comes out is the same, bit for bit.",
            inputs=[
                io.Model.Input("model", tooltip="The model to watch; other branches of the graph are not affected."),
                io.String.Input("layers", multiline=True, default=AUTO, tooltip=HELP),
                io.String.Input("record_steps", default="0 5 10 15 19",
                                tooltip="Steps of the run to keep, from 0; or 'all'."),
                io.Int.Input(
                    "first_step", default=0, min=0, max=10_000, optional=True,
                    tooltip="The number of the sampler's first step: start_at_step of KSampler (Advanced), so that "
                    "steps mean the same here.",
                ),
                added_selection("The layers of a published selection, or those typed above."),
            ],
            outputs=[
                io.Model.Output(display_name="MODEL", tooltip="Sample with this one."),
                RecorderSocket.Output(display_name="recorder", tooltip="Read it with Collect Taps after sampling."),
            ],
            hidden=HIDDEN,
            has_intermediate_output=True,
        )  # fmt: skip

    @classmethod
    def execute(
        cls, model: Any, layers: str, record_steps: str, first_step: int = 0, selection: str = "layers above"
    ) -> io.NodeOutput:
        """Clone and wrap; addresses are checked now, not in the middle of sampling."""
        backbone, hidden = backbone_of(model), cls.hidden
        choices.remember(hidden, sites_of(backbone))
        wanted: Any = published_sites(selection) or layers
        tapped = [site.address for site in resolve(backbone, wanted)]

        def watch(taps: Activations) -> None:
            with suppress(VitrineError):  # a site without a picture, or numbers that overflowed: the run continues
                show_on(hidden, first_picture(taps))

        recording = record_sampling(model, wanted, parse_steps(record_steps), watch, first_step)
        said = replaced_attention(model, tapped)
        return io.NodeOutput(*recording, ui=marked(text_on(said) if said else {}, hidden))


def parse_steps(text: str) -> Any:
    """Steps from text: "0 5 10" -> {0, 5, 10}; "all" -> every step."""
    words = text.replace(",", " ").split()
    if words == ["all"]:
        return lambda step: True
    if not words or not all(w.isdecimal() and len(w) < 10 for w in words):
        raise refuse("record_steps", text, "whole numbers from 0, or 'all'", "e.g. 0 5 10")
    return {int(w) for w in words}


class CollectTaps(io.ComfyNode):
    """What the recorder contains once the sampler has run."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Recorder and the sampler's LATENT in, so that sampling comes first; activations out."""
        return io.Schema(
            node_id="VitrineCollectTaps",
            display_name="Collect Taps",
            category=CATEGORY,
            is_output_node=True,  # what it shows can be all one wants
            description="Gives the activations of one recorded step. The sampler's LATENT makes this node wait for it.",
            inputs=[
                RecorderSocket.Input(
                    "recorder",
                    optional=True,
                    tooltip="From Tap During Sampling. Without one, as when that is bypassed, only the LATENT is "
                    "passed on.",
                ),
                io.Latent.Input("latent", tooltip="The output of the sampler that used the recording MODEL."),
                io.Int.Input(
                    "step", default=-1, min=-1, max=10_000, tooltip="A recorded step of the run; -1: the last."
                ),
                io.Combo.Input(
                    "half",
                    options=list(HALVES),
                    default="cond",
                    tooltip="With or without the prompt; the others are further conditionings of some guiders.",
                ),
                io.Int.Input(
                    "part",
                    default=0,
                    min=0,
                    max=100,
                    optional=True,
                    tooltip="Which of several prompts that were combined, from 1; 0: the only one.",
                ),
            ],
            outputs=[
                ActivationsSocket.Output(display_name="ACTIVATIONS", tooltip="All recorded layers at this step."),
                io.Image.Output(display_name="IMAGE", tooltip="First layer as colours."),
                io.Latent.Output(display_name="LATENT", tooltip="The latent, passed on so that the graph continues."),
            ],
            hidden=[io.Hidden.unique_id],
            not_idempotent=True,  # the recorder changes behind the cache's back when only the sampler ran again
        )

    @classmethod
    def execute(
        cls, latent: dict, step: int, half: str, recorder: Recorder | None = None, part: int = 0
    ) -> io.NodeOutput:
        """Read one step of the run that the LATENT came out of."""
        if recorder is None:
            return io.NodeOutput(nothing_recorded(), nothing_recorded(), latent)
        taps = recorder.activations(step, half, latent, part)
        drawn, shown = drawn_first(taps, cls)
        return io.NodeOutput(taps, drawn, latent, ui=shown)


class ActivationPicture(io.ComfyNode):
    """One layer as colours."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Activations and a layer in, a picture out."""
        return io.Schema(
            node_id="VitrineActivationPicture",
            display_name="Activation Picture",
            category=CATEGORY,
            is_output_node=True,  # what it shows can be all one wants
            description="Three principal components of an activation as red, green and blue.",
            inputs=[
                ActivationsSocket.Input("activations", tooltip="From a tap."),
                io.String.Input("layer", default="", tooltip="Which layer; empty: the first one."),
                io.Boolean.Input(
                    "shared", default=True, tooltip="One basis for the whole batch: equal colours mean equal features."
                ),
                io.Int.Input("size", default=256, min=16, max=2048, tooltip="Height of the picture in pixels."),
                added_selection("All layers of a published selection joined, or the one typed above."),
            ],
            outputs=[io.Image.Output(display_name="IMAGE", tooltip="One picture for each.")],
            hidden=HIDDEN,
            has_intermediate_output=True,
        )

    @classmethod
    def execute(
        cls, activations: Activations, layer: str, shared: bool, size: int, selection: str = "layers above"
    ) -> io.NodeOutput:
        """Fit and show."""
        choices.remember(cls.hidden, [a for a in activations if activations[a].grid is not None])
        sites = published_sites(selection)
        drawn = (
            picture(activations, layer, shared, size)
            if sites is None
            else coloured(feature_maps(activations.select(list(sites))), shared, size)
        )
        return io.NodeOutput(drawn, ui=marked(ui.PreviewImage(with_legend(drawn), cls=cls), cls.hidden))


class SaveActivations(io.ComfyNode):
    """Write activations to output/vitrine_activations."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Activations and a name in."""
        return io.Schema(
            node_id="VitrineSaveActivations",
            display_name="Save Activations",
            category=CATEGORY,
            description="Writes a .safetensors file with layer names, timestep and seeds in its header.",
            is_output_node=True,
            hidden=[io.Hidden.unique_id],
            inputs=[
                ActivationsSocket.Input("activations", tooltip="From a tap."),
                io.String.Input("name", default="activations", tooltip="File name without folder or ending."),
            ],
            outputs=[io.String.Output(display_name="path", tooltip="The file written.")],
        )

    @classmethod
    def execute(cls, activations: Activations, name: str) -> io.NodeOutput:
        """Save under a plain name; an existing file of that name is replaced whole."""
        path = str(saved.folder(_FOLDER) / f"{safe_name(name)}.safetensors")
        activations.save(path)
        return io.NodeOutput(path, ui=text_on(f"{saved.shown(path)}\n{describe(activations)}"))


class LoadActivations(io.ComfyNode):
    """Read a file that Save Activations or the Python side wrote."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The list is read anew whenever the page refreshes."""
        files = saved.listed(_FOLDER, ".safetensors")
        return io.Schema(
            node_id="VitrineLoadActivations",
            display_name="Load Activations",
            category=CATEGORY,
            description="Reads activations from output/vitrine_activations.",
            inputs=[io.Combo.Input("file", options=files or ["none saved yet"], tooltip="A saved .safetensors file.")],
            outputs=[ActivationsSocket.Output(display_name="ACTIVATIONS", tooltip="As they were saved.")],
        )

    @classmethod
    def fingerprint_inputs(cls, file: str) -> str:
        """Runs again when the file has changed."""
        return saved.changed(_FOLDER, file)

    @classmethod
    def execute(cls, file: str) -> io.NodeOutput:
        """Load; broken files are named, never unpickled."""
        return io.NodeOutput(Activations.load(str(saved.path_of(_FOLDER, file))))


def picture(taps: Activations, address: str = "", shared: bool = True, size: int = 256) -> torch.Tensor:
    """IMAGE (B, size, width, 3): three principal components of one layer as colours.

    ``shared`` fits one basis on the whole batch, so that equal colours mean equal features.
    """
    sites = [a for a in taps if taps[a].grid is not None]
    chosen = taps.select(address) if address else taps.select(sites[:1])
    activation = next((taps[a] for a in chosen if taps[a].grid is not None), None)
    if activation is None or activation.grid is None:
        accepted = sites or "none of these: text tokens and attention maps have no picture"
        raise refuse("layer", address or list(taps)[:3], accepted, "tap a layer of the picture as well")
    return coloured(activation.tensor.float(), shared, size)


def coloured(maps: torch.Tensor, shared: bool, size: int) -> torch.Tensor:
    """IMAGE (B, size, width, 3) of features (B, C, h, w): three principal components as colours.

    Of videos (B, C, T, h, w), one picture for each frame, those of a video together.
    """
    maps = maps.movedim(2, 1).flatten(0, 1) if maps.ndim == 5 else maps
    height, width = maps.shape[-2:]
    target = (size, round(size * width / height))
    if shared:
        return pca_rgb(maps, PCABasis.fit(maps), target).permute(0, 2, 3, 1)
    return torch.cat([pca_rgb(row[None], None, target) for row in maps]).permute(0, 2, 3, 1)


def with_legend(pictures: torch.Tensor) -> torch.Tensor:
    """(B, H + 18, W, 3): a line below says what the colours mean, where there is room for it; for the page alone."""
    width = pictures.shape[2]
    if width < 200:
        return pictures
    strip = Image.new("RGB", (width, 18), "black")
    pen = ImageDraw.Draw(strip)
    for place, (colour, name) in enumerate({"red": "1st", "lime": "2nd", "blue": "3rd component"}.items()):
        pen.rectangle((4 + 36 * place, 5, 11 + 36 * place, 12), fill=colour)
        pen.text((14 + 36 * place, 3), name, "white", font_size=10)
    line = torch.from_numpy(np.asarray(strip) / 255).to(pictures)
    return torch.cat([pictures, line.expand(len(pictures), -1, -1, -1)], 1)


def first_picture(taps: Activations, size: int = 256) -> torch.Tensor:
    """IMAGE (1, size, width, 3) of the first row at the first site that has a grid, in its own colours."""
    activation = next((taps[a] for a in taps if taps[a].grid is not None), None)
    if activation is None or activation.grid is None:
        raise refuse("taps", list(taps), "one with a grid", "text tokens and attention maps have no picture")
    return coloured(activation.tensor[:1].float(), True, size)[:1]


NODES = [
    ActivationTap,
    TapDuringSampling,
    CollectTaps,
    ActivationPicture,
    SaveActivations,
    LoadActivations,
]
