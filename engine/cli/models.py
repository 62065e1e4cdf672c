"""Models that commands take by name: the shipped one, a folder, or a hub id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import refuse

SHIPPED = "portraits"


def load_pipeline(model: str, kind: Any = None) -> Any:
    """The shipped model, or one from a folder or hub id, as a pipeline of class ``kind`` (default: the model's own).

    Raises:
        VitrineError: If the folder is missing, or there is no such model.
    """
    if model == SHIPPED:
        from ..portraits import load_portraits

        pipe = load_portraits().pipeline()
        return pipe if kind is None else kind.from_pipe(pipe)
    from diffusers import DiffusionPipeline

    if not Path(model).is_dir() and (Path(model).is_absolute() or model.startswith(".") or model.count("/") != 1):
        raise refuse("model", model, "'portraits', a pipeline folder, or a hub id", "check the path")
    try:
        return (kind or DiffusionPipeline).from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise refuse(
            "model", f"{model} ({reason})", "'portraits', a pipeline folder, or a hub id", "check it"
        ) from error


def load_backbone(model: str) -> Any:
    """The UNet or transformer of :func:`load_pipeline`.

    Raises:
        VitrineError: As :func:`load_pipeline`.
    """
    pipe = load_pipeline(model)
    return getattr(pipe, "unet", None) or pipe.transformer
