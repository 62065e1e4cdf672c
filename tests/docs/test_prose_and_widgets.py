"""What notes, help pages and tutorials name is there: nodes, boxes, templates, buttons, inputs, choices."""

import json
import re
from pathlib import Path

from vitrine_tests.full_size.notes import CORE, NAMES
from vitrine_tests.templates import ALL, every_node, plain_title, read

ROOT = Path(__file__).parents[2]
WEB, DOCS = ROOT / "nodes" / "web", ROOT / "docs"
WORDS = set(re.findall(r'^  "([^"]+)": \[', (WEB / "words.js").read_text(encoding="utf-8"), re.M))
"""Texts of our scripts, buttons among them."""
SOURCES = [*(ROOT / "nodes").glob("*.py"), *(ROOT / "engine").rglob("*.py")]
SOURCE = "\n".join(p.read_text(encoding="utf-8") for p in SOURCES)
PAGE = {
    "Run", "Queue", "Node Info", "Load Diffusion Model", "Load CLIP", "Load VAE", "Compare Images", "CFG Guider",
    "Preview Any", "Preview as Text", "Load CLIP Vision", "VAE Decode", "VAE Encode", "KSampler", "Save Image",
    "Preview Image", "Save Checkpoint", "Mask Editor", "CLIP Text Encode",
}  # fmt: skip
"""Nodes and buttons of ComfyUI's own that our prose names."""
STRESSED = {"what"}
"""Words in italics that are only said louder."""
NODES = {entry["display_name"] for entry in NAMES.values()} | set(CORE.values()) | PAGE
INPUTS = {name for entry in NAMES.values() for name in entry["inputs"]} | {
    entry["name"] for node in NAMES.values() for part in ("inputs", "outputs") for entry in node[part].values()
}
TRANSFORMERS = ROOT / "engine" / "portraits" / "weights" / "transformer"
TEMPLATES = {plain_title(p.stem) for p in ALL} | {p.stem for p in ALL}


def italics(text):
    """What stands between single asterisks, outside of what is typed as it is."""
    return re.findall(r"(?<![*\w])\*([^*\n]+)\*(?![*\w])", re.sub(r"`[^`]*`", "", text))


def typed(text):
    return re.findall(r"`([^`]+)`", text)


def notes(page):
    return "\n".join(str(n["widgets_values"][0]) for n in page["nodes"] if n["type"] == "MarkdownNote")


BUTTON = re.compile(r"(?:[Pp]ress|[Bb]utton|then|[Oo]pen the panel) \*([^*]+)\*")
CAPTION = re.compile(r"^!?\[.*|^\*[^\n]*\.\*$", re.M)
"""A picture, and the line below it."""


def test_a_templates_note_names_what_is_in_it(subtests):
    for path in ALL:
        with subtests.test(path.stem):
            page = read(path)
            nodes = every_node(page)
            titles = {node.get("title", "") for node in [*page["nodes"], *nodes]} | {g["title"] for g in page["groups"]}
            typed_in = [str(v) for node in nodes for v in node.get("widgets_values") or []]
            values = {line.strip() for v in typed_in for line in v.split("\n")}
            text = notes(page)
            known = NODES | TEMPLATES | WORDS | STRESSED | titles | values
            assert not [name for name in italics(text) if name not in known]
            unknown = [w for w in typed(text) if w not in INPUTS | values and f'"{w}"' not in SOURCE and "/" not in w]
            assert not [w for w in unknown if not re.fullmatch(r"(up|down|mid|vit)-[\w*-]+", w)], "no input or choice"


def test_a_button_that_is_to_be_pressed_is_there():
    helps, tutorials = (WEB / "docs").glob("Vitrine*.md"), (DOCS / "tutorials").glob("*.md")
    pages = [*helps, *tutorials, DOCS / "gallery.md", ROOT / "README.md"]
    texts = {p.name: p.read_text(encoding="utf-8") for p in pages} | {p.stem: notes(read(p)) for p in ALL}
    said = {(name, button) for name, text in texts.items() for button in BUTTON.findall(" ".join(text.split()))}
    assert len(said) >= 8
    assert not {pair for pair in said if pair[1] not in WORDS | PAGE | NODES}


def test_a_help_page_names_nodes_and_inputs_that_are(subtests):
    for path in sorted((WEB / "docs").glob("Vitrine*.md")):
        with subtests.test(path.stem):
            text = CAPTION.sub("", path.read_text(encoding="utf-8"))
            own = NAMES[path.stem]
            rows = [w for line in text.splitlines() if line.startswith("| `") for w in typed(line.split("|")[1])]
            shown = set(own["inputs"]) | {entry["name"] for entry in own["inputs"].values()}
            choices = [row for row in rows if f'"{row}"' in SOURCE or (TRANSFORMERS / row).is_dir()]
            assert not [row for row in rows if row not in shown and row not in choices], "no input of this node"
            assert json.dumps(own["display_name"])[1:-1] in text.splitlines()[0]


def test_a_folder_of_models_that_is_named_is_one_that_nodes_read():
    inside = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "nodes" / "comfy").glob("*.py"))
    known = {"loras", "diffusers", "checkpoints"} | set(re.findall(r'"(vitrine_\w+|w2w)"', inside))
    pages = [ROOT / "README.md", *DOCS.rglob("*.md"), *(WEB / "docs").rglob("*.md"), *(ROOT / "nodes").glob("*.py")]
    texts = {p.name: p.read_text(encoding="utf-8") for p in pages} | {p.stem: notes(read(p)) for p in ALL}
    named = {(page, word) for page, text in texts.items() for word in re.findall(r"(?<![\w/.])models/(\w+)", text)}
    assert len(named) > 15 and not {pair for pair in named if pair[1] not in known}
