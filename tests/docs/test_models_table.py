"""No cell of docs/models.md says more than its tests run, and none less: which tests there are is asked of pytest."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from vitrine_tests.docs.model_cells import BOTH, CELLS, COLUMNS

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "models.md").read_text(encoding="utf-8")
DOORS = {"diffusers", "ComfyUI"}


def table():
    """Row -> column -> what the cell says."""
    lines = PAGE[PAGE.index("| model |") :].split("\n\n")[0].splitlines()
    header = [c.strip() for c in lines[0].strip("|").split("|")]
    assert tuple(c.split(",")[0] if c.startswith("layer names") else c for c in header[1:]) == COLUMNS
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in lines[2:]]
    return {row[0]: dict(zip(COLUMNS, row[1:], strict=True)) for row in rows}


TABLE = table()
EVERY = [(r, f, c) for r in CELLS for f in CELLS[r] for c in COLUMNS]


def doors(test):
    """Through which doors a test goes."""
    file = test.partition("::")[0]
    if file.startswith(("pipelines/", "full_size/test_pipelines", "evidence/")):
        return {"diffusers"}
    if file.startswith("engine/"):
        return set()
    return DOORS if any(name in test for name in BOTH) else {"ComfyUI"}


def said(cell, family):
    """What a cell says of one family: the part that begins with its name, else the first."""
    parts = [part.strip() for part in cell.split(";")]
    return next((part for part in parts if family and part.startswith(family)), parts[0])


def claimed(words):
    """The doors that a part of a cell claims: both, unless it names one."""
    first = words.split(",")[0]
    named = {door for door in DOORS if f"in {door}" in first}
    return set() if "in the engine" in first or first == "–" else named or DOORS


NAMED = sorted({t for row in CELLS.values() for family in row.values() for cell in family.values() for t in cell})
"""The tests of all cells: file::function, or file::function[case]."""


@pytest.fixture(scope="module")
def collected():
    """file::function -> its cases, as pytest collects them."""
    files = sorted({t.partition("::")[0] for t in NAMED})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "-p", "no:cacheprovider"]
    run = subprocess.run([*command, *(str(TESTS / f) for f in files)], capture_output=True, text=True, cwd=TESTS.parent)
    names = re.findall(r"^tests/(\S+?::\w+)(?:\[(.*)\])?$", run.stdout, re.M)
    assert len(names) > 500, run.stdout[-2000:]
    cases = {}
    for name, case in names:
        cases.setdefault(name, set()).add(case)
    return cases


def test_every_row_is_known():
    assert list(CELLS) == list(TABLE)
    for row, families in CELLS.items():
        assert list(families) == [""] or [f.strip() for f in row.partition(" (")[0].split(",")] == list(families)


def test_a_cell_says_what_its_tests_run(subtests):
    for row, family, column in EVERY:
        with subtests.test(row=row, family=family, column=column):
            says_what_its_tests_run(TABLE[row][column], CELLS[row][family].get(column, []), family, column)


def says_what_its_tests_run(cell, tests, family, column):
    words = said(cell, family)
    refusals = [t for t in tests if "refused" in t or "cannot" in t]
    through = set().union(*(doors(t) for t in tests if t not in refusals))
    assert bool(tests) or words == "–", "nothing stands behind it"
    if column == "layer names":
        assert any(t.startswith("comfy/") for t in tests)
    else:
        parts = [words] if family else cell.split(";")
        assert set().union(*map(claimed, parts)) == through, (words, tests)
    if words.startswith("F"):
        assert all(t.startswith("full_size/") for t in tests)


def test_the_tests_are_there():
    """By name, also of those that a file takes from another; the cases are looked at below."""
    for test in NAMED:
        file, _, name = test.partition("[")[0].partition("::")
        assert re.search(rf"\b{name}\b", (TESTS / file).read_text(encoding="utf-8")), test


@pytest.mark.nightly
def test_they_have_the_case_that_is_meant(collected):
    for test in NAMED:
        name, _, case = test.partition("[")
        case = case.removesuffix("]")
        assert not case or any(c == case or f"-{case}-" in f"-{c}-" for c in collected[name]), test
