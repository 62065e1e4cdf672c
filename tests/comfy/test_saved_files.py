"""Where saved things land: registered model folders."""

from pathlib import Path

from vitrine.engine.nemo import NeuronSet

FOUND = {"down-level0-repeat0-vit-block0-cross-v": (1, 5)}


def loads(comfy, node):
    """What a Load node lists, asked as the page does."""
    return comfy.nodes.NODE_CLASS_MAPPINGS[node].INPUT_TYPES()["required"]["file"][1]["options"]


def test_neurons_are_kept_among_the_models(comfy):
    import folder_paths

    (path,) = comfy.call("VitrineSaveNeurons", neurons=NeuronSet(FOUND), name="mine")
    assert Path(path) == Path(folder_paths.get_full_path("vitrine_neurons", "mine.json"))
    assert "mine.json" in loads(comfy, "VitrineLoadNeurons")
    assert comfy.call("VitrineLoadNeurons", file="mine.json")[0].neurons == NeuronSet(FOUND).neurons


def test_a_node_names_its_file_without_the_machines_folders(comfy, tmp_path):
    from vitrine.nodes.comfy import saved

    assert saved.shown(saved.folder("vitrine_neurons") / "mine.json") == "models/vitrine_neurons/mine.json"
    assert saved.shown(saved.folder("vitrine_activations") / "a.safetensors").endswith(
        "vitrine_activations/a.safetensors"
    )
    assert not Path(saved.shown(saved.folder("vitrine_activations") / "a.safetensors")).is_absolute()
    assert saved.shown(tmp_path / "elsewhere.json") == str(tmp_path / "elsewhere.json")


def test_a_folder_of_extra_model_paths_is_listed(comfy, tmp_path):
    import folder_paths

    NeuronSet(FOUND).save(tmp_path / "shared.json")
    kept = folder_paths.folder_names_and_paths["vitrine_neurons"]
    folder_paths.folder_names_and_paths["vitrine_neurons"] = ([*kept[0], str(tmp_path)], kept[1])
    try:
        assert "shared.json" in loads(comfy, "VitrineLoadNeurons")
        assert comfy.call("VitrineLoadNeurons", file="shared.json")[0].neurons == NeuronSet(FOUND).neurons
    finally:
        folder_paths.folder_names_and_paths["vitrine_neurons"] = kept
