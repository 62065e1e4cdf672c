"""Resolution transfer: schedule, positions and guidance for another picture size."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..engine.errors import refuse
from ..engine.resolution import ResolutionTransferConfig, plan_transfer
from .comfy.resolution import NONE, checkpoint_files, facts_of, metadata_in, metadata_stamp, transferred
from .config_inputs import input_of, inputs_of, settings_from

CATEGORY = "Vitrine/resolution"
_SIDE = {"min": 0, "max": 16384, "step": 8}


def _size_inputs() -> list[Any]:
    """Both sizes in pixels."""
    usual = (
        "in pixels; 0 takes the usual one of the model's family (SD1.5 512, SD2 768, Qwen-Image 1328, Wan 832 x 480, "
        "others 1024)."
    )
    return [
        io.Int.Input("train_width", default=0, **_SIDE, tooltip=f"Width of the training pictures {usual}"),
        io.Int.Input("train_height", default=0, **_SIDE, tooltip=f"Height of the training pictures {usual}"),
        io.Int.Input("target_width", default=1024, **_SIDE | {"min": 8}, tooltip="Width you will sample, in pixels."),
        io.Int.Input("target_height", default=1024, **_SIDE | {"min": 8}, tooltip="Height you will sample, in pixels."),
    ]


class ResolutionTransferLoader(io.ComfyNode):
    """A model made ready for another picture size."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """MODEL, sizes and settings in; MODEL, guidance and report out."""
        return io.Schema(
            node_id="VitrineResolutionTransferLoader",
            display_name="Fit Model to Size (Resolution Transfer)",
            category=CATEGORY,
            description="Prepares a model for pictures larger or smaller than its training size: noise schedule, "
            "positional embedding and guidance, with a report of what each part will do.",
            search_aliases=[
                "high resolution", "hires", "shift", "SNR shift", "position embedding", "RoPE", "twice the size",
                "draw at twice the size", "double heads", "two heads", "deep shrink", "DyPE", "YaRN", "2k", "4k",
                "aspect ratio", "hires fix", "upscale without doubles", "any size", "repeated heads",
            ],
            inputs=[
                io.Model.Input(
                    "model", tooltip="Any model of Stable Diffusion's kind, or a flow model such as Flux and SD3."
                ),
                *_size_inputs(),
                *inputs_of(ResolutionTransferConfig, "schedule", "pos_embed", "guidance_law"),
                input_of(ResolutionTransferConfig, "guidance", default=7.5),
                *inputs_of(ResolutionTransferConfig, "override"),
                io.Combo.Input(
                    "metadata_from", options=checkpoint_files(), default=NONE, optional=True, advanced=True,
                    tooltip="Checkpoint file whose header says how it was trained; only relabel reads it.",
                ),
                input_of(ResolutionTransferConfig, "receptive_field", default="auto", optional=True),
            ],
            outputs=[
                io.Model.Output(display_name="MODEL", tooltip="For the sampler, with a latent of the target size."),
                io.Float.Output(display_name="guidance", tooltip="For the sampler's cfg."),
                io.String.Output(display_name="report", tooltip="What was done to each part, line by line."),
            ],
        )  # fmt: skip

    @classmethod
    def fingerprint_inputs(cls, metadata_from: str = NONE, **others: Any) -> str:
        """Runs again when the checkpoint whose header is read has changed."""
        return metadata_stamp(metadata_from)

    @classmethod
    def execute(
        cls,
        model: Any,
        train_width: int,
        train_height: int,
        target_width: int,
        target_height: int,
        metadata_from: str = NONE,
        **options: Any,
    ) -> io.NodeOutput:
        """``plan`` for this model, then a clone with it."""
        if bool(train_width) != bool(train_height):
            raise refuse("train size", f"{train_width} x {train_height}", "both sides, or 0 for both", "give both")
        train = (train_width, train_height) if train_width else None
        target = (target_width, target_height)
        config = settings_from(ResolutionTransferConfig, options, target_size=target, train_size=train)
        facts = facts_of(model)
        transfer = plan_transfer(facts, config, metadata_in(metadata_from))
        return io.NodeOutput(transferred(model, facts, transfer), transfer.guidance, transfer.summary)


NODES: list[type[io.ComfyNode]] = [ResolutionTransferLoader]
