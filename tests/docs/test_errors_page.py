"""docs/errors.md: each message it explains stands in the code, and each file reader's message is explained."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "errors.md"


def _text(node):
    """What an argument reads as, with an ellipsis for what is filled in at run time."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "".join(map(_text, node.values)) if isinstance(node, ast.JoinedStr) else "…"


def _calls(name):
    for path in [p for wing in ("engine", "nodes", "cli", "evidence") for p in ROOT.glob(f"{wing}/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == name and len(node.args) == 4:
                yield [_text(a) for a in node.args]


def _message(what, accepted, remedy):
    return f"{what}: given …; accepted: {accepted}. {remedy}"


def refusals():
    """Messages of ``refuse(what, given, accepted, remedy)``."""
    return {_message(what, accepted, remedy) for what, _, accepted, remedy in _calls("refuse")}


def readers():
    """Messages of ``named(path, what, accepted, remedy)``, around the reading of a file."""
    return {_message(*rest) for _, *rest in _calls("named")}


def rows():
    """(message, cause, fix) of the page's tables."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            message, cause, fix = line.strip("| ").split(" | ")
            found.append((message.strip("`"), cause, fix))
    return found


def test_each_documented_message_stands_in_the_code():
    known = refusals() | readers()
    assert len(known) > 200
    gone = [message for message, _, _ in rows() if message not in known]
    assert not gone, "reworded or removed in the code: follow it in docs/errors.md"


def test_each_row_says_why_and_what_to_do():
    table = rows()
    assert len(table) >= 60 and len({m for m, _, _ in table}) == len(table)
    assert all(len(cause) > 12 and len(fix) > 10 for _, cause, fix in table)


def test_each_file_reader_is_documented():
    missing = readers() - {message for message, _, _ in rows()}
    assert not missing, "explain it in docs/errors.md"
