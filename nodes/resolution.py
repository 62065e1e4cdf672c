"""Resolution transfer: schedule, positions and guidance for another picture size."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..engine.errors import refuse
from ..engine.resolution import ResolutionTransferConfig, plan_transfer
from ..engine.resolution.receptive import RECEPTIVE
from ..engine.resolution.transfer_config import POSITIONS, SCHEDULES
from .comfy.resolution import NONE, checkpoint_files, facts_of, metadata_in, metadata_stamp, transferred
from .sockets import under_advanced

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
    ]  # fmt: skip


def _setting_inputs() -> list[Any]:
    """How each part is transferred."""
    return [
        io.Combo.Input(
            "schedule", options=list(SCHEDULES), default="resample",
            tooltip="resample: steps move to more noise (less for smaller pictures), for any checkpoint. relabel: the "
                    "paper's, a timestep means more noise in proportion to the side; only for checkpoints trained so. "
                    "none: unchanged.",
        ),
        io.Combo.Input(
            "pos_embed", options=list(POSITIONS), default="auto",
            tooltip="auto: grid for sin-cos tables (same limits, smaller step), rope_pi for rotary models, nothing for "
            "UNets. keep: the model's own. What does not fit the model is refused. _dynamic: follows the noise level "
            "(DyPE, patent pending; see the help page).",
        ),
        io.Boolean.Input(
            "guidance_law", default=False,
            tooltip="What guidance adds grows with the picture's side, as in the paper (Eq. 4).",
        ),
        io.Float.Input(
            "guidance", default=7.5, min=0.0, max=100.0, step=0.1, tooltip="CFG you use at the training size."
        ),
        io.Boolean.Input(
            "override", default=False, tooltip="Allow relabel although no checkpoint header says it was trained so."
        ),
        io.Combo.Input(
            "metadata_from", options=checkpoint_files(), default=NONE,
            optional=True, tooltip="Checkpoint file whose header says how it was trained; only relabel reads it.",
        ),
        io.Combo.Input(
            "receptive_field", options=list(RECEPTIVE), default="auto", optional=True,
            tooltip="dilate: a UNet (SD1.5, SD2, SDXL) looks as far across a larger picture as in training, which ends "
            "repeated heads at two or three times the side; detail is softer. auto: dilate from 1.75 times the side "
            "on. none: unchanged. Transformers need none.",
        ),
    ]  # fmt: skip


class ResolutionTransferLoader(io.ComfyNode):
    """A model made ready for another picture size."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """MODEL, sizes and settings in; MODEL, guidance and report out."""
        return io.Schema(
            node_id="VitrineResolutionTransferLoader",
            display_name="Resolution Transfer Loader",
            category=CATEGORY,
            description="Prepares a model for pictures larger or smaller than its training size: noise schedule, "
            "positional embedding and guidance, with a report of what each part will do.",
            search_aliases=[
                "high resolution", "hires", "shift", "SNR shift", "position embedding", "RoPE", "twice the size",
                "draw at twice the size", "double heads", "two heads", "deep shrink", "DyPE", "YaRN", "2k", "4k",
                "aspect ratio", "hires fix", "upscale without doubles", "any size", "repeated heads",
            ],
            inputs=under_advanced((
                "schedule", "pos_embed", "guidance_law", "override", "metadata_from",
            ), [
                io.Model.Input(
                    "model", tooltip="Any model of Stable Diffusion's kind, or a flow model such as Flux and SD3."
                ),
                *_size_inputs(),
                *_setting_inputs(),
            ]),
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
        cls, model: Any, train_width: int, train_height: int, target_width: int, target_height: int, schedule: str,
        pos_embed: str, guidance_law: bool, guidance: float, override: bool,
        metadata_from: str = NONE, receptive_field: str = "none",
    ) -> io.NodeOutput:  # fmt: skip
        """``plan`` for this model, then a clone with it."""
        if bool(train_width) != bool(train_height):
            raise refuse("train size", f"{train_width} x {train_height}", "both sides, or 0 for both", "give both")
        train = (train_width, train_height) if train_width else None
        config = ResolutionTransferConfig(
            (target_width, target_height), train, schedule, pos_embed, guidance_law, guidance, override,
            receptive_field,
        )  # fmt: skip
        facts = facts_of(model)
        transfer = plan_transfer(facts, config, metadata_in(metadata_from))
        return io.NodeOutput(transferred(model, facts, transfer), transfer.guidance, transfer.summary)


NODES: list[type[io.ComfyNode]] = [ResolutionTransferLoader]
