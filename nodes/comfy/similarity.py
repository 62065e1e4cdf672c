"""What a node's picture looks like to the model, kept for the page: a click there becomes a map of what is alike.

The page asks ``POST /vitrine/similarity`` and nothing is queued. Maps are of the node's last run, whose picture is the
answer of ``POST /vitrine/picture``.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from comfy_api.latest import ui

from ...engine.activations import correspondence
from .page_routes import in_thread, key_in, not_run, number_in, post
from .panel_state import PanelStates, marked

NODES, SIDE = 32, 64
"""Nodes whose features are kept, and cells a side of the widest map: 336 MB at most for 1280 channels."""


class Clickable(NamedTuple):
    """A node's picture as the page knows it, and its features (C, H, W), float16 on the CPU."""

    picture: Mapping[str, Any]
    features: torch.Tensor


STATES: PanelStates[Clickable] = PanelStates(NODES)


def remember(hidden: Any, features: torch.Tensor, picture: Mapping[str, Any] | None = None) -> None:
    """Keep a node's (C, H, W) features.

    Args:
        hidden: the node's, of ``panel_state.HIDDEN``; None where no graph runs it.
        picture: file name, subfolder and type of what is clicked on.
    """
    height, width = features.shape[-2:]
    scale = min(1.0, SIDE / max(height, width))
    size = (max(1, round(height * scale)), max(1, round(width * scale)))
    maps = features if scale == 1 else F.interpolate(features[None].float(), size, mode="area")[0]
    STATES.remember(hidden, Clickable(picture or {}, F.normalize(maps.float(), dim=0).to("cpu", torch.float16)))


def clickable(shown: Any, picture: torch.Tensor, features: torch.Tensor, cls: Any) -> dict[str, Any]:
    """A node's ``ui`` with what the page shows under the points: the first of (B, H, W, C) pictures."""
    kept = ui.PreviewImage(picture[:1], cls=cls).as_dict()["images"]
    remember(cls.hidden, features, kept[0])
    return marked(shown, cls.hidden)


def similarity_map(state: Clickable, x: float, y: float) -> dict[str, Any]:
    """Cosines to the point, as bytes: 0 is the least alike cell, 255 the most."""
    maps = state.features.float()
    cosines = correspondence.similarity(maps, correspondence.sample_points(maps, torch.tensor([[x, y]])))
    low, high = float(cosines.min()), float(cosines.max())
    levels = ((cosines - low) / max(high - low, 1e-6) * 255).round().to(torch.uint8)
    values = base64.b64encode(levels.numpy().tobytes()).decode()
    return {"width": cosines.shape[1], "height": cosines.shape[0], "low": low, "high": high, "values": values}


def _state(asked: dict[str, Any]) -> Clickable:
    state = STATES.find(key_in(asked))
    if state is None:
        raise not_run()
    return state


async def _similarity(asked: dict[str, Any], request: Any) -> dict[str, Any]:
    x, y = (float(number_in(asked, name, 0.0, 1.0)) for name in ("x", "y"))
    return await in_thread(similarity_map, _state(asked), x, y)  # type: ignore[no-any-return]


async def _picture(asked: dict[str, Any], request: Any) -> dict[str, Any]:
    return dict(_state(asked).picture)


def register() -> None:
    """Answer the page, where there is a server."""
    post("/vitrine/similarity", _similarity)
    post("/vitrine/picture", _picture)
