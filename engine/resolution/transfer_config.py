"""Settings of a transfer to another image size, and a checkpoint's training schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ..errors import refuse
from ..io.files import named, parse_table
from ..settings.option import Option, Options
from .receptive import RECEPTIVE
from .rope import ROPE_MODES
from .shift import Size, check_size, size_ratio

SCHEDULES = ("resample", "relabel", "none")
POSITIONS = ("auto", "keep", "grid", "extrapolate", *ROPE_MODES)
_HELP = "see the help page of Fit Model to Size (Resolution Transfer)"
FORMAT = 1
"""Major version of a control checkpoint's metadata (``ccs_format``)."""


@dataclass(frozen=True)
class ResolutionTransferConfig(Options):
    """What to change when a model samples at another than its training size.

    Sizes are (width, height) in pixels; a ``train_size`` of None is read from the model.
    """

    target_size: Size
    train_size: Size | None = None
    schedule: Annotated[
        str,
        Option(
            "resample: steps move to more noise (less for smaller pictures), for any "
            "checkpoint. relabel: the paper's, a "
            "timestep means more noise in proportion to the side; only for checkpoints trained so. none: unchanged.",
            choices=SCHEDULES,
            advanced=True,
            remedy=_HELP,
        ),
    ] = "resample"
    pos_embed: Annotated[
        str,
        Option(
            "auto: grid for sin-cos tables (same limits, smaller step), rope_pi for rotary models, nothing for UNets. "
            "keep: the model's own. What does not fit the model is refused. _dynamic: follows the noise level (DyPE, "
            "patent pending; see the help page).",
            choices=POSITIONS,
            advanced=True,
            remedy=_HELP,
        ),
    ] = "auto"
    guidance_law: Annotated[
        bool,
        Option(
            "What guidance adds grows with the picture's side, as in the paper (Eq. 4).",
            advanced=True,
        ),
    ] = False
    guidance: Annotated[
        float | None,
        Option(
            "CFG you use at the training size.",
            ge=0,
            top=100,
            step=0.1,
            unset_doc="guidance is left to the caller",
            remedy="1 is no guidance",
        ),
    ] = None
    override: Annotated[
        bool,
        Option(
            "Allow relabel although no checkpoint header says it was trained so.",
            advanced=True,
        ),
    ] = False
    receptive_field: Annotated[
        str,
        Option(
            "dilate: a UNet (SD1.5, SD2, SDXL) looks as far across a larger picture as in "
            "training, which ends repeated "
            "heads at two or three times the side; detail is softer. auto: dilate from 1.75 times the side on. none: "
            "unchanged. Transformers need none.",
            choices=RECEPTIVE,
            remedy=_HELP,
        ),
    ] = "none"

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_size", check_size("target size", self.target_size))
        if self.train_size is not None:
            object.__setattr__(self, "train_size", check_size("train size", self.train_size))
            size_ratio(self.train_size, self.target_size)
        super().__post_init__()

    def _check(self) -> None:
        """The law needs a scale."""
        if self.guidance_law and self.guidance is None:
            raise refuse("guidance_law", "on without guidance", "the guidance scale of the training size", "set it")


@dataclass(frozen=True)
class TrainedSchedule:
    """The training schedule of a checkpoint: a noise table relabelled from one image size to another.

    Attributes:
        ratio: s_now / s_pre of its last stage.
        mode: ``relabel`` or ``none``.
    """

    ratio: float
    mode: str

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any] | None) -> TrainedSchedule | None:
        """From a safetensors header: ``ccs_format`` and ``schedule`` (JSON: mode, s_pre, s_now); None without them."""
        if not metadata or "ccs_format" not in metadata:
            return None
        if str(metadata["ccs_format"]).split(".")[0] != str(FORMAT):
            raise refuse("ccs_format", metadata["ccs_format"], FORMAT, "update this pack")
        schedule = metadata.get("schedule")
        if schedule is None:
            return None
        try:
            schedule = parse_table(schedule) if isinstance(schedule, str) else dict(schedule)
            return cls(float(schedule["s_now"]) / float(schedule["s_pre"]), str(schedule["mode"]))
        except (ValueError, KeyError, TypeError, ZeroDivisionError):
            raise refuse("schedule metadata", str(schedule), "JSON with mode, s_pre, s_now", "check the file") from None


def read_metadata(path: str | Path) -> dict[str, str]:
    """The metadata in a safetensors file's header; no tensor is read."""
    from safetensors import safe_open

    with named(path, "checkpoint", "a whole safetensors file", "copy it again"), safe_open(str(path), "pt") as file:
        return dict(file.metadata() or {})
