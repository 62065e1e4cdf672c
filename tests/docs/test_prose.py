"""Sentences of at most 35 words, cells of tables of at most 25: pages, texts of nodes, notes of templates.

Words are codespell's: ``.ci/run`` gives it ``tests/docs/words.txt`` too.
"""

import json
import re
from pathlib import Path

import pytest
from vitrine_tests.templates import ALL, every_node, read

ROOT = Path(__file__).parents[2]
HELP = ROOT / "nodes" / "web" / "docs"
DOCS = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "api"]
PAGES = sorted({*ROOT.glob("*.md"), *DOCS, *HELP.glob("*.md"), *HELP.glob("vitrine/*.md")})
MOST_WORDS, MOST_IN_A_CELL = 35, 25
CODE = re.compile(r"^```.*?^```|<!--.*?-->|^    [^\n]*$|</?(?:t[dhr]|p|summary|table)>|<br>|^#.*?$", re.M | re.S)
INLINE = re.compile(r"`[^`]*`|\]\([^)]*\)|https?://\S+|<[^>]+>|[\w.-]+/[\w./-]+|\d+(?:\.\d+)+|\b(?:e\.g|i\.e|al|vs)\.")
END_OF_SENTENCE = re.compile(r"(?<=[.!?])[\"')*_]*\s")
START_OF_BLOCK = re.compile(r"\n\s*\n|\n(?=#+ |[-*] |\d+\. |\||!\[)")


def too_long(text):
    """Sentences and cells with too many words; code, links and numbers count as one."""
    long = []
    for block in START_OF_BLOCK.split(INLINE.sub("X", CODE.sub("\n\n", text))):
        table = block.strip().startswith("|")
        parts = block.split("|") if table else END_OF_SENTENCE.split(block)
        most = MOST_IN_A_CELL if table else MOST_WORDS
        long += [part.strip() for part in parts if len(re.findall(r"[\w'.%-]*\w", part)) > most]
    return long


def test_pages(subtests):
    assert len(PAGES) > 80
    for page in PAGES:
        with subtests.test(str(page.relative_to(ROOT))):
            assert not too_long(page.read_text(encoding="utf-8"))


def test_nodes(subtests):
    names = json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8"))
    for node, entry in names.items():
        with subtests.test(node):
            sockets = [*entry["inputs"].values(), *entry["outputs"].values()]
            assert not too_long("\n\n".join([entry["description"], *(s.get("tooltip", "") for s in sockets)]))


def test_notes_of_templates(subtests):
    for path in ALL:
        with subtests.test(path.stem):
            notes = [n["widgets_values"][0] for n in every_node(read(path)) if n["type"] == "MarkdownNote"]
            assert not too_long("\n\n".join(notes))


@pytest.mark.parametrize("text", ["It " + "is long " * 20 + ".", "| cell |\n|---|\n| " + "word " * 30 + "|"])
def test_long_ones_are_seen(text):
    assert too_long(text) and not too_long("Short. " * 40 + "`" + "code " * 40 + "`")
