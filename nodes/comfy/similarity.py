"""What a node's picture looks like to the model, kept for the page: a click there becomes a map of what is alike.

The page asks ``POST /vitrine/similarity`` and nothing is queued. Maps are of the node's last run.
"""

from __future__ import annotations

import asyncio
import base64
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from comfy_api.latest import ui

from ...engine.activations import correspondence

NODES, SIDE = 4, 64
"""Nodes whose features are kept, and cells a side of the widest map: 40 MB at most for 1280 channels."""

_features: OrderedDict[str, torch.Tensor] = OrderedDict()


def remember(hidden: Any, features: torch.Tensor) -> None:
    """Keep a node's (C, H, W) features, float16 on the CPU; the node that ran longest ago is forgotten.

    Args:
        hidden: the node's, with its ``unique_id``; None where no graph runs it.
    """
    if hidden is None:
        return
    node_id = str(hidden.unique_id)
    height, width = features.shape[-2:]
    scale = min(1.0, SIDE / max(height, width))
    size = (max(1, round(height * scale)), max(1, round(width * scale)))
    maps = features if scale == 1 else F.interpolate(features[None].float(), size, mode="area")[0]
    _features[node_id] = F.normalize(maps.float(), dim=0).to("cpu", torch.float16)
    _features.move_to_end(node_id)
    while len(_features) > NODES:
        _features.popitem(last=False)


def clickable(picture: torch.Tensor, cls: Any) -> dict[str, Any]:
    """What the page draws under the points: the first of (B, H, W, C) pictures, under a key of our own."""
    return {"vitrine_picture": ui.PreviewImage(picture[:1], cls=cls).as_dict()["images"]}


def similarity_map(node_id: str, x: float, y: float) -> dict[str, Any] | None:
    """Cosines to the point, as bytes: 0 is the least alike cell, 255 the most; None where nothing was kept."""
    features = _features.get(node_id)
    if features is None:
        return None
    maps = features.float()
    cosines = correspondence.similarity(maps, correspondence.sample_points(maps, torch.tensor([[x, y]])))
    low, high = float(cosines.min()), float(cosines.max())
    levels = ((cosines - low) / max(high - low, 1e-6) * 255).round().to(torch.uint8)
    values = base64.b64encode(levels.numpy().tobytes()).decode()
    return {"width": cosines.shape[1], "height": cosines.shape[0], "low": low, "high": high, "values": values}


def register() -> None:
    """Answer the page, where there is a server; importing the nodes elsewhere needs none."""
    from server import PromptServer

    server = getattr(PromptServer, "instance", None)
    if server is None or not hasattr(server, "routes"):
        return
    from aiohttp import web

    @server.routes.post("/vitrine/similarity")
    async def answer(request: Any) -> Any:
        try:
            asked = await request.json()
            node_id, x, y = str(asked["node"]), float(asked["x"]), float(asked["y"])
        except (ValueError, TypeError, KeyError):
            return web.json_response({"error": "node, x and y"}, status=400)
        if not (0 <= x <= 1 and 0 <= y <= 1):
            return web.json_response({"error": "x and y from 0 to 1"}, status=400)
        answered = await asyncio.to_thread(similarity_map, node_id, x, y)
        return web.json_response(answered or {"error": "run the node once"}, status=200 if answered else 404)
