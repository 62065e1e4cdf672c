"""The shipped workflows by kind: on a model that ships with the pack, and on the user's own, to be run as they are.

What does not belong on a template's first screen stands in subgraphs; a node keeps its number there, so that a graph
without them, and the twins, speak of it as before.
"""

import json
import re
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "workflows"
ALL = sorted(FOLDER.glob("*.json"))
ON_YOUR_MODEL = [
    p for p in ALL if any(n["type"] == "CheckpointLoaderSimple" for n in json.loads(p.read_text("utf-8"))["nodes"])
]
SHIPPED = [p for p in ALL if p not in ON_YOUR_MODEL]
"""Those of them whose pictures the pack's own models draw."""
WITH_A_MODEL = [p for p in SHIPPED if '"VitrineLoadPortraits' in p.read_text("utf-8")]
"""Those of them that load a model, which can be another one; the rest shows the people's space alone."""


def plain_title(title):
    """Without "(demo)" or "(your checkpoint)", which both templates of a pair end in."""
    return re.sub(r" \([^)]*\)$", "", title)


def read(path):
    """A template as the page reads it."""
    return json.loads(path.read_text(encoding="utf-8"))


def subgraphs(page):
    """Title of a box -> the definition of what is in it."""
    known = {s["id"]: s for s in page.get("definitions", {}).get("subgraphs", [])}
    return {node["title"]: known[node["type"]] for node in page["nodes"] if node["type"] in known}


def first_screen(page):
    """The nodes that are seen when a template opens: a subgraph is one, notes are read and not counted."""
    return [node for node in page["nodes"] if node["type"] not in ("Note", "MarkdownNote")]


def every_node(page):
    """All nodes, those in subgraphs included, the boxes themselves left out."""
    inside = subgraphs(page).values()
    boxes = {s["id"] for s in inside}
    return [n for n in page["nodes"] if n["type"] not in boxes] + [n for s in inside for n in s["nodes"]]


def plain_id(node_id):
    """A node's own number: "103:11" is node 11, in the box 103."""
    return node_id.rpartition(":")[2]


def without_boxes(graph):
    """An API graph with plain numbers."""

    def plain(value):
        return [plain_id(value[0]), value[1]] if isinstance(value, list) and len(value) == 2 else value

    found = {
        plain_id(i): node | {"inputs": {k: plain(v) for k, v in node["inputs"].items()}} for i, node in graph.items()
    }
    assert len(found) == len(graph), "every node has its own number, in a box or not"
    return found


def reached(page, link):
    """(node, name of its input) behind a link of the first screen: through the box, if it leads into one."""
    nodes = {node["id"]: node for node in page["nodes"]}
    (target,) = [nodes[row[3]] for row in page["links"] if row[0] == link]
    (slot,) = [row[4] for row in page["links"] if row[0] == link]
    box = subgraphs(page).get(target.get("title"))
    if box is None or target["type"] != box["id"]:
        return [(target["id"], target["inputs"][slot]["name"])]
    inner = {node["id"]: node for node in box["nodes"]}
    ends = [row for row in box["links"] if row["id"] in box["inputs"][slot]["linkIds"]]
    return [(row["target_id"], inner[row["target_id"]]["inputs"][row["target_slot"]]["name"]) for row in ends]
