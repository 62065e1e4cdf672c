"""What the pack costs at ComfyUI's start, and that it is one set of classes, in fresh processes."""

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMFYUI = Path(os.environ.get("COMFYUI_PATH", "~/comfy/ComfyUI")).expanduser()
SECONDS = 0.3
EMPTY = """
async def comfy_entrypoint():
    from comfy_api.latest import ComfyExtension

    class Empty(ComfyExtension):
        async def get_node_list(self):
            return []

    return Empty()
"""


def start(*packs):
    command = [sys.executable, str(Path(__file__).parent / "fresh.py"), str(COMFYUI), *map(str, packs)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def empty(comfy, tmp_path):
    pack = tmp_path / "custom_nodes" / "empty-pack"
    pack.mkdir(parents=True)
    (pack / "__init__.py").write_text(EMPTY)
    return pack


def test_the_pack_adds_little_to_the_start(empty):
    pack = empty.parent / "vitrine-pack"
    pack.symlink_to(ROOT)
    runs = [start(empty, pack)["packs"] for _ in range(3)]
    assert all(p["loaded"] for run in runs for p in run)
    assert not any(run[1]["heavy"] for run in runs), "loaded with the pack, not when a node needs it"
    added = statistics.median(run[1]["seconds"] - run[0]["seconds"] for run in runs)
    assert added < SECONDS, f"the pack adds {added:.2f} s"


def test_a_clone_with_hyphens_is_one_set_of_classes(comfy, tmp_path):
    """Another copy stands on the path (the tested one); the folder ComfyUI loads must win, under one name."""
    pack = tmp_path / "custom_nodes" / "ComfyUI-Vitrine-Pack-1.0"
    away = shutil.ignore_patterns(".git", "__pycache__", "tests", "docs", "build", "dist", "*.egg-info")
    shutil.copytree(ROOT, pack, ignore=away)
    found = start(pack)
    told = found["identity"]
    assert found["packs"][0]["loaded"] and told["nodes"] >= 26 and told["same"]
    assert all(name.startswith("vitrine.nodes.") for name in told["in"])
    files = {f: names for f, names in told["files"].items() if f != "__init__.py"}
    assert "engine/denoiser.py" in files and "nodes/bridge.py" in files, "the classes come from this clone"
    assert all(len(names) == 1 and names[0].startswith("vitrine.") for names in files.values()), "loaded twice"
