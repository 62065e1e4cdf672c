"""Rules of the source that no tool checks. ruff and import-linter check the others; pyproject.toml has them."""

import ast
import re
import subprocess
import sys

import pytest
import tomllib
from vitrine_tests.sources import ROOT, paths, text, walked

SOURCE = {path.relative_to(ROOT): text(path) for path in paths()}
EMPTY_WORDS = {"found", "told", "given", "one", "rest"}


def test_all_of_the_source_is_read():
    assert len(SOURCE) > 200


def test_the_package_list_matches_the_folders():
    """What trained the toy models is not in the wheel."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    packages = [".".join(["vitrine", *path.parent.parts]) for path in SOURCE if path.name == "__init__.py"]
    assert sorted([*listed, "vitrine.evidence.recipes"]) == sorted(packages)


def test_files_are_short_and_named_after_what_is_inside():
    tests = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/*.py")}
    limits = [(SOURCE, 500), (tests, 500)]
    long = [str(path) for texts, most in limits for path, text in texts.items() if len(text.splitlines()) > most]
    assert not long and not [str(path) for path in SOURCE if "utils" in path.name]


def test_functions_fit_on_a_screen():
    """Left out: ``__call__`` and ``tap`` of pipelines, whose arguments and their documentation fill a screen."""
    long = []
    for path, nodes in walked().items():
        functions = [n for n in nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
        for function in functions:
            lines = function.end_lineno - function.lineno + 1
            if lines > 80 and not (function.name in ("__call__", "tap") and "pipelines" in path.parts):
                long.append(f"{path}: {function.name} has {lines} lines")
    assert not long, "\n".join(long)


def test_names_say_what_they_hold():
    empty = []
    for path, nodes in walked().items():
        names = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        names |= {n.arg for n in nodes if isinstance(n, ast.arg)}
        allowed = {"given"} if path.name == "errors.py" else set()  # what an error quotes
        empty += [f"{path}: {name}" for name in sorted(names & EMPTY_WORDS - allowed)]
    assert not empty, "\n".join(empty)


def test_no_module_imports_a_package_that_it_is_in():
    """import-linter finds cycles between siblings; this is the one kind that it leaves out."""
    grimp = pytest.importorskip("grimp", reason="comes with import-linter, of the dev extra")
    graph = grimp.build_graph("vitrine", cache_dir=None)
    imports = [(a, b) for a in graph.modules for b in graph.find_modules_directly_imported_by(a)]
    assert len(imports) > 600 and not [(a, b) for a, b in imports if a.startswith(f"{b}.")]


def test_importing_the_pack_is_cheap():
    modules = ("vitrine", "vitrine.engine.tracing.hooks", "vitrine.engine.activations", "vitrine.engine.families")
    seen = "print({'torch', 'diffusers', 'peft', 'sklearn', 'transformers'} & set(sys.modules))"
    code = "\n".join(["import sys", *(f"import {module}; {seen}" for module in modules)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["set()", *["{'torch'}"] * 3]


def test_tensors_come_to_the_cpu_before_they_are_float64():
    """Some accelerators have no float64."""
    wrong = re.compile(r"\.(double\(\)|to\(torch\.float64\))\.cpu\(\)")
    assert not [str(path) for path, text in SOURCE.items() if wrong.search(text)]
