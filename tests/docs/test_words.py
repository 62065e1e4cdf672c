"""Help pages: words of the glossary are linked to it, all are laid out alike, and inputs that they name exist.

``VITRINE_WRITE_DOCS=1 pytest tests/docs/test_words.py`` copies docs/glossary.md to where ComfyUI's page reaches it.
"""

import json
import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "nodes/web/docs").glob("Vitrine*.md"))
GLOSSARY = ROOT / "docs/glossary.md"
COPY = ROOT / "nodes/web/docs/vitrine/glossary.md"
NAMES = json.loads((ROOT / "locales/en/nodeDefs.json").read_text(encoding="utf-8"))
WORDS = [word.lower() for word in re.findall(r"^## (\w+)$", GLOSSARY.read_text(encoding="utf-8"), re.M)]
CODE = re.compile(r"`[^`]*`")


def prose(text):
    """A page without its last line (Python's names), links' targets, names of nodes and code."""
    text = re.sub(r"\*\*In Python\.\*\*.*", "", text, flags=re.S)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for shown in sorted((n["display_name"] for n in NAMES.values()), key=len, reverse=True):
        text = text.replace(shown, "*")
    return CODE.sub("`", text)


def test_a_word_of_the_glossary_is_linked(subtests):
    for page in PAGES:
        with subtests.test(page.stem):
            text = page.read_text(encoding="utf-8")
            used = {w for w in WORDS if re.search(rf"\b{w}s?\b", prose(text), re.I)}
            linked = set(re.findall(r"\[[^]]*\]\(/vitrine/glossary\.md#(\w+)\)", text))
            assert used == linked, "used without a link, or linked without being used"


def test_the_page_says_what_it_does_for_you_first(subtests):
    """One or two sentences without a table, then at most five inputs; whatever else matters comes under Advanced."""
    for page in PAGES:
        with subtests.test(page.stem):
            text = page.read_text(encoding="utf-8")
            first, _, advanced = text.partition("\n## Advanced\n")
            opening = first.split("\n\n")[1]
            assert 30 <= len(opening) <= 420 and not opening.startswith(("|", "-", "*"))
            rows = [line for line in first.splitlines() if line.startswith("|")][2:]
            assert len(rows) <= 6 and (advanced or len(text) < 900)


def test_inputs_that_are_named_exist(subtests):
    """The first column of the page's table of inputs names inputs of the node."""
    for page in PAGES:
        with subtests.test(page.stem):
            text = page.read_text(encoding="utf-8")
            table = re.search(r"^\| input \| meaning \|\n\|---\|---\|\n((?:\|.*\n)+)", text, re.M)
            named = re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in table[1].splitlines())) if table else []
            inputs = NAMES[page.stem]["inputs"]
            assert set(named) <= {*inputs, *(entry["name"] for entry in inputs.values())}
            lists_something_else = ("VitrineActivePatches", "VitrineLoadPortraits", "VitrineLoadPortraitsTransformer")
            assert named or page.stem in lists_something_else


def test_the_glossary_is_short_and_travels_with_the_pack():
    text = GLOSSARY.read_text(encoding="utf-8")
    assert 8 <= len(WORDS) <= 14
    if os.environ.get("VITRINE_WRITE_DOCS"):
        COPY.parent.mkdir(exist_ok=True)
        COPY.write_text(text, encoding="utf-8")
    assert COPY.read_text(encoding="utf-8") == text, "VITRINE_WRITE_DOCS=1 pytest tests/docs/test_words.py"
