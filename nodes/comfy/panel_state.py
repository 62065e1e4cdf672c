"""What panels on the page know of a node since its last run, by client, workflow and the node's id in a run.

A node in a subgraph has an id like ``7:4``, and copies of a subgraph have one each. What is kept belongs to a run of
the node; where ComfyUI takes the node's outputs from its cache, in another tab or another workflow, they bring the mark
of the run that made them in their ``ui``, and the panel there shows the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from comfy_api.latest import io

from .run_watch import RUNS

HIDDEN = [io.Hidden.unique_id, io.Hidden.extra_pnginfo]
"""What the schema of a node with a panel asks for."""
MARK, KEYS, NODES = "vitrine_run", 4096, 64
"""Key of the mark in a node's ``ui``, the most nodes whose last run is known, and those whose state is kept. In a graph
with more panels of one kind some stay empty: ComfyUI takes their nodes from its cache, and they do not run again."""
T = TypeVar("T")


class NodeKey(NamedTuple):
    """A node of an open workflow.

    Attributes:
        client: id of the page's connection, which a tab keeps when it is loaded again; empty without a page.
        workflow: id of the workflow; empty where the run came without one.
        node: its id in a run, with those of the subgraphs that it is in: ``7:4``.
    """

    client: str
    workflow: str
    node: str


_last_runs: OrderedDict[NodeKey, str] = OrderedDict()


def _keep(entries: OrderedDict, key: Any, value: Any, most: int) -> None:
    entries[key] = value
    entries.move_to_end(key)
    while len(entries) > most:
        entries.popitem(last=False)


def _workflow_of(pnginfo: Any) -> str:
    workflow = pnginfo.get("workflow") if isinstance(pnginfo, Mapping) else None
    return str(workflow.get("id") or "") if isinstance(workflow, Mapping) else ""


def _mark_of(hidden: Any) -> str:
    """Of the running node in the running run."""
    from comfy_execution.utils import get_executing_context

    context = get_executing_context()
    return f"{context.prompt_id if context else ''}/{hidden.unique_id}"


def marked(shown: Any, hidden: Any) -> dict[str, Any]:
    """What a node shows, with the mark of its run.

    Args:
        shown: a ``ui`` of core's, or a dict.
        hidden: the node's; None where no graph runs it.
    """
    content = dict(shown if isinstance(shown, Mapping) else shown.as_dict())
    return content if hidden is None else content | {MARK: [_mark_of(hidden)]}


class PanelStates(Generic[T]):
    """One kind of state, of the nodes that ran last.

    Args:
        most: how many are kept; the node that ran longest ago is forgotten.
    """

    def __init__(self, most: int = NODES) -> None:
        self.most = most
        self._states: OrderedDict[str, T] = OrderedDict()
        RUNS.freed.append(self._freed)

    def remember(self, hidden: Any, state: T) -> None:
        """Keep the running node's.

        Args:
            hidden: the node's, of :data:`HIDDEN`; None where no graph runs it.
        """
        if hidden is None or hidden.unique_id is None:
            return
        from server import PromptServer

        client = str(getattr(PromptServer.instance, "client_id", None) or "")
        mark = _mark_of(hidden)
        _keep(_last_runs, NodeKey(client, _workflow_of(hidden.extra_pnginfo), str(hidden.unique_id)), mark, KEYS)
        _keep(self._states, mark, state, self.most)

    def find(self, key: NodeKey) -> T | None:
        """The state of a node's last run; None where it has not run, or ComfyUI has freed its memory since."""
        return self._states.get(_last_runs.get(key, ""))

    def _freed(self, flags: Mapping[str, Any]) -> None:
        """ComfyUI forgets the outputs of all nodes: each runs again."""
        if flags.get("free_memory"):
            self._states.clear()


def _finished(item: Any, outputs: Mapping[str, Any]) -> None:
    """A run has ended: which run its nodes' outputs, new ones and cached ones, are of."""
    about = item[3] if item is not None and len(item) > 3 and isinstance(item[3], Mapping) else {}
    client, workflow = str(about.get("client_id") or ""), _workflow_of(about.get("extra_pnginfo"))
    for node, shown in outputs.items():
        marks = shown.get(MARK) if isinstance(shown, Mapping) else None
        if marks:
            _keep(_last_runs, NodeKey(client, workflow, str(node)), str(marks[-1]), KEYS)


RUNS.finished.append(_finished)
