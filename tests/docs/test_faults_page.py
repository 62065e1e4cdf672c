"""docs/faults.md: every fault has its row, and every test that a row names exists."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"
NUMBERS = {
    *(f"A{n}" for n in range(1, 21)),
    *(f"B{n}" for n in range(1, 17) if n != 3),
    *(f"C{n}" for n in range(1, 6)),
    "D1",
    "D2",
    *(f"E{n}" for n in range(1, 8)),
    *(f"G{n}" for n in range(1, 11)),
    *(f"H{n}" for n in range(1, 15)),
    *(f"P{n}" for n in range(1, 12)),
    *(f"S{n}" for n in range(1, 8)),
}
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


def rows():
    """Number -> its cells: input, what happens now, tests, why the kind cannot come back."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    return {cells[0]: cells[1:] for cells in lines if cells[0] in NUMBERS}


@functools.cache
def functions(path):
    return {n.name for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.FunctionDef)}


def test_each_fault_has_a_row_with_a_test_and_a_reason():
    assert set(rows()) == NUMBERS
    for number, cells in rows().items():
        assert len(cells) == 4 and all(len(cell) > 5 for cell in cells), number
        assert TEST.findall(cells[2]), number


def test_the_tests_exist():
    missing = []
    for number, cells in rows().items():
        for name, function in TEST.findall(cells[2]):
            path = ROOT / "tests" / name
            if not path.is_file() or function not in functions(path):
                missing.append((number, name, function))
    assert not missing
