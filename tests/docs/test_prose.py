"""Everything that people read keeps the rules of ``prose.py``: short sentences, short cells, the field's words."""

import ast
import contextlib
import io
import json
import re
from pathlib import Path

import pytest
from vitrine.cli import main as cli
from vitrine_tests.docs.prose import faults
from vitrine_tests.templates import ALL, read, subgraphs

ROOT = Path(__file__).parents[2]
HELP = ROOT / "nodes" / "web" / "docs"
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *HELP.glob("*.md"), *HELP.glob("vitrine/*.md")})
BLUEPRINTS = sorted((ROOT / "subgraphs").glob("*.json"))
CONSOLE = {"refuse", "named", "print", "warn", "warning", "VitrineError", "say"}
"""Functions whose texts people read when a command runs or an input is refused."""
REPORTS = ("evidence/verify/*.py", "evidence/**/page.py", "evidence/**/*_page.py", "evidence/demo.py",
           "engine/copies/*.py", "nodes/web/*.js")  # fmt: skip
"""What writes pages for people: of demo, verify, copy check and LoRA report; and the page's widgets."""


def test_pages(subtests):
    assert len(PAGES) > 100
    for page in PAGES:
        with subtests.test(str(page.relative_to(ROOT))):
            text = page.read_text(encoding="utf-8")
            if "docs/api" in page.as_posix():  # headings are names of the code
                text = re.sub(r"^#+ .*$", "", text, flags=re.M)
            assert not faults(text)


def test_nodes(subtests):
    """Descriptions, tooltips, names of nodes, inputs and menu folders."""
    names = json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8"))
    for node, entry in names.items():
        with subtests.test(node):
            sockets = [*entry["inputs"].values(), *entry["outputs"].values()]
            texts = [entry["display_name"], entry["description"]]
            texts += [text for socket in sockets for text in (socket["name"], socket.get("tooltip", ""))]
            assert not [fault for text in texts for fault in faults(text)]
    menu = json.loads((ROOT / "locales" / "en" / "main.json").read_text(encoding="utf-8"))["nodeCategories"]
    assert not [fault for folder in menu for fault in faults(folder)]


def test_templates(subtests):
    """Titles, notes, boxes and what goes into them."""
    for path in [*ALL, *BLUEPRINTS]:
        with subtests.test(path.stem):
            page = read(path)
            boxes = page.get("definitions", {}).get("subgraphs", [])
            nodes = [*page["nodes"], *(node for box in boxes for node in box["nodes"])]
            texts = [path.stem, *(node.get("title", "") for node in nodes)]
            texts += [node["widgets_values"][0] for node in nodes if node["type"] in ("Note", "MarkdownNote")]
            texts += [text for box in boxes for text in (box["name"], box.get("description", ""))]
            texts += [i.get("label", i["name"]) for box in boxes for i in (*box["inputs"], *box["outputs"])]
            assert not [fault for text in texts for fault in faults(text)]
    assert all(subgraphs(read(path)) is not None for path in ALL)


def _commands(table, words=()):
    for name, entry in table.items():
        yield (*words, name)
        yield from _commands(entry.commands, (*words, name)) if isinstance(entry, cli.Group) else ()


def _help(words):
    """Each text of a help page in one line: a terminal that is wide enough wraps nothing."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        cli.main([*words, "--help"])
    lines = [re.sub(r"\((?:default|required)\b.*\)$", "", line.strip()) for line in shown.getvalue().splitlines()]
    parts = [re.split(r"\s{2,}", line.lstrip("• "))[-1] for line in lines if not line.startswith("usage:")]
    return [part for part in parts if part.strip("- ") and not re.fullmatch(r"-.*|[\[\]A-Z. -]+", part)]


def test_helps(subtests, monkeypatch):
    monkeypatch.setenv("COLUMNS", "2000")
    for words in _commands(cli._tree()):
        with subtests.test(" ".join(words)):
            texts = _help(words)
            assert texts and not [fault for text in texts for fault in faults(text)]
            assert "``" not in " ".join(texts)


def _text(node):
    """What an argument reads as, with an X for what is filled in at run time."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(_text(v) or "X" for v in node.values) if isinstance(node, ast.JoinedStr) else ""


def _said(path):
    """(line, text) of what a file says to people; a name of an argument alone is no text, nor is CSS."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    docs |= {id(n.slice) for n in ast.walk(tree) if isinstance(n, ast.Subscript)}
    docs |= {id(key) for n in ast.walk(tree) if isinstance(n, ast.Dict) for key in n.keys}
    report = any(path.match(f"*/{pattern.removeprefix('engine/').removeprefix('evidence/**/')}") for pattern in REPORTS)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in CONSOLE:
            found = [(n.lineno, _text(n)) for n in node.args]
        elif report and isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in docs:
            found = [(node.lineno, _text(node))] if _text(node).count(" ") > 2 else []
        else:
            continue
        yield from ((line, text) for line, text in found if not re.fullmatch(r"\w*", text) and "{ " not in text)


def test_messages(subtests):
    """Refusals, what commands print, and pages that commands write, as far as a script can read them."""
    for path in sorted(p for part in ("engine", "nodes", "cli", "evidence") for p in (ROOT / part).rglob("*.py")):
        with subtests.test(str(path.relative_to(ROOT))):
            assert not [(line, fault) for line, text in _said(path) for fault in faults(text)]


def test_widgets():
    words = re.findall(r'\bt\("([^"]+)"', "\n".join(p.read_text("utf-8") for p in (ROOT / "nodes/web").glob("*.js")))
    assert len(words) > 15 and not [fault for text in words for fault in faults(text)]


@pytest.mark.parametrize(
    "text",
    [
        "It " + "is long " * 20 + ".",
        "| cell |\n|---|\n| " + "word " * 30 + "|",
        "The places of a model.",
        "<td>planted pictures</td>",
        "What stands\non a MODEL.",
    ],
)
def test_faults_are_seen(text):
    assert faults(text)


def test_what_is_fine_is_not_a_fault():
    assert not faults("A layer in place, `addresses`, held-out pictures; batch rows [text](places.md).\n\n    rows = 2")
