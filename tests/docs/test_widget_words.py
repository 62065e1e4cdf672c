"""What our scripts say in the page is in its four languages, and nothing else is."""

import re
from pathlib import Path

WEB = Path(__file__).parents[2] / "nodes" / "web"
SCRIPTS = {p.name: p.read_text(encoding="utf-8") for p in WEB.glob("*.js")}
SCRIPTS_OF = (("\u4e00", "\u9fff"), ("\u3040", "\u9fff"), ("\uac00", "\ud7af"))
"""First and last sign that a sentence in zh, ja, ko must hold one of, as in words.js."""


def _said():
    calls = re.findall(r'\bt\((left \? )?"([^"]+)"(?: : "([^"]+)")?', "\n".join(SCRIPTS.values()))
    return {text for _, *texts in calls for text in texts if text}


def _table():
    rows = re.findall(r'^  "([^"]+)": \[\n((?:    "[^"]+",\n){3})  \],$', SCRIPTS["words.js"], re.M)
    return {text: re.findall(r'"([^"]+)"', lines) for text, lines in rows}


def test_every_text_is_translated():
    table = _table()
    assert len(table) >= 18 and _said() == set(table)
    for text, translations in table.items():
        for (first, last), said in zip(SCRIPTS_OF, translations, strict=True):
            assert any(first <= sign <= last for sign in said), said
            assert sorted(re.findall(r"\{\w+\}", said)) == sorted(re.findall(r"\{\w+\}", text)), said


def test_no_text_is_said_in_english_alone():
    """Assigned to what the page shows, or given to a panel's button, without the table."""
    for name, script in SCRIPTS.items():
        patterns = (r'(?:textContent|\.title|placeholder) = "[^"]+"', r'say\("[^"]+"\)', r'foldable\(node, "[^"]+"')
        shown = [text for pattern in patterns for text in re.findall(pattern, script)]
        assert not shown, (name, shown)
