"""Nodes, their inputs, and workflows that once existed still do: people's saved graphs name them."""

import json
import re
from pathlib import Path

from vitrine_tests.templates import every_node, plain_title

ROOT = Path(__file__).parents[1]
KEPT = json.loads((ROOT / "tests" / "data" / "names.json").read_text(encoding="utf-8"))
"""nodes: id -> inputs by name, number of outputs. workflows: title -> nodes of the pack, which stay in it; no graph
holds a title, so titles may change. All other entries are only ever added."""
DEFINITIONS = json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8"))
SOURCE = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "nodes").rglob("*.py"))
IDS = set(re.findall(r'node_id="(\w+)"', SOURCE))


def test_nodes_and_their_inputs(subtests):
    """tests/comfy/test_locales.py holds the definitions to what real ComfyUI is told."""
    for node_id in KEPT["nodes"]:
        with subtests.test(node_id):
            kept, now = KEPT["nodes"][node_id], DEFINITIONS[node_id]
            assert node_id in IDS
            assert set(kept["inputs"]) <= set(now.get("inputs", {})) and kept["outputs"] <= len(now.get("outputs", {}))


def test_workflows(subtests):
    for name in KEPT["workflows"]:
        with subtests.test(name):
            page = json.loads((ROOT / "workflows" / f"{name}.json").read_text(encoding="utf-8"))
            graph = json.loads((ROOT / "workflows" / "api" / f"{name}.json").read_text(encoding="utf-8"))
            of_page = {node["type"] for node in every_node(page)}
            of_graph = {node["class_type"] for node in graph.values()}
            assert set(KEPT["workflows"][name]) <= of_page
            assert {kind for kind in of_page | of_graph if kind.startswith("Vitrine")} <= IDS
            for node in graph.values():
                if node["class_type"] in KEPT["nodes"]:
                    # as the page writes those below a choice
                    named = {name.replace(".", "_") for name in node["inputs"]}
                    assert named <= set(DEFINITIONS[node["class_type"]]["inputs"]), node["class_type"]


def test_new_names_are_kept_too():
    assert set(KEPT["nodes"]) == IDS == set(DEFINITIONS), "add the new ones to tests/data/names.json"
    assert set(KEPT["workflows"]) == {p.stem for p in (ROOT / "workflows").glob("*.json")}


def test_scripts_of_the_page_name_inputs_that_exist():
    """A field that a script asks for by another id is silently left as it is."""
    scripts = {p.name: p.read_text(encoding="utf-8") for p in (ROOT / "nodes" / "web").glob("*.js")}
    rows = re.findall(r"^  (Vitrine\w+): (\{.*\}),$", scripts["choices.js"], re.MULTILINE)
    named = {(node_id, name) for node_id, row in rows for name in re.findall(r"[{,] (\w+): (?=LABELS|\{)", row)}
    assert len(named) >= 10 and ("VitrineW2WEdit", "label_1") in named
    lost = {(node_id, name) for node_id, name in named if name not in DEFINITIONS[node_id]["inputs"]}
    known = {name for node in DEFINITIONS.values() for name in node.get("inputs", {})}
    for script, text in scripts.items():
        asked = re.findall(r'(?:\bw|\bi)\.name === "(\w+)"', text)
        lost |= {(script, name) for name in asked if name not in known}
    assert lost == {("rows.js", "people")}, "the panel itself is no input"


def test_templates_are_listed_in_an_order_of_learning():
    """nodes/web/templates.js orders what the page lists; twins share a title, and the end says whose model it is."""
    script = (ROOT / "nodes" / "web" / "templates.js").read_text(encoding="utf-8")
    order = re.findall(r'"([^"]+)"', script.partition("const ORDER = [")[2].partition("];")[0])
    titles = [p.stem for p in (ROOT / "workflows").glob("*.json")]
    assert all(title.endswith((" (demo)", " (your checkpoint)")) for title in titles)
    assert {plain_title(title) for title in titles} == set(order) and len(order) == len(set(order))
    assert [title.split()[0] for title in order[:4]] == ["Pull", "Pull", "Find", "See"]
