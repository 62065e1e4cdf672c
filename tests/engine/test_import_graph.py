"""The plan of the house as a test: no import points up, rooms do not import each other, and there are no circles."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = {"activations", "control", "resolution", "w2w", "nemo", "emd", "portraits"}
COMFYUI = {"comfy", "comfy_api", "comfy_extras", "comfy_execution", "folder_paths", "nodes", "node_helpers", "server",
           "execution", "latent_preview"}  # fmt: skip


def modules():
    """Dotted name below the pack -> path, for every module of the three wings."""
    paths = [p for wing in ("engine", "nodes", "evidence") for p in (ROOT / wing).rglob("*.py")]
    return {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}


MODULES = modules()


def imports(name):
    """(modules of the pack, top-level names of other packages) that a module imports, inside functions too."""
    path, inside, outside = MODULES[name], set(), set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            outside |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            outside.add(node.module.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1] + (node.module or "").split(".")).strip(".")
            for alias in node.names:
                target = f"{base}.{alias.name}"
                inside.add(target if target in MODULES else base)
    return inside & set(MODULES), outside


GRAPH = {name: imports(name) for name in MODULES}
EDGES = [(name, target) for name, (inside, _) in GRAPH.items() for target in inside if target != name]


def floor(name):
    """1 the shared core, 2 the rooms, 3 pipelines, 4 nodes and evidence, 5 the command line."""
    wing, _, rest = name.partition(".")
    part = rest.split(".")[0]
    if wing != "engine":
        return 4
    return {"cli": 5, "pipelines": 3}.get(part, 2 if part in ROOMS else 1)


def test_the_graph_is_that_of_the_whole_pack():
    assert len(MODULES) > 200 and len(EDGES) > 600
    assert {floor(name) for name in MODULES} == {1, 2, 3, 4, 5}
    assert ("engine.hooks", "engine.addresses") in EDGES and "comfy" in GRAPH["nodes.comfy.model"][1]


def test_no_import_points_up():
    assert not [(a, b) for a, b in EDGES if floor(a) < floor(b)]


def test_rooms_do_not_import_each_other():
    assert not [(a, b) for a, b in EDGES if floor(a) == floor(b) == 2 and a.split(".")[1] != b.split(".")[1]]


def test_evidence_is_imported_by_the_command_line_alone():
    assert not [
        (a, b) for a, b in EDGES if b.split(".")[0] == "evidence" and not a.startswith(("evidence", "engine.cli"))
    ]
    assert not [(a, b) for a, b in EDGES if a.split(".")[0] == "evidence" and b.split(".")[0] == "nodes"]


def test_there_are_no_circles():
    targets = {name: {b for a, b in EDGES if a == name} for name in MODULES}
    while targets:
        leaves = {name for name, others in targets.items() if not others & set(targets)}
        assert leaves, f"in circles, or above them: {sorted(targets)}"
        targets = {name: others for name, others in targets.items() if name not in leaves}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_only_one_folder_knows_the_inside_of_comfyui(name):
    known = GRAPH[name][1] & COMFYUI
    if not name.startswith("nodes.comfy"):
        known -= {"comfy_api"} if name.startswith("nodes") else set()  # the public node API
        assert not known, f"{name} imports {sorted(known)}"


@pytest.mark.parametrize("name", ["site", "condition", "errors", "noise", "progress", "guidance"])
def test_the_lowest_modules_stand_alone(name):
    assert GRAPH[f"engine.{name}"][0] <= {"engine.errors"}
