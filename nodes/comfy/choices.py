"""What a text field could hold, for the page's dropdowns: labels of a space, places of a model.

The page asks ``POST /vitrine/choices``. A node is known since its last run; before it, the file that *Load W2W Space*
names and the models that ship are looked into.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from ...engine.errors import VitrineError
from ...engine.portraits.flow import FLOW_WEIGHTS
from ...engine.portraits.shipped import shipped_models
from ...engine.tracing.addresses import sites_of
from ...engine.w2w import labels_in
from .flow import load_flow_model
from .model import backbone_of
from .portraits import load_model
from .w2w import space_path

NODES = 32
"""Nodes whose choices are kept."""

_choices: OrderedDict[str, list[str]] = OrderedDict()


def remember(hidden: Any, names: Iterable[str]) -> None:
    """Keep what a node's field could hold; the node that ran longest ago is forgotten.

    Args:
        hidden: the node's, with its ``unique_id``; None where no graph runs it.
    """
    if hidden is None:
        return
    node_id = str(hidden.unique_id)
    _choices[node_id] = list(names)
    _choices.move_to_end(node_id)
    while len(_choices) > NODES:
        _choices.popitem(last=False)


def choices(asked: Mapping[str, Any]) -> list[str] | None:
    """Names in their order; None where nothing is known yet.

    Args:
        asked: ``space_file`` or ``shipped`` as the loaders' fields have them, else ``node``, which has run.
    """
    try:
        if asked.get("space_file"):
            return labels_in(space_path(str(asked["space_file"])))
        if asked.get("shipped"):
            return list(_places(str(asked["shipped"])))
    except (VitrineError, OSError, KeyError):
        pass  # a file that is gone: what the node knew when it ran
    return _choices.get(str(asked.get("node")))


@lru_cache(maxsize=4)
def _places(name: str) -> tuple[str, ...]:
    folder = shipped_models()[name]
    load = load_flow_model if folder == FLOW_WEIGHTS else load_model
    return tuple(sites_of(backbone_of(load(str(folder)))))


def register() -> None:
    """Answer the page, where there is a server; importing the nodes elsewhere needs none."""
    from server import PromptServer

    server = getattr(PromptServer, "instance", None)
    if server is None or not hasattr(server, "routes"):
        return
    from aiohttp import web

    @server.routes.post("/vitrine/choices")
    async def answer(request: Any) -> Any:
        try:
            asked = dict(await request.json())
        except (ValueError, TypeError):
            return web.json_response({"error": "an object"}, status=400)
        names = await asyncio.to_thread(choices, asked)
        return web.json_response({"names": names or []})
