"""What ships works on a first day, where nothing was saved yet: demos are accepted, shipped files are read."""

import json

import pytest
from vitrine_tests.templates import FOLDER, SHIPPED

API = FOLDER / "api"


@pytest.fixture
def first_day(comfy, tmp_path, monkeypatch):
    """ComfyUI whose folders of saved files are empty."""
    import folder_paths
    from vitrine.nodes.comfy.saved import MODELS

    for kind in ("loras", "w2w", *MODELS):
        _, endings = folder_paths.folder_names_and_paths[kind]
        monkeypatch.setitem(folder_paths.folder_names_and_paths, kind, ([str(tmp_path / kind)], endings))
        (tmp_path / kind).mkdir()
    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path / "output"))
    folder_paths.filename_list_cache.clear()
    yield comfy
    folder_paths.filename_list_cache.clear()


def refused(comfy, graph):
    """What ComfyUI says of a graph before it runs; empty where it accepts it."""
    ok, error, _, nodes = comfy.loop.run_until_complete(comfy.execution.validate_prompt("first", graph, None))
    return {} if ok and not nodes else {"error": error, "nodes": nodes}


@pytest.mark.parametrize("workflow", [path for path in SHIPPED if path.stem.endswith("(demo)")], ids=lambda p: p.stem)
def test_a_demo_is_accepted(first_day, workflow):
    graph = json.loads((API / workflow.name).read_text(encoding="utf-8"))
    pictures = [n["inputs"] for n in graph.values() if n["class_type"] == "LoadImage"]
    assert not pictures, "of no folder of one's own"
    assert not refused(first_day, graph)


def test_what_is_not_there_would_be_refused(first_day):
    named = "Make your own slider, threshold and space (demo).json"
    graph = json.loads((API / named).read_text(encoding="utf-8"))
    (build,) = (node["inputs"] for node in graph.values() if node["class_type"] == "VitrineBuildW2WSpace")
    build["folder"] = "of_yesterday"
    assert "of_yesterday" in str(refused(first_day, graph))


LOADERS = {
    "VitrineLoadNeurons": "file", "VitrineLoadW2WModel": "file", "VitrineLoadFeaturePreset": "file",
    "VitrineLoadActivations": "file", "VitrineLoadW2WSpace": "space_file",
}  # fmt: skip
"""Node -> its list of files."""


@pytest.mark.parametrize("node", LOADERS)
def test_shipped_files_are_read(first_day, node):
    inputs = first_day.nodes.NODE_CLASS_MAPPINGS[node].define_schema().inputs
    (options,) = (entry.options for entry in inputs if entry.id == LOADERS[node])
    shipped = [option for option in options if option.endswith("(shipped)")]
    assert shipped, options
    others = {"model": first_day.call("VitrineLoadPortraits")[0], "components": 0}
    others = {name: value for name, value in others.items() if any(entry.id == name for entry in inputs)}
    for option in shipped:
        assert first_day.call(node, **{LOADERS[node]: option}, **others)[0] is not None
