"""What the pack costs at ComfyUI's start, and that it is one set of classes, in fresh processes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from vitrine_tests import shipped

ROOT = Path(__file__).parents[2]
COMFYUI = Path(os.environ.get("COMFYUI_PATH", "~/comfy/ComfyUI")).expanduser()

EMPTY = """
async def comfy_entrypoint():
    from comfy_api.latest import ComfyExtension

    class Empty(ComfyExtension):
        async def get_node_list(self):
            return []

    return Empty()
"""


def start(*packs, env=None):
    """What a fresh ComfyUI says of loading these folders."""
    command = [sys.executable, str(Path(__file__).parent / "fresh.py"), str(COMFYUI), *map(str, packs)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def copied(folder):
    """The files of the registry's archive alone; the tested pack stands on the path besides."""
    for name in shipped.archive():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture
def packs(comfy, tmp_path):
    folder = tmp_path / "custom_nodes"
    folder.mkdir()
    return folder


@pytest.fixture
def empty(packs):
    """The first pack of all loads more of ComfyUI itself."""
    pack = packs / "empty-pack"
    pack.mkdir()
    (pack / "__init__.py").write_text(EMPTY)
    return pack


def only_from(found):
    """Nodes and files come from the pack that was loaded last, each once, under one name."""
    told = found["identity"]
    assert found["packs"][-1]["loaded"] and told["nodes"] >= 26 and told["same"]
    assert all(name.startswith("vitrine.nodes.") for name in told["in"])
    files = {f: names for f, names in told["files"].items() if f != "__init__.py"}
    assert "engine/diffusion/denoiser.py" in files and "nodes/comfy/model.py" in files, (
        "the classes come from this clone"
    )
    assert all(len(names) == 1 and names[0].startswith("vitrine.") for names in files.values()), "loaded twice"


def test_a_clone_with_hyphens_is_one_set_of_classes_and_loads_nothing_that_comfyui_has_not(empty, packs):
    """diffusers, peft, scikit-learn and the rest: when a node needs them. Its seconds: tests/benchmarks."""
    told = start(empty, copied(packs / "ComfyUI-Vitrine-Pack-1.0"))
    only_from(told)
    first, found = told["packs"]
    assert first["loaded"] and not found["modules"]


@pytest.mark.nightly
def test_a_copy_that_was_imported_before_is_left_alone(empty, packs, tmp_path):
    """Another pack imports an installed Vitrine first: no node may be made of half of each."""
    copied(tmp_path / "site" / "vitrine")
    path = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})"
    (empty / "__init__.py").write_text(f"{path}; import vitrine.engine.diffusion.denoiser; sys.path.pop(0)\n{EMPTY}")
    only_from(start(empty, copied(packs / "ComfyUI-Vitrine-Pack-1.0")))
