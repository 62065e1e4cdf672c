"""LoRA files in real ComfyUI: what we write loads there, and both lists of LoRAs say the same."""

import os
from contextlib import contextmanager

import pytest
from vitrine.engine.emd import StudentPreset
from vitrine.engine.emd.export import export
from vitrine.engine.errors import VitrineError
from vitrine.engine.w2w import initial_lora, read_lora, write_lora


@contextmanager
def loras_in(*roots, spaces=None):
    import folder_paths

    kept = dict(folder_paths.folder_names_and_paths)
    folder_paths.folder_names_and_paths["loras"] = ([str(r) for r in roots], {".safetensors", ".ckpt"})
    if spaces is not None:
        folder_paths.folder_names_and_paths["w2w"] = ([str(spaces)], set())
    try:
        yield
    finally:
        folder_paths.folder_names_and_paths.clear()
        folder_paths.folder_names_and_paths.update(kept)


def patched_keys(model, path):
    """Weights that ComfyUI's own loader changes."""
    import comfy.sd
    import comfy.utils

    clone, _ = comfy.sd.load_lora_for_models(
        model, None, comfy.utils.load_torch_file(str(path), safe_load=True), 1.0, 0.0
    )
    return set(clone.patches) - set(model.patches)


def test_every_file_we_write_loads_in_comfyui(comfy, tmp_path):
    from vitrine.engine.portraits import load_portraits

    (model,) = comfy.call("VitrineLoadPortraits", model="portraits, 64 px")[:1]
    lora = initial_lora(load_portraits().unet, rank=2, alpha=2.0, seed=0)
    adapter = {}
    for path, layer in lora.items():
        adapter |= {f"{path}.lora_A.generator.weight": layer.down, f"{path}.lora_B.generator.weight": layer.up}
    files = [
        write_lora(tmp_path / "auto.safetensors", lora),
        export(tmp_path, adapter, "generator", StudentPreset())[0],
    ]
    from safetensors.torch import save_file

    wrapped = {f"unet.base_model.model.{k.replace('.generator', '')}": v for k, v in adapter.items()}
    save_file(wrapped, tmp_path / "wrapped.safetensors")
    files.append(write_lora(tmp_path / "again.safetensors", read_lora(tmp_path / "wrapped.safetensors")))
    for file in files:
        assert len(patched_keys(model, file)) == len(lora) > 0, file.name


def test_folders_are_those_of_load_lora(comfy, tmp_path):
    import folder_paths
    from vitrine.nodes.comfy import w2w

    root, elsewhere = tmp_path / "loras", tmp_path / "disk"
    for folder in (root / "people", elsewhere / "far", root / "one"):
        folder.mkdir(parents=True)
    for name in (
        "people/a.safetensors",
        "people/b.SAFETENSORS",
        "people/._c.safetensors",
        "one/a.safetensors",
        "one/notes.ckpt",
        "people/README.md",
    ):
        (root / name).touch()
    for name in "ab":
        (elsewhere / "far" / f"{name}.safetensors").touch()
    (root / "linked").symlink_to(elsewhere)
    (root / "people" / "loop").symlink_to(root / "people")
    with loras_in(root):
        listed = {n.replace(os.sep, "/") for n in folder_paths.get_filename_list("loras")}
        assert "linked/far/a.safetensors" in listed
        folders = w2w.lora_folders()
        assert [n for n in folders if n != w2w.PEOPLE] == ["linked/far", "people"]
        assert not any("._" in n or n.endswith((".ckpt", ".md")) for n in w2w.loras())
        assert w2w._folders.cache_info().misses >= 1
        before = w2w._folders.cache_info().misses
        w2w.lora_folders()
        assert w2w._folders.cache_info().misses == before, "the tree is not walked again"


def test_lists_offer_what_can_be_read(comfy, tmp_path):
    from vitrine.nodes.comfy import lora, w2w

    spaces, loras = tmp_path / "w2w", tmp_path / "loras"
    for folder in (spaces / ".x.work", spaces / "sub", loras / "sub"):
        folder.mkdir(parents=True)
    for name in ("README.md", "a.png", ".x.work/.owner.lock", ".x.work/b.safetensors", "sub/good.w2w.safetensors"):
        (spaces / name).touch()
    (loras / "sub" / "mine.safetensors").touch()
    with loras_in(loras, spaces=spaces):
        own = [n for n in w2w.space_files() if n != w2w.PEOPLE]
        assert [n.replace(os.sep, "/") for n in own] == ["sub/good.w2w.safetensors"]
        nodes = {
            "1": {"class_type": "VitrineLoadW2WSpace", "inputs": {"space_file": "sub\\good.w2w.safetensors"}},
            "2": {"class_type": "VitrineLoadW2WModel", "inputs": {"lora": "sub\\mine.safetensors", "member": "a\\b"}},
        }
        data = lora.as_listed({"prompt": nodes})["prompt"]
        assert data["1"]["inputs"]["space_file"] == own[0] and data["2"]["inputs"]["lora"] in w2w.loras()
        assert data["2"]["inputs"]["member"] == "a\\b"


def test_files_of_a_graph_from_another_system_are_found(comfy, tmp_path):
    """At every input that offers files: checkpoints and control files were not found."""
    import folder_paths
    from vitrine.nodes import NODES
    from vitrine.nodes.comfy import lora

    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.safetensors").touch()
    mine, kinds = os.path.join("sub", "mine.safetensors"), ("checkpoints", "loras", "w2w", "vitrine_control")
    with loras_in(tmp_path):
        for kind in kinds:
            folder_paths.folder_names_and_paths[kind] = ([str(tmp_path)], {".safetensors"})
        inputs = [(schema.node_id, i) for schema in (node.define_schema() for node in NODES) for i in schema.inputs]
        offers = [(node_id, i.id) for node_id, i in inputs if mine in (getattr(i, "options", None) or ())]
        assert {"VitrineResolutionTransferLoader", "VitrineLoadControl", "VitrineLoadW2WSpace"} <= dict(offers).keys()
        for node_id, name in offers:
            for written in ("sub\\mine.safetensors", "sub/mine.safetensors", mine):
                graph = {"1": {"class_type": node_id, "inputs": {name: written}}}
                assert lora.as_listed({"prompt": graph})["prompt"]["1"]["inputs"] == {name: mine}, node_id
    for odd in ({"1": None}, {"1": {"class_type": []}}, {"1": {"class_type": ["Vitrine"], "inputs": {"a": "b"}}}, 3):
        assert lora.as_listed({"prompt": odd}) == {"prompt": odd}


def test_names_of_new_files(comfy):
    from vitrine.engine.nemo import NeuronSet

    for name in ("CON", "a\nb", "x:stream", "*", "end.", "../up", "a" * 240, ""):
        with pytest.raises(VitrineError, match="file name"):
            comfy.call(
                "VitrineSaveNeurons", neurons=NeuronSet({"down-level0-repeat0-vit-block0-cross-v": (1,)}), name=name
            )


def test_layers_of_every_format_that_core_reads_are_found_in_a_file(comfy):
    """Core's own adapters say which names they look for; no layer that core would find is left out."""
    import torch
    from vitrine.nodes.comfy.lora import _named_in

    class Asked(dict):
        """A file with every tensor that is asked for, and a note of their names."""

        def __getitem__(self, key):
            return self.setdefault(key, torch.ones(2, 2))

        def __contains__(self, key):
            self[key]
            return True

        def keys(self):
            return self

        def get(self, key, default=None):
            return self[key]

    import comfy.weight_adapter

    asked, name = Asked(), "lora_unet_down.blocks.0_to_q"
    for adapter in comfy.weight_adapter.adapters:
        adapter.load(name, asked, None, None, set())
    tensors = list(dict.keys(asked))
    assert len(tensors) >= 8
    for tensor in tensors:
        kept = _named_in({tensor: torch.ones(1)}, {name: "weight", "other": "weight", f"{name}_q": "weight"})
        assert kept == {name: "weight"}, tensor
