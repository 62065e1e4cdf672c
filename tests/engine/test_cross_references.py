"""Every cross-reference in a docstring (``:func:``, ``:class:``, ``:mod:`` ...) names something that exists.

Names are looked up in the source, as Sphinx would: relative to the module, its package, or a class of the module.
Nothing is imported.
"""

import ast
import functools
import importlib.util
import re

import pytest
from vitrine_tests import sources
from vitrine_tests.sources import ROOT

REFERENCE = re.compile(r":(?:func|class|mod|data|meth|attr|exc|obj):`~?([\w.]+)(?:\(\))?`")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def modules():
    """Dotted name -> file."""
    return {dotted(file): file for file in sources.paths()}


def dotted(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(["vitrine", *(parts[:-1] if parts[-1] == "__init__" else parts)])


@functools.cache
def tree(module):
    return sources.tree(modules()[module])


def nodes(module):
    return sources.nodes(modules()[module])


def package_of(module, level=1):
    """What ``level`` dots stand for in a module."""
    parts = module.split(".")
    drop = level - (modules()[module].name == "__init__.py")
    return ".".join(parts[: len(parts) - drop])


@functools.cache
def names_in(module):
    """Name -> the node that defines it, or the dotted name that it was imported as."""
    table = {}
    for node in nodes(module):
        if isinstance(node, ast.ImportFrom):
            origin = f"{package_of(module, node.level)}.{node.module or ''}".rstrip(".") if node.level else node.module
            table |= {alias.asname or alias.name: f"{origin}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            table |= {(alias.asname or alias.name).split(".")[0]: alias.name for alias in node.names}
    for node in tree(module).body:
        for inner in ast.walk(node) if isinstance(node, ast.If) else [node]:
            table |= {name: inner for name in defined(inner)}
    if "__getattr__" in table:  # names that are imported when they are asked for
        texts = [n.value for n in nodes(module) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        table |= {name: table["__getattr__"] for name in texts if name.isidentifier() and name not in table}
    return table


def defined(node):
    """Names that a statement binds."""
    if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)]


def has_member(module, kind, name):
    """Whether a class has an attribute, its own, of ``self``, or of a base; bases from elsewhere may have any."""
    own = {bound for node in kind.body for bound in defined(node)}
    own |= {n.attr for n in ast.walk(kind) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    if name in own:
        return True
    for base in map(ast.unparse, kind.bases):
        home, node = looked_up(module, base.partition("[")[0])
        if not isinstance(node, ast.ClassDef):
            if node is not None and base not in ("NamedTuple", "Protocol"):
                return True
        elif has_member(home, node, name):
            return True
    return False


def looked_up(module, name):
    """(module, node) of a name in a module; the node is the name itself where it is another library's."""
    first, _, others = name.partition(".")
    node = names_in(module).get(first)
    if isinstance(node, str):
        return absolute(f"{node}.{others}".rstrip("."))
    if isinstance(node, ast.ClassDef) and others:
        return module, others if has_member(module, node, others) else None
    return module, None if others else node


def absolute(name):
    """The same of a dotted name."""
    parts = name.split(".")
    if parts[0] != "vitrine":
        return name, name
    for cut in range(len(parts), 0, -1):
        home = ".".join(parts[:cut])
        if home in modules():
            return (home, tree(home)) if cut == len(parts) else looked_up(home, ".".join(parts[cut:]))
    return name, None


def exists(module, target):
    if target.startswith("."):
        level = len(target) - len(target.lstrip("."))
        return absolute(f"{package_of(module, level)}.{target.lstrip('.')}")[1] is not None
    if target.startswith("vitrine."):
        return absolute(target)[1] is not None
    classes = [node for node in nodes(module) if isinstance(node, ast.ClassDef)]
    if looked_up(module, target)[1] is not None or any(has_member(module, kind, target) for kind in classes):
        return True
    return "." in target and importlib.util.find_spec(target.partition(".")[0]) is not None


def test_every_reference_leads_somewhere():
    references = [
        (module, file.relative_to(ROOT), target)
        for module, file in modules().items()
        for target in REFERENCE.findall(file.read_text(encoding="utf-8"))
    ]
    dead = [f"{file}: {target}" for module, file, target in references if not exists(module, target)]
    assert len(references) > 300 and not dead, "\n".join(dead)


@pytest.mark.parametrize("target", [".images.to_pixels", ".run.Run.loads", "vitrine.engine.nothing", "Run"])
def test_a_dead_reference_is_seen(target):
    assert not exists("vitrine.engine.jobs.training", target)
    assert exists("vitrine.engine.jobs.training", ".run.Run.load") and exists("vitrine.engine.jobs.run", "Run.identity")
