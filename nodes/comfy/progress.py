"""Progress: ComfyUI's bar and its interrupt flag behind the engine's callback."""

from __future__ import annotations

from typing import Any

import comfy.model_management
import comfy.utils
import torch

from ...engine.progress import Progress


def progress() -> Progress:
    """A callback that draws ComfyUI's bar and stops within one step when the user interrupts."""
    bar: list[Any] = []

    def advance(step: int, total: int, preview: torch.Tensor | None = None) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        if not bar:
            bar.append(comfy.utils.ProgressBar(total))
        bar[0].update_absolute(step, total)

    return advance
