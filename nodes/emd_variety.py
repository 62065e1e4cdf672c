"""How different the pictures of one prompt are."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io

from ..engine.emd import Variety, measure_variety, small_pixels
from .comfy.pictures import as_pictures
from .comfy.progress import text_on


class EMDVariety(io.ComfyNode):
    """Distance between seeds, Vendi score, and recall of a reference."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Pictures of one prompt in; three numbers and a report out."""
        return io.Schema(
            node_id="VitrineEMDVariety",
            display_name="EMD Variety",
            category="Vitrine/few-step students",
            description="Measures how different the pictures of one prompt are: mean distance between seeds, how many "
                        "different pictures they amount to, and how much of a reference they reach. Fast students "
                        "often make one picture for every seed.",
            search_aliases=[
                "diversity", "Vendi score", "recall", "mode collapse", "same face", "seeds", "all look the same",
                "same face every seed",
            ],
            is_output_node=True,
            hidden=[io.Hidden.unique_id],
            inputs=[
                io.Image.Input("images", tooltip="Pictures of one prompt, two or more, each with its own seed."),
                io.Image.Input(
                    "reference", optional=True,
                    tooltip="What the same prompt should give, three pictures or more: the base model's, say.",
                ),
                io.ClipVision.Input(
                    "clip_vision", optional=True,
                    tooltip="The network whose features are compared. Without one it is colours at 16 x 16, which see "
                    "layout but not what is shown.",
                ),
            ],
            outputs=[
                io.Float.Output(display_name="distance", tooltip="Mean of 1 - cosine over pairs; 0: all the same."),
                io.Float.Output(display_name="vendi", tooltip="Vendi score: 1 to the number of pictures."),
                io.Float.Output(display_name="recall", tooltip="Fraction of the reference reached; -1 without one."),
                io.String.Output(display_name="report", tooltip="The same in words, with precision."),
            ],
        )  # fmt: skip

    @classmethod
    def execute(
        cls, images: torch.Tensor, reference: torch.Tensor | None = None, clip_vision: Any = None
    ) -> io.NodeOutput:
        """``measure_variety`` on features of the pictures."""
        theirs = None if reference is None else _features(as_pictures(reference, "reference"), clip_vision)
        images = as_pictures(images, "images")
        variety = measure_variety(_features(images, clip_vision), theirs)
        text = _report(variety, len(images), "16 x 16 colours" if clip_vision is None else "CLIP vision")
        recall = -1.0 if variety.recall is None else variety.recall
        return io.NodeOutput(variety.distance, variety.vendi, recall, text, ui=text_on(text))


def _features(images: torch.Tensor, clip_vision: Any) -> torch.Tensor:
    """(N, D) of (N, H, W, 3) pictures in [0, 1]."""
    if clip_vision is None:
        return small_pixels(images.movedim(-1, 1))
    return clip_vision.encode_image(images)["image_embeds"].float()


def _report(variety: Variety, count: int, features: str) -> str:
    lines = [
        f"{count} pictures, features: {features}",
        f"mean distance between seeds: {variety.distance:.4f}",
        f"Vendi score: {variety.vendi:.2f} of {count}",
    ]
    if variety.recall is not None and variety.precision is not None:
        lines.append(f"recall of the reference {variety.recall:.2f}, precision {variety.precision:.2f}")
    return "\n".join(lines)


NODES = [EMDVariety]
