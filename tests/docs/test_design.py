"""The design pages: what they name exists, and the first is read in five minutes."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BASES = ("", "engine", "engine/w2w", "nodes/comfy")
PATH = re.compile(r"`([\w./-]+\.(?:py|js|toml|json)|[\w/]+/)`")


def found(name):
    return [p for base in BASES for p in (ROOT / base).glob(name.rstrip("/"))]


@pytest.mark.parametrize("page", ["design", "one_of_each"])
def test_files_exist_and_contain_the_names_of_their_row(page):
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    paths = PATH.findall(text)
    assert len(paths) > 20 and [p for p in paths if not found(p) and p != "results/CLAIM.json"] == []
    rows = [line.strip("| \n").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    for cells in (row for row in rows if len(row) == 3 and PATH.search(row[-1])):
        files = [
            f for name in PATH.findall(cells[2]) for p in found(name) for f in (p.rglob("*") if p.is_dir() else [p])
        ]
        contents = " ".join(f.read_text(encoding="utf-8") for f in files if f.suffix in (".py", ".js"))
        missing = [n for n in re.findall(r"`(\w+)`", cells[1]) if not re.search(rf"\b{n}\b", contents)]
        assert not missing, (cells[0], missing)


def test_the_design_is_a_page():
    assert len((ROOT / "docs" / "design.md").read_text(encoding="utf-8").split()) <= 1000
