"""W2W nodes in real ComfyUI as patches of a MODEL: against the pipeline, stock LoraLoader, siblings, late edits."""

from pathlib import Path

import pytest
import torch
from vitrine.engine.w2w import EditConfig, edit, edit_step
from vitrine_tests.comfy.w2w.scene import ddim, network, pipelines_output, sliders


def _listed(path):
    """The entry of a saved LoRA in every loader's list."""
    return f"vitrine/{Path(path).name}"


def test_the_patch_is_the_pipelines_model(comfy, loaded, pipe, space, positive, person):
    (model,) = comfy.call(
        "VitrineApplyW2WModel", model=loaded[0], space=space, w2w_model=person, strength=1.0, start_timestep=1000.0
    )
    for t in (10, 500, 950):
        _, found = network(model, positive, t)
        torch.testing.assert_close(found, pipelines_output(pipe, space, person, t), atol=1e-5, rtol=1e-4)


def test_late_models_begin_where_the_pipeline_begins(comfy, loaded, pipe, space, positive, person):
    edited, _ = comfy.call("VitrineW2WEdit", space=space, w2w_model=person, **sliders(beard=3.0, glasses=2.0))
    told = {"model": loaded[0], "space": space, "w2w_model": person, "late_model": edited, "strength": 1.0}
    (late,) = comfy.call("VitrineApplyW2WModel", **told, start_timestep=500.0)
    how = {"strengths": {"beard": 3.0, "glasses": 2.0}}
    for t in (100, 499, 501, 900):
        _, found = network(late, positive, t)
        expected = pipelines_output(pipe, space, person, t, **(how if t <= 500 else {}))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert not any(m._forward_hooks for m in loaded[0].model.diffusion_model.modules())
    always = comfy.call("VitrineApplyW2WModel", **told, start_timestep=1000.0)[0]
    never = comfy.call("VitrineApplyW2WModel", **told, start_timestep=-1.0)[0]
    plain = comfy.call(
        "VitrineApplyW2WModel", model=loaded[0], space=space, w2w_model=person, strength=1.0, start_timestep=1000.0
    )[0]
    assert torch.equal(ddim(never, positive), ddim(plain, positive))
    assert not torch.equal(ddim(always, positive), ddim(plain, positive))


def test_zero_sliders_and_siblings(comfy, loaded, space, positive, person):
    before = ddim(loaded[0], positive)
    same, _ = comfy.call("VitrineW2WEdit", space=space, w2w_model=person, **sliders(beard=0.0))
    assert torch.equal(same.coefficients, person.coefficients)
    (model,) = comfy.call(
        "VitrineApplyW2WModel", model=loaded[0], space=space, w2w_model=person, strength=1.0, start_timestep=1000.0
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
        "VitrineApplyW2WModel", model=loaded[0], space=space, w2w_model=person, strength=1.0, start_timestep=1000.0
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
        "VitrineSaveW2WLora",
        space=space,
        w2w_model=edited[1.0],
        name="t_slider",
        names="auto",
        slider_from=person,
        one_sided=one_sided,
    )
    apply = {"model": loaded[0], "space": space, "strength": 1.0, "start_timestep": 1000.0}
    (alone,) = comfy.call("VitrineApplyW2WModel", **apply, w2w_model=person)
    before = ddim(alone, positive)
    for strength, wanted in edited.items():
        with torch.inference_mode():
            slid, _ = nodes.LoraLoader().load_lora(alone, loaded[1], _listed(path), strength, 0.0)
        after = ddim(comfy.call("VitrineApplyW2WModel", **apply, w2w_model=wanted)[0], positive)
        missed = (ddim(slid, positive) - after).norm() / (after - before).norm()
        assert missed < (1e-3 if one_sided and strength > 0 else 0.4), (strength, missed)


def test_it_stacks_with_another_lora_and_nemo(comfy, loaded, space, positive, person):
    from vitrine.engine.nemo import NeuronSet

    (model,) = comfy.call(
        "VitrineApplyW2WModel", model=loaded[0], space=space, w2w_model=person, strength=1.0, start_timestep=1000.0
    )
    (twice,) = comfy.call(
        "VitrineApplyW2WModel", model=model, space=space, w2w_model=person, strength=-1.0, start_timestep=1000.0
    )
    assert (ddim(twice, positive) - ddim(loaded[0], positive)).abs().max() < 1e-4  # patches add up, and cancel
    some = NeuronSet({"down-level0-repeat0-vit-block0-cross-v": (0, 1, 2)})
    (blocked,) = comfy.call(
        "VitrineNEMONeuronBlocker",
        model=model,
        neurons=some,
        factor=0.0,
        branch="both",
        start_percent=0.0,
        end_percent=1.0,
    )
    assert not torch.equal(ddim(blocked, positive), ddim(model, positive))


def test_a_late_model_begins_no_earlier_than_its_own_start(comfy, loaded, space, positive, person):
    """Above it the person is unedited, though start_timestep says 1000."""
    edited = edit(space, person.coefficients, {"beard": 3.0})
    whole_run, late = (
        person.moved_to(edited, **edit_step({"beard": 3.0}, EditConfig(start_timestep=t))) for t in (1000, 700)
    )
    told = {"model": loaded[0], "space": space, "strength": 1.0, "start_timestep": 1000.0}
    (plain,) = comfy.call("VitrineApplyW2WModel", w2w_model=person, **told)
    (whole,) = comfy.call("VitrineApplyW2WModel", w2w_model=person, late_model=whole_run, **told)
    (begun,) = comfy.call("VitrineApplyW2WModel", w2w_model=person, late_model=late, **told)
    for t, like, unlike in ((900, plain, whole), (500, whole, plain)):
        drawn, same, other = (network(m, positive, t)[1] for m in (begun, like, unlike))
        torch.testing.assert_close(drawn, same, atol=1e-4, rtol=1e-4)
        assert (drawn - other).abs().max() > 1e-2
