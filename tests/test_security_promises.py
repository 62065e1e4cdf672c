"""SECURITY.md: what it promises of the code, read from the code. Files from strangers are tried in their own tests."""

import ast
import re

from vitrine_tests.sources import ROOT, text, walked

PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def calls(*names):
    """(file, call) of each call of a dotted name, such as ``torch.load``."""
    ends = {name.rpartition(".")[2] for name in names}
    for path, nodes in walked().items():
        for node in nodes:
            end = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
            if end in ends and ast.unparse(node.func) in names:
                yield path.as_posix(), node


def settings(call):
    return {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}


def test_no_pickle_is_run():
    loads = list(calls("torch.load"))
    assert loads and all(settings(call).get("weights_only") == "True" for _, call in loads)
    assert not [name for name, _ in loads if name.startswith("nodes/")]
    assert all(settings(call).get("allow_pickle") == "False" for _, call in calls("np.load", "numpy.load"))


def test_programs_run_only_where_an_option_names_them():
    assert {name for name, _ in calls("torch.jit.load")} == {"evidence/verify/judge.py"}
    assert not [p for p in walked() if "nodes" in p.parts and re.search(r"descriptors|jit", text(ROOT / p))]
    assert all(f"`--{name}`" in PAGE for name in ("sscd", "face"))


def test_routes_are_those_of_the_page():
    routes = {
        (node.func.attr, node.args[0].value)
        for path, nodes in walked().items()
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func).startswith("server.routes.")
        and isinstance(node.args[0], ast.Constant)
    }
    routes |= {("post", call.args[0].value) for name, call in calls("post") if name.startswith("nodes/comfy/")}
    assert {route for _, route in routes} == set(re.findall(r"`(/vitrine/[\w.]+)`", PAGE))
    assert {method for method, _ in routes} == {"get", "post"}


HUB = "engine/io/hub.py"
"""Asks the hub where Python names a hub id. Nodes hand paths of files to what uses it."""


def test_nodes_ask_no_other_host():
    scripts = [p.read_text(encoding="utf-8") for p in (ROOT / "nodes" / "web").glob("*.js")]
    assert len(scripts) >= 8
    for script in scripts:
        assert not re.search(r"https?://(?!www\.w3\.org/)|(?<!\.)\bfetch\(|WebSocket|EventSource", script)
    imported = {
        alias.name.split(".")[0]
        for path, nodes in walked().items()
        if path.as_posix() != HUB
        for n in nodes
        if isinstance(n, ast.Import)
        for alias in n.names
    } | {
        n.module.split(".")[0]
        for path, nodes in walked().items()
        if path.as_posix() != HUB
        for n in nodes
        if isinstance(n, ast.ImportFrom) and n.module and not n.level
    }
    assert not imported & {"requests", "urllib", "http", "httpx", "socket", "huggingface_hub", "subprocess", "pickle"}
    asked = {"from_pretrained", "push_to_hub", "local_file", "hub"}
    for path, nodes in walked().items():
        if path.is_relative_to("nodes"):
            names = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
            assert not asked & names, path


def test_it_says_how_to_report():
    assert "Report a vulnerability" in PAGE and "vitrine --version" in PAGE
