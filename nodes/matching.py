"""Put activations to use: the same point in another picture, the same parts from a few labelled masks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from comfy_api.latest import io, ui

from ..engine.activations import TapConfig
from ..engine.activations.correspondence import (
    Matches,
    draw_matches,
    feature_maps,
    find_correspondence,
    mask_points,
    parse_clicks,
    parse_points,
)
from ..engine.activations.gdf_protocol import CORRESPONDENCE_SIZE, PROTOCOLS, check_protocol, gdf_features
from ..engine.activations.segmentation import ProbeSettings, fit_probe, mask_like_clicks
from ..engine.errors import refuse
from .captions import captioned
from .comfy import similarity
from .comfy.panel_state import HIDDEN
from .comfy.pictures import as_masks, as_pictures
from .config_inputs import inputs_of
from .sockets import under_advanced
from .tap_inputs import protocol_input, remedy_inputs, selection_config, selection_inputs, sized, tap_images

CATEGORY = "Vitrine/activations"
CLICKS = "0.5 0.5\nnot 0.05 0.05"
"""What is in the middle, and not what is in the corner."""
CLICKED, MASKED = "like your clicks", "like your masks (clicks do not count)"


def _features(
    model: Any,
    vae: Any,
    images: tuple[torch.Tensor, torch.Tensor],
    positive: list,
    config: TapConfig,
    protocol: str,
    grid: tuple[int, int] | None = None,
) -> list[torch.Tensor]:
    """(B, C, H, W) joined features of two batches of pictures; those of one size go through together.

    Args:
        grid: on which GDF's protocol joins sites; None is the widest of theirs.
    """
    gdf = check_protocol(protocol)

    def joined(image: torch.Tensor) -> torch.Tensor:
        taps = tap_images(model, vae, image, positive, config, protocol)
        return gdf_features(taps, grid) if gdf else feature_maps(taps)

    if images[0].shape[1:3] == images[1].shape[1:3]:
        both = joined(torch.cat([i[..., :3] for i in images]))
        return list(both.split([len(i) for i in images]))
    if gdf:
        shown = ", ".join(sized("pictures", i) for i in images)
        raise refuse("image sizes", shown, "one size under protocol 'gdf'", "squeeze them to the model's own size")
    return [joined(i[..., :3]) for i in images]


def as_lines(match: Matches) -> list[str]:
    """x y similarity of each point; a minus marks those that do not lead back."""
    numbers = zip(match.points.tolist(), match.similarity.tolist(), match.mutual.tolist(), strict=True)
    return [f"{x:.4f} {y:.4f} {s:.3f}{'' if mutual else ' -'}" for (x, y), s, mutual in numbers]


POINT_SEARCHES = [
    "correspondence",
    "point matching",
    "DIFT",
    "semantic correspondence",
    "keypoints",
    "find the same part",
    "landmarks",
    "point transfer",
    "track points",
    "same point in another picture",
    "match pictures",
    "pose landmarks",
    "click a point",
]
MASK_SEARCHES = [
    "few-shot segmentation",
    "mask propagation",
    "auto mask",
    "label propagation",
    "SAM",
    "object mask",
    "remove background",
    "segment anything",
    "select object",
    "click to mask",
]
"""What people type who look for these two nodes."""


class FindCorrespondence(io.ComfyNode):
    """Points of one picture, found in others."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Two pictures and points in; points and a drawing out."""
        return io.Schema(
            node_id="VitrineFindCorrespondence",
            display_name="Find Same Points",
            category=CATEGORY,
            is_output_node=True,  # what it shows can be all one wants
            description="Finds the points of one picture in others by nearest activations: eye to eye, wheel to wheel.",
            search_aliases=POINT_SEARCHES,
            inputs=under_advanced((
                "selection", "timestep", "seed", "ensemble", "softness", "modulate", "discard", "protocol",
            ), [
                io.Model.Input("model", tooltip="Whose activations compare the pictures."),
                io.Vae.Input("vae", tooltip="Its VAE."),
                io.Conditioning.Input("positive", tooltip="What the pictures show; empty works."),
                io.Image.Input("source", tooltip="The picture where the points are; the first of several."),
                io.Image.Input("target", tooltip="One or more pictures in which to find them; of any size."),
                io.String.Input("points", default="0.5 0.5", multiline=True,
                                tooltip="x y, one point a line: fractions of width and height, or pixels if above 1; "
                                "or press the button and click."),
                *selection_inputs(),
                io.Float.Input("softness", default=0.02, min=0.0, max=1.0, step=0.01,
                               tooltip="0: centre of the best cell; above: weighted over its neighbours, finer."),
                io.Mask.Input("mask", optional=True, tooltip="Instead of points: the middle of each painted spot."),
                *remedy_inputs(),
                protocol_input(),
            ]),
            hidden=HIDDEN,
            has_intermediate_output=True,  # the panel learns what to show on a run from the cache, too
            outputs=[
                io.String.Output(display_name="points", tooltip="x y similarity, one a line; '-' marks doubtful ones."),
                io.Image.Output(display_name="IMAGE", tooltip="Source and target with numbered points."),
            ],
        )  # fmt: skip

    @classmethod
    def execute(
        cls,
        model: Any,
        vae: Any,
        positive: list,
        source: torch.Tensor,
        target: torch.Tensor,
        points: str,
        selection: str,
        layers: str,
        timestep: float,
        seed: int,
        ensemble: int,
        softness: float,
        mask: torch.Tensor | None = None,
        modulate: bool = False,
        discard: str = "",
        protocol: str = PROTOCOLS[0],
    ) -> io.NodeOutput:
        """One early-exited forward serves source and targets of one size together."""
        source, target = as_pictures(source, "source")[:1], as_pictures(target, "target")
        height, width = source.shape[1:3]
        wanted = parse_points(points, width, height) if mask is None else mask_points(as_masks(mask, source))
        config = selection_config(selection, layers, timestep, seed, ensemble, (modulate, discard))
        (first,), others = _features(model, vae, (source, target), positive, config, protocol, CORRESPONDENCE_SIZE)
        matches = [find_correspondence(first, other, wanted.to(other), temperature=softness) for other in others]
        lines = [line for match in matches for line in as_lines(match)]
        drawn = torch.stack([draw_matches(source[0], t, wanted, m) for t, m in zip(target, matches, strict=True)])
        names = [f"your points | picture {n + 1} (hollow dot: doubt it)" for n in range(len(drawn))]
        shown = similarity.clickable(ui.PreviewImage(captioned(drawn, names), cls=cls), source, first, cls)
        return io.NodeOutput("\n".join(lines), drawn, ui=shown)


class SegmentLikeThis(io.ComfyNode):
    """Masks for many pictures from a few labelled ones."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Labelled pictures with masks and new pictures in; masks out."""
        return io.Schema(
            node_id="VitrineSegmentLikeThis",
            display_name="Segment Like This",
            category=CATEGORY,
            description="Learns from 1 to 50 masked pictures what you mean, and masks new pictures the same way.",
            is_output_node=True,  # its masks show on it; nothing need be connected
            search_aliases=MASK_SEARCHES,
            inputs=under_advanced(
                ("selection", "timestep", "seed", "ensemble", "hidden", "modulate", "discard", "protocol"),
                [
                    io.Model.Input("model", tooltip="Whose activations describe the pixels."),
                    io.Vae.Input("vae", tooltip="Its VAE."),
                    io.Conditioning.Input("positive", tooltip="What the pictures show; empty works."),
                    io.Image.Input("examples", tooltip="Labelled pictures."),
                    io.Mask.Input(
                        "masks",
                        optional=True,
                        tooltip="One mask for each: white is what you want. With masks, clicks do not count.",
                    ),
                    io.Image.Input("images", tooltip="Pictures to mask, any number, of any size."),
                    *selection_inputs(),
                    *inputs_of(ProbeSettings, "hidden"),
                    *remedy_inputs(),
                    protocol_input(),
                    io.String.Input(
                        "points",
                        default=CLICKS,
                        multiline=True,
                        optional=True,
                        tooltip="Without masks: x y of what you want in the first example, not x y of what you "
                        "do not; press the button and click.",
                    ),
                ],
            ),
            hidden=HIDDEN,
            has_intermediate_output=True,
            outputs=[
                io.Mask.Output(display_name="MASK", tooltip="One mask for each picture, 0 or 1."),
                io.Mask.Output(display_name="probability", tooltip="The same, soft: 0..1."),
            ],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        vae: Any,
        positive: list,
        examples: torch.Tensor,
        images: torch.Tensor,
        selection: str,
        layers: str,
        timestep: float,
        seed: int,
        ensemble: int,
        hidden: int,
        masks: torch.Tensor | None = None,
        modulate: bool = False,
        discard: str = "",
        protocol: str = PROTOCOLS[0],
        points: str = CLICKS,
    ) -> io.NodeOutput:
        """Fit a probe on the examples' activations and apply it, or compare with what was clicked."""
        examples, images = as_pictures(examples, "examples"), as_pictures(images, "images")
        examples = examples if masks is not None else examples[:1]
        masks = None if masks is None else as_masks(masks, examples, "masks")
        clicks = _labels(examples, masks, points)
        config = selection_config(selection, layers, timestep, seed, ensemble, (modulate, discard))
        known, new = _features(model, vae, (examples, images), positive, config, protocol)
        height, width = images.shape[1:3]
        if clicks is not None:
            soft = mask_like_clicks(known[0], *clicks, new, (height, width)).cpu()
        else:
            assert masks is not None  # or the labels were refused
            probe = fit_probe(known, (masks > 0.5).long().to(known.device), 2, ProbeSettings(hidden=hidden))
            soft = F.softmax(probe.scores(new, (height, width)), 1)[:, 1].cpu()
        counted = CLICKED if masks is None else MASKED
        shown = ui.PreviewImage(mask_pictures((soft > 0.5).float(), counted), cls=cls)
        shown = similarity.clickable(shown, examples, known[0], cls)
        return io.NodeOutput((soft > 0.5).float(), soft, ui=shown)


def mask_pictures(masks: torch.Tensor, counted: str) -> torch.Tensor:
    """(B, n H + two lines, n W, 3) of masks (B, H, W): what the node shows of them.

    Args:
        counted: what white means.
    """
    names = [f"picture {n + 1}" for n in range(len(masks))]
    return captioned(masks[..., None].expand(-1, -1, -1, 3), names, {"white": counted, "black": "rest"})


def _labels(
    examples: torch.Tensor, masks: torch.Tensor | None, points: str
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The clicks, of the first example, where there are no masks; masks are checked."""
    height, width = examples.shape[1:3]
    if masks is None:
        return parse_clicks(points, width, height)
    return None


NODES = [FindCorrespondence, SegmentLikeThis]
