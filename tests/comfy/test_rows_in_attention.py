"""Patches that change the batch rows inside attention: whose rows these are is not guessed."""

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine_tests.comfy.guided_graphs import MIDDLE, NEURONS, VALUES, cfg, encoded, sampled

LAYER = VALUES.removesuffix("-v")


@pytest.fixture(scope="module")
def scene(comfy):
    model, clip, _ = comfy.call("VitrineLoadPortraits", model="portraits, 64 px")
    return model, encoded(clip)


def regions(model, count):
    """A clone whose prompt is several in each cross-attention, as packs of regional prompts do it."""

    def repeat(n, context, value, options):
        several = torch.cat([context * (1 - 0.3 * k) for k in range(count)])
        return torch.cat([n] * count), several, several

    def average(n, options):
        return n.view(count, -1, *n.shape[1:]).mean(0)

    clone = model.clone()
    clone.set_model_attn2_patch(repeat)
    clone.set_model_attn2_output_patch(average)
    return clone


@pytest.mark.parametrize("count", [2, 3])
def test_a_tap_inside_such_attention_is_refused_and_one_outside_is_not(comfy, scene, count):
    model, conds = scene
    changed = regions(model, count)
    wanted = sampled(cfg(changed, conds))
    assert not torch.allclose(wanted, sampled(cfg(model, conds)), atol=1e-3), "the patch has no effect"
    tapped, recorder = comfy.call("VitrineTapDuringSampling", model=changed, layers=MIDDLE, record_steps="all")
    assert torch.equal(sampled(cfg(tapped, conds)), wanted) and set(recorder.record[0]) == {"cond", "uncond"}
    for address in (VALUES, f"{LAYER}-q", f"{LAYER}-map"):
        tapped, _ = comfy.call("VitrineTapDuringSampling", model=changed, layers=address, record_steps="all")
        with pytest.raises(VitrineError, match=rf"{2 * count} batch rows.*own 2.*test_rows_in_attention"):
            sampled(cfg(tapped, conds))


def test_a_blocker_of_one_branch_is_refused_and_one_of_both_acts(comfy, scene):
    model, conds = scene
    changed, how = regions(model, 2), {"factor": 0.0, "start_percent": 0.0, "end_percent": 1.0}
    both = comfy.call("VitrineNEMONeuronBlocker", model=changed, neurons=NEURONS, branch="both", **how)[0]
    assert not torch.allclose(sampled(cfg(both, conds)), sampled(cfg(changed, conds)), atol=1e-3)
    one = comfy.call("VitrineNEMONeuronBlocker", model=changed, neurons=NEURONS, branch="cond", **how)[0]
    with pytest.raises(VitrineError, match=r"4 batch rows.*own 2.*test_rows_in_attention"):
        sampled(cfg(one, conds))


def test_replaced_attention_is_said_where_maps_are_read(comfy, scene):
    from vitrine.nodes.comfy.patches import replaced_attention

    model, conds = scene
    changed = model.clone()
    options = changed.model_options["transformer_options"]
    options["optimized_attention_override"] = lambda call, *args, **kwargs: call(*args, **kwargs) * 0.5
    assert not torch.allclose(sampled(cfg(changed, conds)), sampled(cfg(model, conds)), atol=1e-3)
    maps = [f"{LAYER}-map"]
    assert "computed by test_rows_in_attention" in replaced_attention(changed, maps).replace(
        "tests.comfy.", ""
    ).replace("vitrine_", "")
    assert replaced_attention(changed, [VALUES]) == "" and replaced_attention(model, maps) == ""
