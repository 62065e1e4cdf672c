"""W2W nodes in real ComfyUI as patches of a MODEL: against the pipeline, stock LoraLoader, siblings, late edits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.w2w import EditConfig, SampleConfig, StrengthMap, with_sampling, with_strength_maps
from vitrine_tests.comfy.w2w.scene import PROMPT, SEED, ddim, network, pipelines_output, sliders


def _listed(path):
    """The entry of a saved LoRA in every loader's list."""
    return f"vitrine/{Path(path).name}"


def test_the_patch_is_the_pipelines_model(comfy, loaded, pipe, space, positive, person):
    (model,) = comfy.call(
        "VitrineApplyW2WModel", model=loaded[0], space=space, w2w_model=person, strength=1.0, start=1000.0
    )
    for t in (10, 500, 950):
        _, found = network(model, positive, t)
        torch.testing.assert_close(found, pipelines_output(pipe, space, person, t), atol=1e-5, rtol=1e-4)


def test_late_models_begin_where_the_pipeline_begins(comfy, loaded, pipe, space, positive, person):
    edited, _ = comfy.call("VitrineW2WEdit", space=space, w2w_model=person, **sliders(beard=3.0, glasses=2.0))
    told = {"model": loaded[0], "space": space, "w2w_model": person, "late_model": edited, "strength": 1.0}
    (late,) = comfy.call("VitrineApplyW2WModel", **told, start=500.0)
    how = {"strengths": {"beard": 3.0, "glasses": 2.0}}
    for t in (100, 499, 501, 900):
        _, found = network(late, positive, t)
        expected = pipelines_output(pipe, space, person, t, **(how if t <= 500 else {}))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert not any(m._forward_hooks for m in loaded[0].model.diffusion_model.modules())
    always = comfy.call("VitrineApplyW2WModel", **told, start=1000.0)[0]
    never = comfy.call("VitrineApplyW2WModel", **told, start=-1.0)[0]
    plain = comfy.call(
        "VitrineApplyW2WModel", model=loaded[0], space=space, w2w_model=person, strength=1.0, start=1000.0
    )[0]
    assert torch.equal(ddim(never, positive), ddim(plain, positive))
    assert not torch.equal(ddim(always, positive), ddim(plain, positive))


def test_zero_sliders_and_siblings(comfy, loaded, space, positive, person):
    before = ddim(loaded[0], positive)
    same, _ = comfy.call("VitrineW2WEdit", space=space, w2w_model=person, **sliders(beard=0.0))
    assert torch.equal(same.coefficients, person.coefficients)
    (model,) = comfy.call(
        "VitrineApplyW2WModel", model=loaded[0], space=space, w2w_model=person, strength=1.0, start=1000.0
    )
    assert not torch.equal(ddim(model, positive), before)
    assert torch.equal(ddim(loaded[0], positive), before)


def test_an_export_in_stock_lora_loader(comfy, loaded, space, positive, person, dialect="kohya"):
    import folder_paths

    import nodes

    comfy_nodes = nodes.NODE_CLASS_MAPPINGS
    (path,) = comfy.call("VitrineSaveW2WLora", space=space, w2w_model=person, name=f"t_{dialect}", names=dialect)
    listed = comfy_nodes["LoraLoader"].INPUT_TYPES()["required"]["lora_name"][0]
    assert f"vitrine/t_{dialect}.safetensors" in listed and not [name for name in listed if "w2wmodel" in name]
    assert folder_paths.get_full_path("loras", f"vitrine/t_{dialect}.safetensors") == path
    with torch.inference_mode():
        entry = f"vitrine/t_{dialect}.safetensors"
        model, _ = comfy_nodes["LoraLoader"]().load_lora(loaded[0], loaded[1], entry, 1.0, 0.0)
    (ours,) = comfy.call(
        "VitrineApplyW2WModel", model=loaded[0], space=space, w2w_model=person, strength=1.0, start=1000.0
    )
    assert len(model.patches) == len(ours.patches) == len(space.manifest)
    assert (ddim(model, positive) - ddim(ours, positive)).abs().max() < 1e-4
    back, _ = comfy.call("VitrineLoadW2WModel", file=f"t_{dialect}.w2wmodel.safetensors")
    assert torch.equal(back.coefficients, person.coefficients)


@pytest.mark.parametrize("one_sided", [False, True])
def test_a_slider_in_stock_lora_loader(comfy, loaded, space, positive, person, one_sided):
    """Beside the person's LoRA, at strengths -1 .. 1, against the edit itself, relative to what the edit changes."""
    import nodes

    edited = {
        s: comfy.call("VitrineW2WEdit", space=space, w2w_model=person, **sliders(beard=s))[0] for s in (1.0, -1.0)
    }
    (path,) = comfy.call(
        "VitrineSaveW2WLora", space=space, w2w_model=edited[1.0], name="t_slider", names="auto", slider_from=person,
        one_sided=one_sided,
    )  # fmt: skip
    apply = {"model": loaded[0], "space": space, "strength": 1.0, "start": 1000.0}
    (alone,) = comfy.call("VitrineApplyW2WModel", **apply, w2w_model=person)
    before = ddim(alone, positive)
    for strength, wanted in edited.items():
        with torch.inference_mode():
            slid, _ = nodes.LoraLoader().load_lora(alone, loaded[1], _listed(path), strength, 0.0)
        after = ddim(comfy.call("VitrineApplyW2WModel", **apply, w2w_model=wanted)[0], positive)
        missed = (ddim(slid, positive) - after).norm() / (after - before).norm()
        assert missed < (1e-3 if one_sided and strength > 0 else 0.4), (strength, missed)


def test_positions_on_a_calibrated_slider(comfy, space, person):
    bare = replace(space, info={k: v for k, v in space.info.items() if k != "strength_maps"})
    mapped = with_strength_maps(bare, {"beard": StrengthMap((0.0, 2.0, 3.0))})
    by_position, by_strength = (
        comfy.call("VitrineW2WEdit", space=mapped, w2w_model=person, calibrated=on, **sliders(beard=s))[0]
        for on, s in ((True, 0.5), (False, 2.0))
    )
    assert torch.equal(by_position.coefficients, by_strength.coefficients)
    assert by_position.history[-1] == by_strength.history[-1] == {"edit": {"beard": 2.0}}
    with pytest.raises(VitrineError, match="calibrated slider glasses"):
        comfy.call("VitrineW2WEdit", space=mapped, w2w_model=person, calibrated=True, **sliders(glasses=0.5))


def test_it_stacks_with_another_lora_and_nemo(comfy, loaded, space, positive, person):
    from vitrine.engine.nemo import NeuronSet

    (model,) = comfy.call(
        "VitrineApplyW2WModel", model=loaded[0], space=space, w2w_model=person, strength=1.0, start=1000.0
    )
    (twice,) = comfy.call(
        "VitrineApplyW2WModel", model=model, space=space, w2w_model=person, strength=-1.0, start=1000.0
    )
    assert (ddim(twice, positive) - ddim(loaded[0], positive)).abs().max() < 1e-4  # patches add up, and cancel
    some = NeuronSet({"down-level0-repeat0-vit-block0-cross-v": (0, 1, 2)})
    (blocked,) = comfy.call(
        "VitrineNEMONeuronBlocker", model=model, neurons=some, factor=0.0, branch="both", start=0.0, end=1.0
    )
    assert not torch.equal(ddim(blocked, positive), ddim(model, positive))


def test_a_calibrated_late_model_begins_where_it_was_calibrated(comfy, loaded, space, positive, person):
    """Above the map's timestep the person is unedited, though start_timestep says 1000; off, that alone counts."""
    calibrated = with_strength_maps(space, {"beard": StrengthMap((0.0, 3.0), 700.0)})
    late, _ = comfy.call("VitrineW2WEdit", space=calibrated, w2w_model=person, **sliders(beard=1.0), calibrated=True)
    assert late.start == 700
    told = {"model": loaded[0], "space": space, "strength": 1.0, "start": 1000.0}
    (plain,) = comfy.call("VitrineApplyW2WModel", w2w_model=person, **told)
    (whole,) = comfy.call("VitrineApplyW2WModel", w2w_model=person, late_model=late, calibrated_start=False, **told)
    (begun,) = comfy.call("VitrineApplyW2WModel", w2w_model=person, late_model=late, **told)
    for t, like, unlike in ((900, plain, whole), (500, whole, plain)):
        drawn, same, other = (network(m, positive, t)[1] for m in (begun, like, unlike))
        torch.testing.assert_close(drawn, same, atol=1e-4, rtol=1e-4)
        assert (drawn - other).abs().max() > 1e-2


def test_blend_and_wanted_attributes(comfy, space, person):
    other, report = comfy.call(
        "VitrineW2WSample",
        space=space,
        seed=9,
        factor=0.8,
        components=0,
        truncation=2.0,
        wanted="beard: 2, glasses: -1",
    )
    assert "nearest" in report and "beard" in report
    (child,) = comfy.call("VitrineW2WBlend", space=space, w2w_model=person, other=other, share=0.25)
    torch.testing.assert_close(child.coefficients, 0.75 * person.coefficients + 0.25 * other.coefficients)
    with pytest.raises(VitrineError, match="bread"):
        comfy.call("VitrineW2WEdit", space=space, w2w_model=person, **sliders(bread=1.0))
    with pytest.raises(VitrineError, match="slider"):
        comfy.call(
            "VitrineW2WSample", space=space, seed=9, factor=1.0, components=0, truncation=0.0, wanted="beard two"
        )


def test_the_node_draws_what_the_pipeline_draws(comfy, pipe, space):
    told = {"factor": 1.0, "components": 0, "truncation": 0.0, "wanted": ""}
    row = comfy.call("VitrineW2WSample", space=space, seed=0, **told)[0].coefficients
    assert torch.equal(row, pipe.sample_models(space, [0]).coefficients)
    more = comfy.call("VitrineW2WSample", space=space, seed=0, **told, emphasis=1.5, inherit=0.4)[0].coefficients
    how = SampleConfig(emphasis=1.5, inherit=0.4)
    assert torch.equal(more, pipe.sample_models(space, [0], how).coefficients) and not torch.equal(more, row)
    own = with_sampling(space, how)
    assert torch.equal(comfy.call("VitrineW2WSample", space=own, seed=0, **told)[0].coefficients, more)


def test_sampled_pictures_agree_with_the_pipeline(comfy, loaded, pipe, space, positive, person):
    """A whole run, DDIM in both doors, the edit beginning at 700."""
    graph_model = comfy.call("VitrineW2WEdit", space=space, w2w_model=person, **sliders(beard=3.0))[0]
    (model,) = comfy.call(
        "VitrineApplyW2WModel", model=loaded[0], space=space, w2w_model=person, late_model=graph_model, strength=1.0,
        start=700.0,
    )  # fmt: skip
    import comfy.sample
    import comfy.samplers

    pipe.scheduler.set_timesteps(10)
    sampling = model.get_model_object("model_sampling")
    sigmas = torch.cat([sampling.sigma(torch.tensor([float(t)])) for t in pipe.scheduler.timesteps] + [torch.zeros(1)])
    z = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(SEED))
    top = sigmas[0]
    with torch.inference_mode():
        found = comfy.sample.sample_custom(
            model, z * (1 + top**2) ** 0.5 / top, 1.0, comfy.samplers.sampler_object("euler"), sigmas, positive,
            positive, torch.zeros(1, 4, 16, 16), disable_pbar=True, seed=SEED,
        )  # fmt: skip
    found = loaded[0].model.process_latent_in(found)
    theirs = pipe(
        PROMPT, space=space, model=person, edits={"beard": 3.0}, edit_config=EditConfig(start=700), latents=z,
        num_inference_steps=10, guidance_scale=1.0, output_type="latent",
    ).images  # fmt: skip
    # the last step differs: DDIM here ends at alpha-bar of t = 0, ComfyUI at zero noise
    assert (found - theirs).norm() / theirs.norm() < 0.02


def test_one_model_is_applied_saved_and_blended_not_the_first_of_several(comfy, loaded, space, person):
    """Of a batch that W2W Invert made four models of, three were dropped without a word."""
    several = person.moved_to(person.coefficients.repeat(2, 1))
    calls = {
        "VitrineApplyW2WModel": {"model": loaded[0], "w2w_model": several, "strength": 1.0, "start": 1000.0},
        "VitrineW2WBlend": {"w2w_model": person, "other": several, "share": 0.5},
        "VitrineSaveW2WLora": {"w2w_model": several, "name": "x", "names": "auto"},
    }
    for name, inputs in calls.items():
        with pytest.raises(VitrineError, match="model: given 2 models; accepted: one"):
            comfy.call(name, space=space, **inputs)
