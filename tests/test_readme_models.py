"""No cell of README's table of models says more than a test runs, and none less."""

import ast
import functools
from pathlib import Path

import pytest
from vitrine_tests.families.twin import NAMES
from vitrine_tests.readme_cells import CELLS, COLUMNS

HERE = Path(__file__).parent
README = (HERE.parent / "README.md").read_text(encoding="utf-8")


def table():
    """Row -> column -> what the cell says."""
    lines = README[README.index("| model |") :].split("\n\n")[0].splitlines()
    header = [c.strip() for c in lines[0].strip("|").split("|")]
    assert tuple(c.split(",")[0] if c.startswith("addresses") else c for c in header[1:]) == COLUMNS
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in lines[2:]]
    return {row[0]: dict(zip(COLUMNS, row[1:], strict=True)) for row in rows}


TABLE = table()


@functools.cache
def functions(file):
    tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
    return {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}


@functools.cache
def spelled(file):
    """The file's own text, and that of the test modules it takes names from, and theirs."""
    text = (HERE / file).read_text(encoding="utf-8")
    modules = [n.module for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom) and n.module]
    ours = [m.removeprefix("vitrine_tests.").replace(".", "/") + ".py" for m in modules if "vitrine_tests." in m]
    # makers are parametrised over by their functions' names, twins by their files'
    names = " ".join(NAMES) if "families/twin.py" in ours else ""
    return " ".join([text, names, *(spelled(m) for m in ours if (HERE / m).is_file())])


def test_every_row_is_known():
    assert list(CELLS) == list(TABLE)


@pytest.mark.parametrize(("row", "column"), [(r, c) for r in TABLE for c in COLUMNS])
def test_a_cell_has_its_tests(row, column):
    cell, tests = TABLE[row][column], CELLS[row].get(column, [])
    if cell in ("–", "a"):
        assert cell == "–" or not tests, "the cell could say that something was run"
        assert all("refused" in t or "cannot" in t for t in tests), "the cell could say that something was run"
        return
    assert tests, "nothing stands behind it"
    for test in tests:
        file, _, rest = test.partition("::")
        name, _, case = rest.partition("[")
        assert name in functions(file), test
        assert not case or case.rstrip("]") in spelled(file), f"no such case: {test}"
    if "both" in cell or column == "addresses":
        assert any(t.startswith(("comfy/", "full_size/test_nodes")) for t in tests), "no test in ComfyUI"
    if "F" in cell.replace("Flux", "").split(",")[0]:
        assert any(t.startswith("full_size/") for t in tests)
    if "its pipeline" in cell:
        assert any(t.startswith("pipelines/") for t in tests)
