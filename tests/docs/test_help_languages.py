"""Help pages in the page's language, where ComfyUI looks for them: ``docs/NODE/LANGUAGE.md``, else ``docs/NODE.md``."""

import json
import re
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "nodes" / "web" / "docs"
LANGUAGES = ("zh", "ja", "ko")
NAMES = {
    k: json.loads((ROOT / "locales" / k / "nodeDefs.json").read_text(encoding="utf-8")) for k in (*LANGUAGES, "en")
}
NODES = sorted(p.name for p in DOCS.iterdir() if p.is_dir() and p.name.startswith("Vitrine"))
QUOTED = re.compile(r"[“「‘]([^”」’]+)[”」’]")


def test_the_main_nodes_have_them():
    assert len(NODES) >= 6 and set(NODES) <= set(NAMES["en"])


def test_a_page_speaks_of_its_node_in_its_words(subtests):
    words = (ROOT / "nodes" / "web" / "words.js").read_text(encoding="utf-8")
    for node, language in product(NODES, LANGUAGES):
        with subtests.test(node=node, language=language):
            text = (DOCS / node / f"{language}.md").read_text(encoding="utf-8")
            names = NAMES[language]
            assert text.startswith(f"# {names[node]['display_name']}\n")
            rows = set(re.findall(r"^\| `(\w+)` \|", text, re.M))
            inputs = NAMES["en"][node]["inputs"]
            assert len(rows) >= 3 and rows <= {*inputs, *(entry["name"] for entry in inputs.values())}
            english = (DOCS / f"{node}.md").read_text(encoding="utf-8")
            assert not [row for row in rows if f"`{row}`" not in english], "unknown to the English page"
            known = {n["display_name"] for n in names.values()}
            quotes = QUOTED.findall(text)
            assert not [quote for quote in quotes if quote not in known and f'"{quote}"' not in words]


def _parts(text):
    """What a page's paragraphs before "Advanced" are, in order: a picture, a caption, a table, a bold lead, text."""
    kinds = {"#": "title", "!": "picture", "|": "table", "**": "bold lead", "*": "caption"}
    blocks = text.partition("\n## Advanced\n")[0].partition("**In Python.**")[0].strip().split("\n\n")
    return [next((kind for mark, kind in kinds.items() if block.startswith(mark)), "text") for block in blocks]


def test_a_page_has_the_parts_of_the_english_one(subtests):
    """All before "Advanced"; its last line leads to the English page for the rest."""
    for node, language in product(NODES, LANGUAGES):
        with subtests.test(node=node, language=language):
            translated = _parts((DOCS / node / f"{language}.md").read_text(encoding="utf-8"))
            assert translated == [*_parts((DOCS / f"{node}.md").read_text(encoding="utf-8")), "text"]
