"""What every node of the pack must have, counted: 100 % or the names of those that lack it."""

import inspect
import pkgutil
import re
from pathlib import Path

import pytest
from vitrine_tests.templates import ALL, every_node, read

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "nodes" / "web" / "docs"
IN_WORKFLOWS = {node["type"] for path in ALL for node in every_node(read(path))}


def _v3(node, schema):
    from comfy_api.latest import io

    return issubclass(node, io.ComfyNode) and "define_schema" in vars(node) and schema.node_id.startswith("Vitrine")


def _help(node, schema):
    page = DOCS / f"{schema.node_id}.md"
    return page.is_file() and page.read_text(encoding="utf-8").startswith(f"# {schema.display_name}\n")


TIME = re.compile(r"time|^start|^end|(^|_)steps?$|^late$")


def _unit(entry):
    """A share of the run (ComfyUI's own word for it is percent), the network's timestep, or whole steps."""
    return re.search(r"(percent|timestep|timestep_index|steps?)$", entry.display_name or entry.id)


def _twin(node, schema):
    """The page's last line names what does the same from Python; the name is there."""
    line = (DOCS / f"{schema.node_id}.md").read_text(encoding="utf-8").rstrip().splitlines()[-1]
    assert line.startswith("**In Python.** "), schema.node_id
    named = re.findall(r"`(vitrine\.[\w.]+)`", line)
    return bool(named) and all(pkgutil.resolve_name(name) for name in named)


def _told(node, schema):
    """A node's text goes through ``text_on``, whose texts ``web/texts.js`` draws and ``web/room.js`` has room for."""
    return "ui.PreviewText" not in inspect.getsource(node)


PASSES_ON = {"MODEL", "CONDITIONING", "LATENT", "GUIDER"}
"""What a step of a graph makes for the next one: such a node is run by what comes after it."""


def _runs_alone(node, schema):
    """What it shows on its face can be all one wants: ComfyUI runs a graph that ends there."""
    shows = "ui=" in inspect.getsource(node)
    within = {o.io_type for o in schema.outputs} & PASSES_ON and schema.node_id != "VitrineCollectTaps"
    return schema.is_output_node or not shows or within


CHECKS = {
    "V3 schema": _v3,
    "display name": lambda node, s: s.display_name and s.display_name != s.node_id,
    "category": lambda node, s: s.category.split("/")[0] == "Vitrine",
    "description": lambda node, s: s.description and s.description.endswith("."),
    "tooltip on every input": lambda node, s: all(i.tooltip for i in s.inputs),
    "tooltip on every output": lambda node, s: all(o.tooltip for o in s.outputs),
    "name on every output": lambda node, s: all(o.display_name for o in s.outputs),
    "unit of time in the name": lambda node, s: not [i.id for i in s.inputs if TIME.search(i.id) and not _unit(i)],
    "search aliases": lambda node, s: len(s.search_aliases or ()) > 0,
    "help page under its display name": _help,
    "a shipped workflow that uses it": lambda node, s: s.node_id in IN_WORKFLOWS,
    "its text shown on it": _told,
    "its twin in Python": _twin,
    "runs alone where it shows something": _runs_alone,
}


@pytest.fixture(scope="module")
def ours(comfy):
    found = {k: v for k, v in comfy.nodes.NODE_CLASS_MAPPINGS.items() if k.startswith("Vitrine")}
    assert len(found) >= 26
    return {k: (v, v.define_schema()) for k, v in found.items()}


@pytest.mark.parametrize("name", CHECKS)
def test_all_nodes_have(ours, name):
    lacking = [node_id for node_id, pair in ours.items() if not CHECKS[name](*pair)]
    assert not lacking, f"{name}: {len(ours) - len(lacking)} of {len(ours)}"


def test_all_nodes_are_loaded(ours, comfy):
    from vitrine.nodes import NODES

    assert set(ours) == {node.define_schema().node_id for node in NODES} and len(NODES) == len(ours)


def test_no_help_page_without_a_node(ours):
    assert {p.stem for p in DOCS.glob("*.md")} == set(ours)
