"""Active Patches in real ComfyUI."""

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def model(comfy):
    return comfy.call("VitrineLoadPortraits")[0]


def lines(comfy, model):
    same, text, count = comfy.call("VitrineActivePatches", model=model)
    assert same is model and count == (0 if text.startswith("nothing") else len(text.splitlines()))
    return text


def test_an_unchanged_checkpoint_has_no_lines(comfy, model):
    assert lines(comfy, model).startswith("nothing")


def test_each_kind_of_patch_is_listed(comfy, model):
    patched = model.clone()
    key = next(k for k in patched.model_state_dict() if k.endswith("attn2.to_v.weight"))
    shape = patched.model_state_dict()[key].shape
    patched.add_patches({key: (torch.zeros(shape),)}, 0.7)
    patched.add_object_patch("model_sampling", patched.get_model_object("model_sampling"))
    patched.set_model_sampler_cfg_function(lambda args: args["cond"])
    patched.set_model_attn2_patch(lambda q, k, v, options: (q, k, v))
    patched.set_model_attn1_replace(lambda *a: a[0], "middle", 0)
    text = lines(comfy, patched)
    expected = ["difference at strength 0.7", "object: model_sampling", "sampler_cfg_function", "attn2_patch", "attn1"]
    for word in [*expected, "test_patches"]:
        assert word in text, (word, text)
    assert lines(comfy, model).startswith("nothing")


def test_files_of_the_nodes_before_are_named(comfy):
    from types import SimpleNamespace

    from vitrine.nodes.comfy.graph_files import files_before

    loras = {
        "lora_1": {"on": True, "lora": "b.safetensors", "strength": 0.5},
        "lora_2": {"on": False, "lora": "c.safetensors"},
    }
    graph = {
        "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "sd/base.ckpt"}},
        "2": {
            "class_type": "LoraLoader",
            "inputs": {
                "model": ["1", 0],
                "clip": ["1", 1],
                "lora_name": "a.safetensors",
                "strength_model": 0.8,
                "seed": 3,
            },
        },
        "9:3": {"class_type": "Power Lora Loader", "inputs": {"model": ["2", 0], **loras}},
        "4": {"class_type": "VitrineActivePatches", "inputs": {"model": ["9:3", 0]}},
        "5": {"class_type": "VAELoader", "inputs": {"vae_name": "not-before.safetensors"}},
    }
    lines = files_before(SimpleNamespace(prompt=graph, unique_id="4"), "model")
    assert lines == [
        "b.safetensors, strength 0.5  [Power Lora Loader]",
        "a.safetensors, strength_model 0.8  [LoraLoader]",
        "sd/base.ckpt  [CheckpointLoaderSimple]",
    ]
    assert files_before(SimpleNamespace(prompt=None, unique_id=None), "model") == files_before(None, "model") == []


def test_a_run_names_the_file_of_a_lora(comfy, tmp_path):
    import folder_paths
    from safetensors.torch import save_file

    kept = next(folder for folder in folder_paths.get_folder_paths("loras"))
    Path(kept).mkdir(parents=True, exist_ok=True)
    pair = {"up": torch.zeros(32, 1), "down": torch.zeros(1, 32)}
    save_file(
        {f"lora_unet_mid_block_attentions_0_proj_in.lora_{k}.weight": v for k, v in pair.items()},
        f"{kept}/mine.safetensors",
    )
    graph = {
        "1": ("VitrineLoadPortraits", {"model": "portraits, 64 px"}),
        "2": ("LoraLoaderModelOnly", {"model": ["1", 0], "lora_name": "mine.safetensors", "strength_model": 0.5}),
        "3": ("VitrineActivePatches", {"model": ["2", 0]}),
        "4": ("PreviewAny", {"source": ["3", 1]}),
    }
    history, error = comfy.run({k: {"class_type": kind, "inputs": inputs} for k, (kind, inputs) in graph.items()})
    assert error is None, error
    assert "file: mine.safetensors, strength_model 0.5  [LoraLoaderModelOnly]" in str(history)


def test_our_own_recorder_is_listed(comfy, model):
    tapped, _ = comfy.call("VitrineTapDuringSampling", model=model, layers="mid-vit-out", record_steps="0")
    assert "wrapper: outer_sample (vitrine)" in lines(comfy, tapped)
