"""Facts of a model family are in its record: no other code names a backbone's class, or decides by a family's name."""

import ast
import functools
import runpy
import shutil
import sys
from pathlib import Path

from vitrine.engine.families import FAMILIES
from vitrine_tests import sources
from vitrine_tests.forked import imported_anew
from vitrine_tests.sources import ROOT

BUILDS = "builds or loads the network that ships, or trains it"
TYPES = "diffusers reads a pipeline's components from the types in its signature"
TABLE = "nodes/comfy/compat_comfyui.py"
EXEMPT = {
    "engine/portraits/flow.py": BUILDS,
    "engine/portraits/models.py": BUILDS,
    "engine/portraits/shipped.py": BUILDS,
    "evidence/portraits/transformer.py": BUILDS,
    TABLE: "names that are looked up in ComfyUI, each in one table",
    "nodes/comfy/flow.py": BUILDS,
    "nodes/comfy/portraits.py": BUILDS,
    "nodes/comfy/transformer.py": BUILDS,
}
CLAIMS = "evidence/"
"""Claims say of which published models they are: by a family's name, not by a class."""


@functools.cache
def class_names():
    """Names of the networks of both libraries, of their rotary embeddings, and of ComfyUI's configs."""
    sides = [side for family in FAMILIES for side in (family.diffusers, family.comfyui) if side is not None]
    ropes = {kind for family in FAMILIES for kind in (*family.rope_readers, *family.rope_tables)}
    return {side.kind for side in sides} | ropes | {"MMDiT", "PixArt", "SDXL", "SDXLRefiner", "SD15", "SD20"}


@functools.cache
def written_names():
    """Names that are the same as an ordinary word are looked for as identifiers alone."""
    return {name for name in class_names() if name not in ("Flux", "Chroma", "PixArt", "SDXL")}


def docstrings(nodes):
    return {
        node.value
        for node in nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


def named_classes(nodes):
    """(line, name) of each backbone's class in code, as an identifier or as a string."""
    texts = docstrings(nodes)
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in class_names():
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and node.attr in class_names():
            yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in texts:
            yield from ((node.lineno, name) for name in written_names() if name in node.value)


def decisions(nodes):
    """(line, name) of each family's name that something is compared with, or looked up in a table by."""
    names = {family.name for family in FAMILIES}
    for node in nodes:
        parts = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            parts = node.elts
        elif isinstance(node, ast.Dict):
            parts = [*node.keys, *node.values]
        yield from ((p.lineno, p.value) for p in parts if isinstance(p, ast.Constant) and p.value in names)


def places(root):
    """``file:line name`` of each fact of a family outside ``engine/families``."""
    for path in sorted(p for wing in sources.WINGS for p in (root / wing).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith("engine/families/"):
            continue
        nodes = sources.nodes(path)
        found = set() if name in EXEMPT else set(named_classes(nodes))
        found |= set() if name.startswith(CLAIMS) or name == TABLE else set(decisions(nodes))
        yield from (f"{name}:{line} {what}" for line, what in sorted(found))


def test_no_fact_of_a_family_is_outside_its_record():
    assert not list(places(ROOT))


def test_the_exemptions_are_needed():
    needed = {name for name in EXEMPT if set(named_classes(sources.nodes(ROOT / name)))}
    assert needed == set(EXEMPT)


def with_a_family(script, folder):
    sys.argv = [str(script), str(folder)]
    runpy.run_path(str(script), run_name="__main__")


def test_one_file_makes_a_family_known_to_every_method(tmp_path):
    """docs/add_a_family.md: ``made_up/glimmer.py`` beside the families, and nothing else."""
    folder = Path(__file__).parent / "made_up"
    shutil.copy(folder / "glimmer.py", tmp_path)
    imported_anew(with_a_family, folder / "walk.py", tmp_path)
