"""The pack's own source: each file is parsed, and its tree walked, once for all tests that read it."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[1]
WINGS = ("engine", "nodes", "cli", "evidence")


def paths(*wings):
    """The files of these folders, by default all of them and the pack's ``__init__.py``."""
    own = [] if wings else [ROOT / "__init__.py"]
    return [*(path for wing in wings or WINGS for path in sorted((ROOT / wing).rglob("*.py"))), *own]


@functools.cache
def text(path):
    return path.read_text(encoding="utf-8")


@functools.cache
def tree(path):
    return ast.parse(text(path))


@functools.cache
def nodes(path):
    """All nodes of a file, as ``ast.walk`` finds them."""
    return tuple(ast.walk(tree(path)))


def trees(*wings):
    """Path from the root -> the file's tree."""
    return {path.relative_to(ROOT): tree(path) for path in paths(*wings)}


def walked(*wings):
    """Path from the root -> all nodes of the file."""
    return {path.relative_to(ROOT): nodes(path) for path in paths(*wings)}
