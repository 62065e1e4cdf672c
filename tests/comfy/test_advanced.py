"""What Nodes 2.0 hides behind *Show advanced inputs*: what the help pages speak of under "Advanced", and no socket."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "nodes" / "web" / "docs"
MANY = 9
"""Widgets on a node; one with so many shows some of them on demand only."""
MOST = 7
"""Widgets that a node shows before *advanced* is pressed, in both modes of the page."""
UNUSED_ROWS = {f"{part}_{row}" for part in ("label", "strength") for row in (3, 4)}
"""Of Person Sliders (W2W), which shows a row when the one before is used (test_slider_rows.py)."""
NEVER = {"seed", "steps", "cfg"}
"""What a KSampler shows too: seen on every node that draws."""


def words(text):
    return set(re.findall(r"`(\w+)`", text))


def parts(node_id):
    """(names in the table of the inputs that matter, names under "Advanced") of a help page."""
    first, _, rest = (DOCS / f"{node_id}.md").read_text(encoding="utf-8").partition("## Advanced")
    return words("\n".join(line for line in first.splitlines() if line.startswith("|"))), words(rest)


@pytest.fixture(scope="module")
def schemas(comfy):
    found = {k: v.define_schema() for k, v in comfy.nodes.NODE_CLASS_MAPPINGS.items() if k.startswith("Vitrine")}
    assert len(found) >= 40
    return found


def widgets(schema):
    return [entry for _, entry in named_widgets(schema)]


def named_widgets(schema):
    """(name on the page, input) of each, those below a choice after it."""
    from comfy_api.latest import io

    for entry in schema.inputs:
        if isinstance(entry, (io.WidgetInput, io.DynamicCombo.Input)):
            yield entry.id, entry
        for option in getattr(entry, "options", None) or ():
            yield from ((f"{entry.id}.{below.id}", below) for below in getattr(option, "inputs", ()))


def test_a_node_of_many_widgets_shows_fewer(schemas):
    many = {k: widgets(s) for k, s in schemas.items() if len(widgets(s)) >= MANY}
    assert len(many) >= 8
    for node_id, entries in many.items():
        assert any(entry.advanced for entry in entries), node_id
        assert 2 <= sum(not entry.advanced and entry.id not in UNUSED_ROWS for entry in entries) <= MOST, node_id


DETECTION = {"VitrineNEMODetect", "VitrineNEMOCalibrate"}
"""Their steps and cfg are of the few-step samples that are compared, not of a picture."""


def test_hidden_is_what_the_help_page_calls_advanced(schemas):
    rest = set().union(*(parts(node_id)[1] for node_id in schemas))
    marked = 0
    for node_id, schema in schemas.items():
        hidden = {entry.id for entry in schema.inputs if entry.advanced}
        assert hidden <= {entry.id for entry in widgets(schema)}, "sockets are always seen"
        assert not hidden & parts(node_id)[0], node_id
        drawn = set() if node_id in DETECTION else hidden & NEVER
        assert not drawn or drawn <= {"seed"} and "ensemble" in hidden, f"{node_id}: the seed of an average over noises"
        shown = {entry.display_name or entry.id for entry in schema.inputs if entry.id in hidden}
        assert shown <= rest, f"{node_id}: {sorted(shown - rest)}"
        marked += len(hidden)
    assert marked >= 60


def test_saved_graphs_find_every_widget_in_its_place(schemas):
    """Values are saved by position: the order is the one before any was hidden, which the shipped workflows hold."""
    seen = set()
    for path in (ROOT / "workflows").glob("*.json"):
        page = json.loads(path.read_text(encoding="utf-8"))
        inside = [node for box in page.get("definitions", {}).get("subgraphs", []) for node in box["nodes"]]
        for node in page["nodes"] + inside:
            if node["type"] in schemas:
                saved = [i["name"] for i in node["inputs"] if "widget" in i]
                now = [name for name, _ in named_widgets(schemas[node["type"]])]
                assert [name for name in now if name in saved] == saved, (path.stem, node["type"])
                seen.add(node["type"])
    assert len(seen) >= 40


def test_an_unknown_name_is_refused_and_a_shared_input_left_as_it_is(comfy):
    from comfy_api.latest import io
    from vitrine.nodes.sockets import under_advanced

    shared = io.Int.Input("seeds")
    (made,) = under_advanced(("seeds",), [shared])
    assert made.advanced and made.id == "seeds" and not shared.advanced
    with pytest.raises(ValueError, match=r"'seed'.*there are \['seeds'\]"):
        under_advanced(("seed",), [shared])
