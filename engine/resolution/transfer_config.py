"""Settings of a transfer to another image size, and a checkpoint's training schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import refuse
from ..io.files import named, parse_table
from ..settings.config import Config
from .receptive import RECEPTIVE
from .rope import ROPE_MODES
from .shift import Size, check_size, size_ratio

SCHEDULES = ("resample", "relabel", "none")
POSITIONS = ("auto", "keep", "grid", "extrapolate", *ROPE_MODES)
FORMAT = 1
"""Major version of a control checkpoint's metadata (``ccs_format``)."""


@dataclass(frozen=True)
class ResolutionTransferConfig(Config):
    """What to change when a model samples at another than its training size.

    Attributes:
        target_size: (width, height) in pixels of the generated images.
        train_size: (width, height) of the training images; None reads it from the model.
        schedule: ``resample`` moves the sampling grid (for untouched checkpoints), ``relabel`` the meaning of timesteps
            (for checkpoints trained so), ``none`` neither.
        pos_embed: ``auto`` is grid for sin-cos tables, rope_pi for rotary ones, keep if there is nothing to do.
            The ``_dynamic`` modes depend on the timestep; ``auto`` never chooses them.
        guidance_law: scale ``guidance`` by Eq. 4.
        guidance: the guidance scale used at the training size; None leaves guidance to the caller.
        override: accept relabel on a checkpoint whose header does not say that it was trained so.
        receptive_field: ``dilate`` dilates a UNet's inner convolutions to its trained view of the image, see
            ``receptive``; ``auto`` does so from 1.75 times the trained side, and nothing on transformers; ``none``
            never does.
    """

    target_size: Size
    train_size: Size | None = None
    schedule: str = "resample"
    pos_embed: str = "auto"
    guidance_law: bool = False
    guidance: float | None = None
    override: bool = False
    receptive_field: str = "none"

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_size", check_size("target size", self.target_size))
        if self.train_size is not None:
            object.__setattr__(self, "train_size", check_size("train size", self.train_size))
            size_ratio(self.train_size, self.target_size)
        choices = {"schedule": SCHEDULES, "pos_embed": POSITIONS, "receptive_field": RECEPTIVE}
        for name, accepted in choices.items():
            if getattr(self, name) not in accepted:
                raise refuse(name, getattr(self, name), accepted, "see the help page of Resolution Transfer Loader")
        if self.guidance is not None and not (math.isfinite(self.guidance) and self.guidance >= 0):
            raise refuse("guidance", self.guidance, "0 or more", "1 is no guidance")
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
