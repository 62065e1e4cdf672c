"""What a template shows when it opens: few boxes, and among them the nodes that it is about."""

import json
from pathlib import Path

from vitrine_tests.templates import ALL, SHIPPED, every_node, first_screen, read, subgraphs, without_boxes

ROOT = Path(__file__).parents[2]
FIND = ROOT / "workflows" / "Find the same part (demo).json"
MOST = 12
"""Boxes of a first screen; a subgraph is one, a note is none."""


def test_a_first_screen_is_small(subtests):
    for path in ALL:
        with subtests.test(path.stem):
            page = read(path)
            shown = first_screen(page)
            assert 0 < len(shown) <= MOST, [node.get("title") or node["type"] for node in shown]
            assert len(page["nodes"]) > len(shown) or len(shown) <= 4, "a note says what it does"


HEAD = 30
"""Pixels that a node's title is above its position, and that a group's title takes."""
LETTER = 0.42
"""Width of a letter on average, of its height."""


def test_a_group_holds_its_nodes_and_its_title_and_lies_over_nothing_else(subtests):
    for path in ALL:
        with subtests.test(path.stem):
            page = read(path)
            for group in page["groups"]:
                left, top, width, height = group["bounding"]
                assert len(group["title"]) * LETTER * group["font_size"] <= width, group["title"]
                for node in page["nodes"]:
                    (x, y), (wide, high) = node["pos"], node["size"]
                    across = x < left + width and left < x + wide
                    meets = across and y - HEAD < top + height and top < y + high
                    within = left <= x and x + wide <= left + width and y + high <= top + height
                    assert not meets or within and top + HEAD <= y, (node.get("title", node["type"]), group["title"])


def test_what_is_seen_of_a_subgraph_says_what_is_in_it(subtests):
    for path in ALL:
        with subtests.test(path.stem):
            page = read(path)
            boxes, defined = subgraphs(page), page.get("definitions", {}).get("subgraphs", [])
            assert set(boxes) == {s["name"] for s in defined}, "each has one box"
            for title, box in boxes.items():
                assert len(box["description"]) >= 40 and len(box["nodes"]) > 1, title
                (host,) = [node for node in page["nodes"] if node["type"] == box["id"]]
                assert [i["name"] for i in host["inputs"]] == [i["name"] for i in box["inputs"]]
                assert all(i["linkIds"] for i in box["inputs"]) and all(o["linkIds"] for o in box["outputs"])
                widgets = [i for i in host["inputs"] if "widget" in i]
                assert len(host["widgets_values"]) == len(widgets), "in order, connected or not"


def test_its_graph_has_all_of_it_under_plain_numbers(subtests):
    for path in ALL:
        with subtests.test(path.stem):
            page = read(path)
            graph = without_boxes(read(path.parent / "api" / path.name))
            on = [n for n in every_node(page) if n["type"] not in ("Note", "MarkdownNote") and n["mode"] == 0]
            assert {str(n["id"]): n["type"] for n in on} == {i: node["class_type"] for i, node in graph.items()}


HIDDEN = {"Find the same part (demo)": {8}, "Say how large a picture should look (demo)": {19, 39, 43}}
"""Pictures that a box's description speaks of and that are seen in it: in the one, places that were dropped; in the
other, the size between two sizes, and the weight over the run."""


def test_every_picture_is_seen_at_once(subtests):
    for path in ALL:
        with subtests.test(path.stem):
            page = read(path)
            hidden = _pictures(every_node(page)) - _pictures(first_screen(page))
            assert hidden == HIDDEN.get(path.stem, set())
            for box in subgraphs(page).values():
                assert "pen it" in box["description"] or not hidden & {node["id"] for node in box["nodes"]}


def _pictures(nodes):
    return {node["id"] for node in nodes if node["type"] == "PreviewImage"}


STEPS = {
    "VitrineActivePatches",
    "VitrineNEMOBake",
    "VitrineNEMOVerify",
    "VitrineNoisyReplicatePadding",
    "VitrineSaveActivations",
    "VitrineW2WBlend",
}
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


def test_the_points_that_are_there_at_opening_sit_on_the_eyes():
    from vitrine.engine.portraits import KEYPOINTS, render, sample_scenes

    nodes = {n.get("title", n["type"]): n["widgets_values"] for n in read(FIND)["nodes"] if "widgets_values" in n}
    points = [tuple(map(float, line.split())) for line in nodes["VitrineFindCorrespondence"][0].splitlines()]
    shown = dict(zip(KEYPOINTS, render(sample_scenes([nodes["One source picture"][0]]), 64).keypoints[0], strict=True))
    for point, name in zip(points, ("left_eye", "right_eye"), strict=False):
        assert max(abs(a - float(b)) for a, b in zip(point, shown[name], strict=True)) < 0.02, name
