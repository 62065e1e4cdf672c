"""NEMO Compare Copies: the training picture, samples without blocking and with it, and a verdict in a sentence."""

from __future__ import annotations

import torch
from comfy_api.latest import io, ui

from ..engine.nemo import Copies, picture_distance
from .captions import captioned, enlarged
from .comfy.pictures import as_pictures, resized
from .comfy.progress import text_on
from .nemo import CATEGORY

SIDE = 512
"""Least pixels of each of the three squares side by side."""
SHOWN = 4
"""Samples in a square."""
TITLES = (
    "The training picture",
    "Untouched: {copies} of {count} are copies",
    "With the neurons off: {copies} of {count}",
)


class NEMOCompareCopies(io.ComfyNode):
    """Did blocking end the copies."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Pictures before and after, the training picture, ordinary pictures in; verdict and comparison out."""
        return io.Schema(
            node_id="VitrineNEMOCompareCopies",
            display_name="NEMO Compare Copies",
            category=CATEGORY,
            description="Shows the training picture, samples without blocking and samples with it side by side, and "
            "says in a sentence how many of them are copies.",
            search_aliases=["before and after", "did it help", "still a copy", "verdict", "compare copies", "nemo"],
            is_output_node=True,
            hidden=[io.Hidden.unique_id],
            inputs=[
                io.Image.Input("before", tooltip="Samples of the untouched model."),
                io.Image.Input("after", tooltip="Samples with the neurons blocked, of the same seeds."),
                io.Image.Input("training_picture", tooltip="The picture that must not come back."),
                io.Image.Input(
                    "ordinary", tooltip="Pictures of other subjects of the model's kind, eight or more: how far they "
                    "are from the training picture says what is usual.",
                ),
            ],
            outputs=[
                io.String.Output(display_name="verdict", tooltip="How many are copies, in a sentence."),
                io.Image.Output(display_name="side by side", tooltip="Training picture, samples before and after."),
                io.Int.Output(display_name="copies", tooltip="Samples with neurons blocked that are still copies."),
            ],
        )  # fmt: skip

    @classmethod
    def execute(
        cls, before: torch.Tensor, after: torch.Tensor, training_picture: torch.Tensor, ordinary: torch.Tensor
    ) -> io.NodeOutput:
        """``Copies`` of pictures at the size of the first sample."""
        before = as_pictures(before, "before")
        others = (("after", after), ("training_picture", training_picture), ("ordinary", ordinary))
        after, reference, usual = (resized(as_pictures(image, what), before) for what, image in others)
        compared = [x.movedim(-1, 1) for x in (before, after, usual)]
        distances = [picture_distance(x, reference[:1].movedim(-1, 1)) for x in compared]
        copies = Copies(*distances)
        text, picture = copies.sentence(), side_by_side(reference, before, after, copies)
        shown = ui.PreviewImage(picture, cls=cls).as_dict() | text_on(text).as_dict()
        return io.NodeOutput(text, picture, copies.copied[1], ui=shown)


def side_by_side(reference: torch.Tensor, before: torch.Tensor, after: torch.Tensor, copies: Copies) -> torch.Tensor:
    """(1, H, W, 3): three squares under their titles, of samples the first four, two by two."""
    squares = [reference[:1], _two_by_two(before), _two_by_two(after)]
    counts = (0, *copies.copied)
    names = [t.format(copies=n, count=len(copies.blocked)) for t, n in zip(TITLES, counts, strict=True)]
    size = max(SIDE, *(s.shape[1] for s in squares))
    parts = [captioned(_square(s, size), [name], line=32) for s, name in zip(squares, names, strict=True)]
    margin = torch.ones_like(parts[0][:, :, :8])
    return torch.cat([parts[0], margin, parts[1], margin, parts[2]], 2)


def _two_by_two(pictures: torch.Tensor) -> torch.Tensor:
    """(1, 2 H, 2 W, 3); the only picture where there is one, the last repeated where there are fewer than four."""
    if len(pictures) == 1:
        return pictures
    shown = [pictures[min(k, len(pictures) - 1)] for k in range(SHOWN)]
    return torch.cat([torch.cat(shown[:2], 1), torch.cat(shown[2:], 1)], 0)[None]


def _square(pictures: torch.Tensor, size: int) -> torch.Tensor:
    """Pictures of that height, small ones with their pixels as squares."""
    large = enlarged(pictures, size)
    scale = size / large.shape[1]
    if scale == 1:
        return large
    return torch.nn.functional.interpolate(large.movedim(-1, 1), scale_factor=scale, mode="area").movedim(1, -1)


NODES: list[type[io.ComfyNode]] = [NEMOCompareCopies]
