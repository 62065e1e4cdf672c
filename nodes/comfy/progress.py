"""Progress: ComfyUI's bar and its interrupt flag behind the engine's callback; pictures and texts on a node."""

from __future__ import annotations

import math
import time
from typing import Any

import comfy.model_management
import comfy.utils
import latent_preview
import numpy as np
import torch
from comfy_api.latest import ui
from PIL import Image

from ...engine.runtime.progress import Progress

SIDE, REST = 512, 0.2
"""Pixels that a picture on a running node is enlarged to, and the least seconds from one to the next."""


def progress(model: Any = None, hidden: Any = None) -> Progress:
    """A callback that moves ComfyUI's bar, shows pictures, and stops within one step when the user interrupts.

    Args:
        model: MODEL whose latents the previews are, where they are no pictures.
        hidden: a node's, with its ``unique_id``: what is done and the time left are said on it.
    """
    bar: list[Any] = []
    shown = [-math.inf]
    clock = _Clock(hidden)

    def advance(step: int, total: int, preview: torch.Tensor | None = None) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        if not bar:
            bar.append(comfy.utils.ProgressBar(total))
        picture, now = None, time.monotonic()
        clock.say(step, total, now)
        if preview is not None and (step == total or now - shown[0] > REST):
            shown[0], picture = now, _enlarged(preview, model)
        bar[0].update_absolute(step, total, picture and ("JPEG", picture, max(picture.size)))

    return advance


class _Clock:
    """Says on a node, once a second, how much is done and how long the rest takes."""

    def __init__(self, hidden: Any) -> None:
        self._hidden, self._last = hidden, -math.inf
        self._first: tuple[int, float] | None = None

    def say(self, step: int, total: int, now: float) -> None:
        """Of steps that take about equally long; those of a resumed run do not count towards its speed."""
        from server import PromptServer

        send = getattr(getattr(PromptServer, "instance", None), "send_progress_text", None)
        if self._hidden is None or send is None or now - self._last < 1.0:
            return
        self._first, self._last = self._first or (step, now), now
        send(time_left(step, total, step - self._first[0], now - self._first[1]), str(self._hidden.unique_id))


def time_left(step: int, total: int, done: int, seconds: float) -> str:
    """ "3 of 20, about 4 min left", from ``done`` steps in some seconds."""
    text = f"{step} of {total}"
    if done <= 0 or step >= total:
        return text
    left = seconds / done * (total - step)
    return f"{text}, about {left / 60:.0f} min left" if left >= 90 else f"{text}, about {left:.0f} s left"


def _enlarged(preview: torch.Tensor, model: Any) -> Any:
    """The first of pictures (B, 3, H, W) in [0, 1] or of latents, crisp; None for latents without colours."""
    if model is not None:
        latent_format = model.get_model_object("latent_format")
        if latent_format.latent_rgb_factors is None:
            return None
        names = ("latent_rgb_factors", "latent_rgb_factors_bias", "latent_rgb_factors_reshape")
        previewer = latent_preview.Latent2RGBPreviewer(*(getattr(latent_format, name, None) for name in names))
        picture = previewer.decode_latent_to_preview(preview[:1].float())
    else:
        picture = _as_picture(preview[0].movedim(0, -1))
    times = max(1, SIDE // max(picture.size))
    return picture.resize((times * picture.width, times * picture.height), Image.Resampling.NEAREST)


def _as_picture(image: torch.Tensor) -> Any:
    """(H, W, C) in [0, 1] as a PIL image."""
    return Image.fromarray((255 * image[..., :3].cpu().float()).clamp(0, 255).numpy().astype(np.uint8))


def show_on(hidden: Any, image: torch.Tensor) -> None:
    """The first of an IMAGE (B, H, W, C) on a node of the page, which need not be the one that runs.

    Args:
        hidden: the node's, with its ``unique_id``; None where no graph runs it.
    """
    from comfy_api import feature_flags
    from comfy_execution.progress import get_progress_state
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
    picture = _as_picture(image[0])
    shown = (("JPEG", picture, max(picture.size)), names)
    server.send_sync(BinaryEventTypes.PREVIEW_IMAGE_WITH_METADATA, shown, client)


def text_on(text: str) -> ui.PreviewText:
    """A text to show on a node, as its ``ui``; the page shows it there by ``web/texts.js``."""
    return ui.PreviewText(text)
