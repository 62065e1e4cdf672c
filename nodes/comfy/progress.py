"""Progress: ComfyUI's bar and its interrupt flag behind the engine's callback."""

from __future__ import annotations

from typing import Any

import comfy.model_management
import comfy.utils
import numpy as np
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


def show_on(hidden: Any, image: torch.Tensor) -> None:
    """The first of an IMAGE (B, H, W, C) on a node of the page, which need not be the one that runs.

    Args:
        hidden: the node's, with its ``unique_id``; None where no graph runs it.
    """
    from comfy_api import feature_flags
    from comfy_execution.progress import get_progress_state
    from PIL import Image
    from protocol import BinaryEventTypes
    from server import PromptServer

    server = getattr(PromptServer, "instance", None)
    sockets, client = getattr(server, "sockets_metadata", {}), getattr(server, "client_id", None)
    if server is None or hidden is None:
        return
    if not feature_flags.supports_feature(sockets, client, "supports_preview_metadata"):
        return
    node_id, state = str(hidden.unique_id), get_progress_state()
    names = {"node_id": node_id, "real_node_id": node_id, "display_node_id": node_id, "prompt_id": state.prompt_id}
    picture = Image.fromarray((255 * image[0, ..., :3].cpu().float()).clamp(0, 255).numpy().astype(np.uint8))
    shown = (("JPEG", picture, max(picture.size)), names)
    server.send_sync(BinaryEventTypes.PREVIEW_IMAGE_WITH_METADATA, shown, client)
