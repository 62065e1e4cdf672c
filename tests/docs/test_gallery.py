"""docs/gallery.md: every workflow stands in it, with thumbnail, swap and example; its links lead somewhere."""

import json
import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from vitrine_tests.docs.test_pictures import Image, command, difference
from vitrine_tests.templates import ALL, ON_YOUR_MODEL, SHIPPED, WITH_A_MODEL, plain_title

ROOT = Path(__file__).parents[2]
GALLERY = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
SECTIONS = re.split(r"^## ", GALLERY, flags=re.M)[1:]
NAMES = ROOT / "locales" / "en" / "nodeDefs.json"


def slug(workflow):
    """A title as a file name of the docs and as its twin's name: "Sample in one step (demo)" -> sample_in_one_step."""
    return re.sub(r"\W+", "_", plain_title(workflow.stem).lower())


def links(text):
    return [unquote(link) for link in re.findall(r"\]\(([^)]+)\)", text)]


def test_every_workflow_has_its_section(subtests):
    for workflow in SHIPPED:
        with subtests.test(workflow.stem):
            (section,) = [s for s in SECTIONS if f"../workflows/{workflow.name}" in links(s)]
            assert {f"pictures/graph_{slug(workflow)}.jpg", f"pictures/{slug(workflow)}.jpg"} <= set(links(section))
            assert section.startswith(f"{workflow.stem}\n"), "the file's name is the title that ComfyUI shows"
            assert re.search(r"\(examples/\w+\.py\)", section)
            assert ("**Your own model:**\n\n1. Swap *" in section) is (workflow in WITH_A_MODEL)


def test_the_node_to_swap_is_in_the_workflow(subtests):
    for workflow in WITH_A_MODEL:
        with subtests.test(workflow.stem):
            (section,) = [s for s in SECTIONS if f"../workflows/{workflow.name}" in links(s)]
            names, nodes = (json.loads(p.read_text(encoding="utf-8")) for p in (NAMES, workflow))
            shown = {names[n["type"]]["display_name"] for n in nodes["nodes"] if n["type"] in names}
            assert re.search(r"Swap \*([^*]+)\*", section).group(1) in shown


def own_model(text):
    """What a text says below "Your own model:", as one line of plain sentences."""
    said = text.partition("**Your own model:**")[2].strip().split("\n\n")[0]
    return " ".join(re.sub(r"^\d+\. |[`*]", "", said, flags=re.M).split()).lower()


def transformers(text):
    """The sentences on Flux and other transformers, as one line."""
    return [" ".join(re.sub(r"[`*]", "", said).split()) for said in re.findall(r"other transformers: ([^\n]*)", text)]


def test_the_note_is_the_gallerys(subtests):
    for workflow in WITH_A_MODEL:
        with subtests.test(workflow.stem):
            (section,) = [s for s in SECTIONS if f"../workflows/{workflow.name}" in links(s)]
            nodes = json.loads(workflow.read_text(encoding="utf-8"))["nodes"]
            note = "\n".join(n["widgets_values"][0] for n in nodes if n["type"] in ("Note", "MarkdownNote"))
            assert own_model(section) and own_model(note).startswith(own_model(section)), "word for word"
            assert transformers(section) == transformers(note)


def test_templates_on_your_model_stand_together():
    (section,) = [s for s in SECTIONS if s.startswith("On your model\n")]
    assert {f"../workflows/{p.name}" for p in ON_YOUR_MODEL} == set(links(section)) and len(ON_YOUR_MODEL) >= 7
    shown = {unquote(picture) for picture in re.findall(r'src="([^"]+)"', section)}
    assert shown == {f"../workflows/{p.stem}.jpg" for p in ON_YOUR_MODEL}


@pytest.mark.nightly
def test_a_thumbnail_is_small_and_made_of_results(subtests):
    """docs/make_thumbnails.py draws each anew; ComfyUI's template browser knows this name only."""
    for workflow in ALL:
        with subtests.test(workflow.stem):
            path = workflow.with_suffix(".jpg")
            made, times = command("make_thumbnails").frames(workflow.stem)
            shown = Image.open(path)
            assert path.stat().st_size <= 150_000 and shown.size == (400, 400) and len(made) == len(times)
            assert getattr(shown, "n_frames", 1) == len(made) and difference(shown, made[0]) < 5
            if len(made) > 1:
                shown.seek(2)
                assert difference(shown, made[2]) < 5 < difference(made[0], made[2])


def test_links_lead_somewhere_and_no_example_is_left_out():
    found = links(GALLERY)
    assert all((ROOT / "docs" / link).is_file() for link in found)
    assert {f"examples/{p.name}" for p in (ROOT / "docs" / "examples").glob("*.py")} <= set(found)
