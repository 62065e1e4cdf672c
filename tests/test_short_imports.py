"""``from vitrine import NAME``: what is documented, loaded when it is asked for, seen by type checkers."""

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import vitrine

ROOT = Path(__file__).parents[1]
SOURCE = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))


def for_checkers():
    """Name -> module, of the block that only type checkers read."""
    (block,) = (n for n in SOURCE.body if isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING")
    return {alias.name: f"vitrine.{line.module}" for line in block.body for alias in line.names}


def test_each_name_is_the_object_that_type_checkers_see():
    seen = for_checkers()
    assert sorted(seen) == sorted(vitrine.__all__) and len(seen) >= 30
    for name, module in seen.items():
        assert getattr(vitrine, name) is getattr(importlib.import_module(module), name), name
    assert set(vitrine.__all__) <= set(dir(vitrine))


def test_each_name_is_documented_and_each_one_on_the_page_is_there():
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    section = page[page.index("## Short imports") :].split("\n## ")[0]
    listed = {name for line in section.splitlines() if line.startswith("- ") for name in line.split("`")[1::2]}
    assert listed == set(vitrine.__all__)


def imported(text):
    """(module, names) of each import from this pack in a script or in a page's examples."""
    for module, names in re.findall(r"^from (vitrine[\w.]*) import (\([^)]*\)|.+)$", text, re.M):
        yield module, set(re.findall(r"\w+", names))


def test_examples_use_the_short_name_where_there_is_one():
    pages = [ROOT / "README.md", ROOT / "docs" / "python.md", *(ROOT / "docs" / "examples").glob("*.py")]
    pairs = [pair for page in pages for pair in imported(page.read_text(encoding="utf-8"))]
    short = set().union(*(names for module, names in pairs if module == "vitrine"))
    assert len(short) >= 10 and short <= set(vitrine.__all__)
    assert not [(module, names) for module, names in pairs if module != "vitrine" and names & set(vitrine.__all__)]


def test_an_unknown_name_is_an_attribute_error():
    for name in ("NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "__wrapped__", "nothing"):
        assert not hasattr(vitrine, name)
    with pytest.raises(ImportError, match="no_such_name"):
        from vitrine import no_such_name  # noqa: F401


ALONE = """
import json, sys
import vitrine
heavy = {"torch", "diffusers", "transformers", "numpy", "importlib.metadata"}
before = sorted(heavy & set(sys.modules))
listed = "NEMOPipeline" in dir(vitrine)
from vitrine import VitrineError, engine
print(json.dumps([before, listed, VitrineError.__module__, sorted(heavy & set(sys.modules))]))
"""


def test_the_import_loads_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[], True, "vitrine.engine.errors", []]


WITHOUT_DIFFUSERS = """
import sys
class Missing:
    def find_spec(name, path=None, target=None):
        if name == "diffusers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing)
from vitrine import NEMOPipeline
"""


def test_a_missing_library_is_named_with_what_to_install():
    done = subprocess.run([sys.executable, "-c", WITHOUT_DIFFUSERS], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.strip().endswith(
        "ModuleNotFoundError: vitrine.NEMOPipeline needs diffusers, which is not installed: "
        "pip install torch '.[diffusers]' in the folder of the clone"
    )


def test_under_the_name_that_comfyui_makes_there_are_no_second_copies():
    name = "/custom_nodes/some-folder"
    where = {"submodule_search_locations": [str(ROOT)]}
    spec = importlib.util.spec_from_file_location(name, ROOT / "__init__.py", **where)
    pack = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(pack)
        assert pack.WEB_DIRECTORY and pack.comfy_entrypoint
        assert not {"NEMOPipeline", "load_space"} & set(dir(pack))
        assert not any(hasattr(pack, name) for name in ("NODE_CLASS_MAPPINGS", "NEMOPipeline"))
    finally:
        del sys.modules[name]
