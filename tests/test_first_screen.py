"""What a template shows when it opens: few boxes, and among them the nodes that it is about."""

import json
from pathlib import Path

import pytest
from vitrine_tests.templates import ALL, SHIPPED, every_node, first_screen, read, subgraphs, without_boxes

ROOT = Path(__file__).parents[1]
MOST = 12
"""Boxes of a first screen; a subgraph is one, a note is none."""


@pytest.mark.parametrize("path", ALL, ids=lambda p: p.stem)
def test_a_first_screen_is_small(path):
    page = read(path)
    shown = first_screen(page)
    assert 0 < len(shown) <= MOST, [node.get("title") or node["type"] for node in shown]
    assert len(page["nodes"]) > len(shown), "a note says what it does"


@pytest.mark.parametrize("path", ALL, ids=lambda p: p.stem)
def test_what_is_seen_of_a_subgraph_says_what_is_in_it(path):
    page = read(path)
    boxes = subgraphs(page)
    assert set(boxes) == {s["name"] for s in page.get("definitions", {}).get("subgraphs", [])}, "each has one box"
    for title, box in boxes.items():
        assert len(box["description"]) >= 40 and len(box["nodes"]) > 1, title
        (host,) = [node for node in page["nodes"] if node["type"] == box["id"]]
        assert [i["name"] for i in host["inputs"]] == [i["name"] for i in box["inputs"]]
        assert all(i["linkIds"] for i in box["inputs"]) and all(o["linkIds"] for o in box["outputs"])
        assert len(host["widgets_values"]) == sum("widget" in i for i in host["inputs"]), "in order, connected or not"


@pytest.mark.parametrize("path", ALL, ids=lambda p: p.stem)
def test_its_graph_has_all_of_it_under_plain_numbers(path):
    page = read(path)
    graph = without_boxes(read(path.parent / "api" / path.name))
    on = [n for n in every_node(page) if n["type"] not in ("Note", "MarkdownNote") and n["mode"] == 0]
    assert {str(n["id"]): n["type"] for n in on} == {i: node["class_type"] for i, node in graph.items()}


HIDDEN = {"Find the same part in every picture": {8}, "Say how large a picture should look": {19, 39, 43}}
"""Pictures that a box's description speaks of and that are seen in it: in the one, places that were dropped; in the
other, the size between two sizes, and the weight over the run."""


@pytest.mark.parametrize("path", ALL, ids=lambda p: p.stem)
def test_every_picture_is_seen_at_once(path):
    page = read(path)
    hidden = _pictures(every_node(page)) - _pictures(first_screen(page))
    assert hidden == HIDDEN.get(path.stem, set())
    for box in subgraphs(page).values():
        assert "pen it" in box["description"] or not hidden & {node["id"] for node in box["nodes"]}


def _pictures(nodes):
    return {node["id"] for node in nodes if node["type"] == "PreviewImage"}


STEPS = {
    "VitrineActivePatches", "VitrineCrossSizeConsistency", "VitrineNEMOBake", "VitrineNEMOVerify",
    "VitrineNoisyReplicatePadding", "VitrineSaveActivations", "VitrineSaveW2WLora", "VitrineW2WBlend",
}  # fmt: skip
"""Nodes of the pack that stand in boxes only: a step or a check of an example about another node."""


def test_every_other_node_of_the_pack_stands_on_a_first_screen():
    pages = [read(path) for path in SHIPPED]
    seen, known = (
        {node["type"] for page in pages for node in found(page) if node["type"].startswith("Vitrine")}
        for found in (first_screen, every_node)
    )
    assert known - seen == STEPS and len(seen) >= 35
    boxes = [box for page in pages for box in subgraphs(page).values()]
    names = json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8"))
    for kind in STEPS:
        holding = [box for box in boxes if kind in {node["type"] for node in box["nodes"]}]
        assert all(names[kind]["display_name"] in box["description"] for box in holding), kind
