"""Active Patches in real ComfyUI."""

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


def test_our_own_recorder_is_listed(comfy, model):
    tapped, _ = comfy.call("VitrineTapDuringSampling", model=model, layers="mid-vit-out", record_steps="0")
    assert "wrapper: outer_sample (vitrine)" in lines(comfy, tapped)
