"""Help pages in the page's language, where ComfyUI looks for them: ``docs/NODE/LANGUAGE.md``, else ``docs/NODE.md``."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "nodes" / "web" / "docs"
LANGUAGES = ("zh", "ja", "ko")
NAMES = {
    k: json.loads((ROOT / "locales" / k / "nodeDefs.json").read_text(encoding="utf-8")) for k in (*LANGUAGES, "en")
}
NODES = sorted(p.name for p in DOCS.iterdir() if p.is_dir() and p.name.startswith("Vitrine"))
QUOTED = re.compile(r"[“「‘]([^”」’]+)[”」’]")


def test_the_main_nodes_have_them():
    assert len(NODES) >= 6 and set(NODES) <= set(NAMES["en"])


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("node", NODES)
def test_a_page_speaks_of_its_node_in_its_words(node, language):
    text = (DOCS / node / f"{language}.md").read_text(encoding="utf-8")
    names = NAMES[language]
    assert text.startswith(f"# {names[node]['display_name']}\n")
    rows = re.findall(r"^\| `(\w+)` \|", text, re.M)
    english = (DOCS / f"{node}.md").read_text(encoding="utf-8")
    assert len(rows) >= 3 and set(rows) <= set(NAMES["en"][node]["inputs"])
    assert all(f"`{row}`" in english for row in rows), "nothing is explained that the English page does not know"
    known = {n["display_name"] for n in names.values()}
    words = (ROOT / "nodes" / "web" / "words.js").read_text(encoding="utf-8")
    assert all(quoted in known or f'"{quoted}"' in words for quoted in QUOTED.findall(text)), QUOTED.findall(text)
