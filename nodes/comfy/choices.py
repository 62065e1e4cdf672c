"""What a text field could contain, for the page's dropdowns: labels of a space, layers of a model.

The page asks ``POST /vitrine/choices``. A node is known since its last run; before it, the file that
*Load LoRA Space (W2W)* names and the models that ship are looked into.
"""

from __future__ import annotations

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
from .page_routes import in_thread, key_in, post, text_in
from .panel_state import PanelStates
from .portraits import load_model
from .w2w import space_path

NAMES: PanelStates[list[str]] = PanelStates()
FILE_LETTERS = 1_000
"""The most of a file's name."""


def remember(hidden: Any, names: Iterable[str]) -> None:
    """Keep what a node's field could contain.

    Args:
        hidden: the node's, of ``panel_state.HIDDEN``; None where no graph runs it.
    """
    NAMES.remember(hidden, list(names))


def choices(asked: Mapping[str, Any]) -> list[str] | None:
    """Names in their order; None where nothing is known yet.

    Args:
        asked: ``space_file`` or ``shipped`` as the loaders' fields have them, else the ids of a node that has run.
    """
    file, shipped, key = text_in(asked, "space_file", FILE_LETTERS), text_in(asked, "shipped"), key_in(asked)
    try:
        if file:
            return labels_in(space_path(file))
        if shipped:
            return list(_places(shipped))
    except (VitrineError, ValueError, OSError, KeyError):
        pass  # a file that is gone: what the node knew when it ran
    return NAMES.find(key)


@lru_cache(maxsize=4)
def _places(name: str) -> tuple[str, ...]:
    folder = shipped_models()[name]
    load = load_flow_model if folder == FLOW_WEIGHTS else load_model
    return tuple(sites_of(backbone_of(load(str(folder)))))


async def _choices(asked: dict[str, Any], request: Any) -> dict[str, Any]:
    return {"names": await in_thread(choices, asked) or []}


def register() -> None:
    """Answer the page, where there is a server."""
    post("/vitrine/choices", _choices)
