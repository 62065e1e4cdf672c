"""Names inside ComfyUI: all are listed in one module; without any of them the rest of the pack loads and says so."""

import ast
import importlib
import logging
import sys
from pathlib import Path

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine_tests.lanes import nightly_but

ROOT = Path(__file__).parents[2]
ROOTS = ("comfy", "comfy_execution", "folder_paths", "server")


def used():
    """Dotted names of ComfyUI's that nodes/ takes from its modules, but for the public API."""
    names = set()
    for path in ROOT.glob("nodes/**/*.py"):
        if path.name == "compat_comfyui.py":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imports = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        froms = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and not n.level]
        names |= {f"{n.module}.{a.name}" for n in froms for a in n.names if n.module.split(".")[0] in ROOTS}
        for node in ast.walk(tree):
            parts, inner = [], node
            while isinstance(inner, ast.Attribute):
                parts, inner = [inner.attr, *parts], inner.value
            if parts and isinstance(inner, ast.Name):
                whole = ".".join([inner.id, *parts])
                names |= {f"{m}.{whole[len(m) + 1 :].split('.')[0]}" for m in imports if whole.startswith(f"{m}.")}
    modules = {name for name in names if any(other.startswith(f"{name}.") for other in names)}
    return {name for name in names - modules if name.split(".")[0] in ROOTS}


@pytest.fixture(scope="module")
def compat(comfy):
    from vitrine.nodes.comfy import compat_comfyui

    return compat_comfyui


@pytest.fixture
def reloaded(compat, caplog):
    """Loads the pack's nodes anew; the ones that others hold come back afterwards."""
    ours = {name: module for name, module in sys.modules.items() if name.startswith("vitrine.nodes")}
    parent = sys.modules["vitrine"]

    def load():
        for name in ours:
            sys.modules.pop(name, None)
        with caplog.at_level(logging.WARNING, "vitrine"):
            nodes = importlib.import_module("vitrine.nodes").NODES
        return {node.GET_SCHEMA().node_id: node for node in nodes}, caplog.text

    yield load
    for name in [n for n in sys.modules if n.startswith("vitrine.nodes")]:
        del sys.modules[name]
    sys.modules.update(ours)
    parent.nodes = ours["vitrine.nodes"]


def listed(table):
    return {f"{module}.{name}" for module, names in table.items() for name in names}


def test_every_name_is_listed(compat):
    own = {f"{m}.{n}" for m, names in compat.USED.items() for n in names}
    assert used() <= own and not used() & listed(compat.PRIVATE)
    assert not compat.missing()


PRIVATE_NAMES = ast.literal_eval(
    next(
        node.value
        for node in ast.parse((ROOT / "nodes/comfy/compat_comfyui.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "PRIVATE"
    )
)


MODULES = [m for m in PRIVATE_NAMES if not m.startswith("comfy_extras")]


@pytest.mark.parametrize("module", nightly_but(MODULES, ("comfy.lora_convert",)))
def test_without_a_private_name_the_rest_loads(reloaded, monkeypatch, module):
    everything, said = reloaded()
    assert not said
    for name in PRIVATE_NAMES[module]:
        with monkeypatch.context() as patch:
            patch.delattr(importlib.import_module(module), name)
            nodes, said = reloaded()
            assert f"no longer has {module}.{name}" in said
            assert len(nodes) >= len(everything) - 7, set(everything) - set(nodes)
            core = importlib.import_module("vitrine.nodes.comfy.compat_comfyui")
            with pytest.raises(VitrineError, match=name):
                getattr(core, name)


def test_the_node_that_needs_it_says_so(comfy, reloaded, monkeypatch):
    import comfy as core

    model, _, _ = comfy.call("VitrineLoadPortraits")
    monkeypatch.delattr(core.samplers, "calc_cond_batch")
    monkeypatch.delattr(core.sample, "prepare_noise")
    nodes, _ = reloaded()
    told = {"student": "(the model is the student)", "preset": {"preset": "manual", "timestep": 999.0, "noise": "unit"}}
    one = {"model": model, "positive": [[torch.zeros(1, 77, 64), {}]], "seed": 1}
    latent = {"samples": torch.zeros(1, 4, 16, 16)}
    with pytest.raises(VitrineError, match=r"without comfy\.samplers\.calc_cond_batch"):
        nodes["VitrineEMDOneStepGenerator"].execute(**one, latent=latent, **told)
    assert nodes["VitrineRenderPortrait"].execute(seed=300_000, count=1, size=64, part="shirt")
