"""Weights that nodes of ours put on a MODEL: beside what others put there, in its order, and gone when replaced."""

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import NeuronSet
from vitrine_tests.comfy.guided_graphs import NEURONS, VALUES, _values, cfg, encoded, patched, sampled
from vitrine_tests.comfy.test_encode_then_load import adapter


@pytest.fixture(scope="module")
def scene(comfy):
    comfy.loop.run_until_complete(comfy.nodes.init_builtin_extra_nodes())
    model, clip, _ = comfy.call("VitrineLoadPortraits", model="portraits, 64 px")
    return model, encoded(clip), clip


def weight_of(model, path):
    """What a MODEL's weight is, by core's own function."""
    from comfy import lora

    key = f"diffusion_model.{path}.weight"
    stored = model.backup[key].weight if key in model.backup else model.model.diffusion_model.get_parameter(key[16:])
    return lora.calculate_weight(model.patches.get(key, []), stored.detach().float().clone(), key)


def with_lora(model, clip, strength=1.0):
    from comfy import sd

    return sd.load_lora_for_models(model, clip, adapter(model), strength, 0.0)[0]


# --- Bake Blocking into Weights (NEMO) --------------------------------------------------------------------------------
def multiplied(comfy, model, clip):
    return patched(comfy, "UNetCrossAttentionMultiply", model, v=0.5)


def merged(comfy, model, clip):
    other = comfy.call("VitrineLoadPortraits", model="portraits, 64 px")[0]
    return comfy.nodes.NODE_CLASS_MAPPINGS["ModelMergeSimple"]().merge(model, with_lora(other, clip), 0.3)[0]


CHANGES = {"multiplied": multiplied, "a merge": merged, "a LoRA": lambda comfy, model, clip: with_lora(model, clip)}


@pytest.mark.parametrize("factor", [0.0, -0.5])
@pytest.mark.parametrize("name", CHANGES)
def test_baked_rows_are_those_of_what_the_model_is(comfy, scene, name, factor):
    model, _, clip = scene
    path = _values(model).path
    before = CHANGES[name](comfy, model, clip)
    wanted, plain = weight_of(before, path), weight_of(model, path)
    assert not torch.allclose(wanted[:40], plain[:40], atol=1e-3), "nothing is before it"
    rows = list(NEURONS.neurons[VALUES])
    baked = comfy.call("VitrineNEMOBake", model=before, neurons=NEURONS, factor=factor)[0]
    wanted[rows] *= factor
    assert torch.allclose(weight_of(baked, path), wanted, atol=1e-5)


# --- Apply Person (W2W), late ----------------------------------------------------------------------------------------
def late(comfy, model):
    space = comfy.call("VitrineLoadW2WSpace", space_file="portraits people (shipped)", components=0)[0]
    draw = {"space": space, "spread": 3.0, "components": 0, "truncation": 0.0, "wanted": ""}
    people = [comfy.call("VitrineW2WSample", seed=n, **draw)[0] for n in (1, 2)]
    asked = {"space": space, "w2w_model": people[0], "late_model": people[1], "start_timestep": 900.0, "strength": 1.0}
    return comfy.call("VitrineApplyW2WModel", model=model, **asked)[0]


@pytest.mark.parametrize("name", ["multiplied", "a merge"])
def test_a_late_model_is_not_run_under_weights_that_would_change_it(comfy, scene, name):
    model, conds, clip = scene
    changed = CHANGES[name](comfy, late(comfy, model), clip)
    with pytest.raises(VitrineError, match="changed as a whole behind a late model"):
        sampled(cfg(changed, conds))
    before = late(comfy, CHANGES[name](comfy, model, clip))
    assert not torch.allclose(sampled(cfg(before, conds)), sampled(cfg(late(comfy, model), conds)), atol=1e-3)


def test_a_lora_behind_a_late_model_adds_up(comfy, scene):
    model, conds, clip = scene
    behind, before = with_lora(late(comfy, model), clip), late(comfy, with_lora(model, clip))
    run = sampled(cfg(behind, conds))
    assert not torch.allclose(run, sampled(cfg(late(comfy, model), conds)), atol=1e-3)
    assert torch.allclose(run, sampled(cfg(before, conds)), atol=1e-4)
    path = _values(model).path
    neurons = NeuronSet({VALUES: (0, 1)})
    if f"diffusion_model.{path}.weight" in before.patches:
        with pytest.raises(VitrineError, match="late model"):
            comfy.call("VitrineNEMOBake", model=late(comfy, model), neurons=neurons, factor=0.0)


# --- Load Size Checkpoint -----------------------------------------------------------------------------------------
def test_further_weights_of_a_size_checkpoint_are_added_and_taken_off(comfy, scene):
    from vitrine.nodes.comfy.control import KEY, _patch_weights

    model, conds, clip = scene
    path = _values(model).path
    diffusers = "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_v.weight"
    stored = weight_of(model, path)
    extra = {f"base.{diffusers}": stored + torch.randn(stored.shape, generator=torch.Generator().manual_seed(1))}
    lora = weight_of(with_lora(model, clip), path) - stored
    assert float(lora.abs().max()) > 0.1
    changed = with_lora(model, clip)
    _patch_weights(changed, extra)
    assert torch.allclose(weight_of(changed, path), extra[f"base.{diffusers}"] + lora, atol=1e-5)
    again = changed.clone()
    _patch_weights(again, {})
    assert torch.allclose(weight_of(again, path), stored + lora, atol=1e-6)
    assert torch.allclose(weight_of(changed, path), extra[f"base.{diffusers}"] + lora, atol=1e-5), "its clone alone"
    assert again.patches_uuid != changed.patches_uuid and KEY
