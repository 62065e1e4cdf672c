"""docs/gallery.md: every workflow stands in it, with thumbnail, swap and example; its links lead somewhere."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GALLERY = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
SECTIONS = re.split(r"^## ", GALLERY, flags=re.M)[1:]
WORKFLOWS = sorted((ROOT / "workflows").glob("*.json"))
NAMES = ROOT / "locales" / "en" / "nodeDefs.json"


def links(text):
    return re.findall(r"\]\(([^)]+)\)", text)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda p: p.stem)
def test_every_workflow_has_its_section(workflow):
    (section,) = [s for s in SECTIONS if f"../workflows/{workflow.name}" in links(s)]
    assert {f"../workflows/{workflow.stem}.jpg", f"pictures/{workflow.stem}.jpg"} <= set(links(section))
    assert "**Your own model:** swap *" in section and re.search(r"\(examples/\w+\.py\)", section)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda p: p.stem)
def test_the_node_to_swap_is_in_the_workflow(workflow):
    (section,) = [s for s in SECTIONS if f"../workflows/{workflow.name}" in links(s)]
    names, nodes = (json.loads(p.read_text(encoding="utf-8")) for p in (NAMES, workflow))
    shown = {names[n["type"]]["display_name"] for n in nodes["nodes"] if n["type"] in names}
    assert re.search(r"swap \*([^*]+)\*", section).group(1) in shown


def test_links_lead_somewhere_and_no_example_is_left_out():
    found = links(GALLERY)
    assert all((ROOT / "docs" / link).is_file() for link in found)
    assert {f"examples/{p.name}" for p in (ROOT / "docs" / "examples").glob("*.py")} <= set(found)
