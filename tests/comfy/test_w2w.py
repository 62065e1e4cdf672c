"""W2W nodes in real ComfyUI: against the pipeline, stock LoraLoader, siblings, late edits, building, inversion."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.pipelines import W2WPipeline
from vitrine.engine.portraits import load_portraits
from vitrine.engine.portraits.shipped import PEOPLE_SPACE
from vitrine.engine.w2w import (
    EditConfig,
    InvertConfig,
    SampleConfig,
    StrengthMap,
    W2WModel,
    WeightSpace,
    map_of,
    map_picture,
    materialise,
    sample,
    with_sampling,
    with_strength_maps,
    write_lora,
)

PROMPT = "a smiling face with cap left navy shirt on blue"
STEPS, SEED = 6, 3


@pytest.fixture(scope="module")
def loaded(comfy):
    return comfy.call("VitrineLoadPortraits")


@pytest.fixture(scope="module")
def pipe():
    made = W2WPipeline.from_pipe(load_portraits().pipeline())
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def space(comfy):
    return comfy.call("VitrineLoadW2WSpace", space_file="portraits people (shipped)", components=0)[0]


@pytest.fixture(scope="module")
def positive(loaded):
    with torch.inference_mode():
        return loaded[1].encode_from_tokens_scheduled(loaded[1].tokenize(PROMPT))


@pytest.fixture(scope="module")
def person(comfy, space):
    return comfy.call("VitrineW2WSample", space=space, seed=4, factor=1.0, components=0, truncation=0.0, wanted="")[0]


def sliders(**given):
    table = {f"label_{i}": "" for i in range(1, 5)} | {f"strength_{i}": 0.0 for i in range(1, 5)}
    for i, (label, strength) in enumerate(given.items(), 1):
        table |= {f"label_{i}": label, f"strength_{i}": strength}
    return table | {"protect": ""}


def ddim(model, positive):
    """Stock sampling: KSampler's ddim, cfg 1, so that the diffusers side needs no negative prompt."""
    import comfy.sample

    noise = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(SEED))
    with torch.inference_mode():
        return comfy.sample.sample(
            model, noise, STEPS, 1.0, "euler", "normal", positive, positive, torch.zeros(1, 4, 16, 16), seed=SEED,
            disable_pbar=True,
        )  # fmt: skip


def network(model, positive, t):
    """One bare call of the patched network, and the same latent for the diffusers side."""
    x = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(SEED))
    import comfy.model_management

    comfy.model_management.load_models_gpu([model])
    sampling = model.model.model_sampling
    sigma = sampling.sigma(torch.tensor([float(t)]))
    with torch.inference_mode():
        x0 = model.model.apply_model(
            x * (1 + sigma**2) ** 0.5, sigma, c_crossattn=positive[0][0], transformer_options=options(model, sigma)
        )
    return x, (x * (1 + sigma**2) ** 0.5 - x0) / sigma


def options(model, sigma):
    import comfy.patcher_extension

    made = dict(model.model_options.get("transformer_options", {}))
    made["wrappers"] = comfy.patcher_extension.copy_nested_dicts(model.wrappers)
    return made | {"sample_sigmas": sigma, "sigmas": sigma}


def wanted(pipe, space, person, t, **how):
    """What the pipeline's network gives for the same latent."""
    from vitrine.engine.w2w import BatchedLora, edit

    rows = person.coefficients if not how else edit(space, person.coefficients, **how)
    x = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(SEED))
    text = pipe.encode_prompt([PROMPT], "cpu", 1, False)[0]
    with torch.no_grad(), BatchedLora(pipe.unet, space.manifest, space.decode(rows)):
        return pipe.unet(x, torch.tensor([t]), text).sample


def test_the_patch_is_the_pipelines_model(comfy, loaded, pipe, space, positive, person):
    (model,) = comfy.call(
        "VitrineApplyW2WModel", model=loaded[0], space=space, w2w_model=person, strength=1.0, start=1000.0
    )
    for t in (10, 500, 950):
        _, found = network(model, positive, t)
        torch.testing.assert_close(found, wanted(pipe, space, person, t), atol=1e-5, rtol=1e-4)


def test_late_models_begin_where_the_pipeline_begins(comfy, loaded, pipe, space, positive, person):
    edited, _ = comfy.call("VitrineW2WEdit", space=space, w2w_model=person, **sliders(beard=3.0, glasses=2.0))
    told = {"model": loaded[0], "space": space, "w2w_model": person, "late_model": edited, "strength": 1.0}
    (late,) = comfy.call("VitrineApplyW2WModel", **told, start=500.0)
    how = {"strengths": {"beard": 3.0, "glasses": 2.0}}
    for t in (100, 499, 501, 900):
        _, found = network(late, positive, t)
        expected = wanted(pipe, space, person, t, **(how if t <= 500 else {}))
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


def _listed(path):
    """The entry of a saved LoRA in every loader's list."""
    return f"vitrine/{Path(path).name}"


def test_positions_on_a_calibrated_slider(comfy, space, person):
    mapped = with_strength_maps(space, {"beard": StrengthMap((0.0, 2.0, 3.0))})
    by_position, by_strength = (
        comfy.call("VitrineW2WEdit", space=mapped, w2w_model=person, calibrated=on, **sliders(beard=s))[0]
        for on, s in ((True, 0.5), (False, 2.0))
    )
    assert torch.equal(by_position.coefficients, by_strength.coefficients)
    assert by_position.history[-1] == by_strength.history[-1] == {"edit": {"beard": 2.0}}
    with pytest.raises(VitrineError, match="calibrated slider glasses"):
        comfy.call("VitrineW2WEdit", space=mapped, w2w_model=person, calibrated=True, **sliders(glasses=0.5))


def test_the_map_of_a_space(comfy, space, tmp_path):
    shipped = {"space_file": "portraits people (shipped)", "components": 0}
    plain, coloured = (comfy.call("VitrineLoadW2WSpace", **shipped, colour_by=k)[2] for k in ("", "beard"))
    assert plain.shape == coloured.shape == (1, 768, 768, 3) and not torch.equal(plain, coloured)
    wanted = torch.from_numpy(np.asarray(map_picture(map_of(space, method="components"), "beard")) / 255).float()
    assert torch.equal(coloured[0], wanted)
    with pytest.raises(VitrineError, match="label"):
        comfy.call("VitrineLoadW2WSpace", **shipped, colour_by="bread")


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


def test_building_from_a_folder(comfy, space, tmp_path):
    import folder_paths

    folder = tmp_path / "loras" / "people"
    for i, row in enumerate(sample(space, range(6))):
        write_lora(folder / f"p{i}.safetensors", materialise(space, row), "kohya" if i % 2 else "diffusers")
    (folder / "broken.safetensors").write_bytes(b"not a file")
    kept = dict(folder_paths.folder_names_and_paths)
    folder_paths.folder_names_and_paths["loras"] = ([str(tmp_path / "loras")], {".safetensors"})
    folder_paths.folder_names_and_paths["w2w"] = ([str(tmp_path / "w2w")], {".safetensors"})
    try:
        told = {"folder": "people", "name": "six", "mode": "auto", "components": 0, "base": "portraits"}
        built, report = comfy.call("VitrineBuildW2WSpace", **told)
        assert built.count == 6 and "broken" in report and (tmp_path / "w2w" / "six.w2w.safetensors").is_file()
        assert not list((tmp_path / "w2w").glob(".six*"))
        more, told = comfy.call(
            "VitrineTrainW2WDirection", space=built, label="late", labels="p[0-2] 0\np[3-5] 1", method="means",
            components=0, save_as="named",
        )  # fmt: skip
        assert "late" in more.directions and "held-out" in told
        again = comfy.call("VitrineLoadW2WSpace", space_file="named.w2w.safetensors", components=3)[0]
        assert again.dimension == 3 and "late" in again.directions
        with pytest.raises(VitrineError, match="name"):
            comfy.call(
                "VitrineBuildW2WSpace",
                **{"folder": "people", "name": "../six", "mode": "auto", "components": 0, "base": ""},
            )
    finally:
        folder_paths.folder_names_and_paths.clear()
        folder_paths.folder_names_and_paths.update(kept)


def test_inversion_equals_the_pipelines(comfy, loaded, pipe, space, positive):
    image = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(0))
    told = {"steps": 4, "lr": 0.5, "batch": 2, "components": 20, "prior": 0.0, "seed": 1}
    found, report = comfy.call(
        "VitrineW2WInvert", model=loaded[0], vae=loaded[2], positive=positive, space=space, image=image,
        preset="custom", **told, mask=torch.ones(1, 64, 64),
    )  # fmt: skip
    config = InvertConfig(20, 4, 0.5, 2, seed=1, antithetic=True)
    pipe.scheduler = load_portraits().scheduler
    theirs, _ = pipe.invert_image(space, image.permute(0, 3, 1, 2), PROMPT, config, mask=torch.ones(1, 64, 64))
    torch.testing.assert_close(found.coefficients, theirs.coefficients, atol=2e-3, rtol=1e-2)
    assert "held-out loss" in report
    with pytest.raises(VitrineError, match="mask size"):
        comfy.call(
            "VitrineW2WInvert", model=loaded[0], vae=loaded[2], positive=positive, space=space, image=image,
            preset="quick", **told, mask=torch.ones(1, 32, 32),
        )  # fmt: skip


def test_samples_are_of_the_vaes_posterior(comfy, loaded, pipe, space, positive):
    """Means and deviations are the pipeline's; the node trains on other latents than the means."""
    from vitrine.engine.activations.images import encode_pixels
    from vitrine.nodes.comfy.model import encode
    from vitrine.nodes.w2w_make import _posterior

    image = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(0))
    pixels = image.permute(0, 3, 1, 2) * 2 - 1
    with torch.no_grad():
        ours = _posterior(loaded[0], loaded[2], image, encode(loaded[0], loaded[2], image))
        means = encode_pixels(pipe.vae, pixels)
        deviations = pipe._deviations(pixels, means)
    torch.testing.assert_close(ours.means, means, atol=2e-3, rtol=1e-2)
    torch.testing.assert_close(ours.deviations, deviations, atol=2e-3, rtol=2e-2)
    told = {"steps": 2, "lr": 0.5, "batch": 2, "components": 5, "prior": 0.0, "seed": 1, "preset": "custom"}
    told |= {"model": loaded[0], "vae": loaded[2], "positive": positive, "space": space, "image": image}
    mean, sampled = (comfy.call("VitrineW2WInvert", **told, posterior=p)[0] for p in ("mean", "sample"))
    assert not torch.equal(mean.coefficients, sampled.coefficients)


def test_interrupting_an_inversion_stops_the_run_and_saves_the_best(comfy, loaded, space, positive):
    """The user's Cancel is noticed inside a network call, within one step; nothing runs downstream."""
    import comfy.model_management as management
    import folder_paths

    calls = []

    def press(*_):
        calls.append(1)
        if len(calls) == 4:
            management.interrupt_current_processing(True)

    handle = loaded[0].model.diffusion_model.register_forward_hook(press)
    try:
        with pytest.raises(management.InterruptProcessingException):
            comfy.call(
                "VitrineW2WInvert", model=loaded[0], vae=loaded[2], positive=positive, space=space,
                image=torch.rand(1, 64, 64, 3), preset="photo", steps=1, lr=0.1, batch=1, components=0, prior=0.0,
                seed=0,
            )  # fmt: skip
    finally:
        handle.remove()
        management.interrupt_current_processing(False)
    best = Path(folder_paths.get_folder_paths("vitrine_w2w")[0]) / "interrupted.w2wmodel.safetensors"
    assert len(calls) <= 6 and float(W2WModel.load(best).coefficients.abs().max()) > 0
    for state in best.parent.glob("inversion-*"):
        shutil.rmtree(state)


def test_an_interrupted_inversion_goes_on(comfy, loaded, space, positive, monkeypatch):
    """The same inputs again: steps already made are not made anew, and the result is that of one run, bit for bit."""
    import comfy.model_management as management
    import folder_paths
    from vitrine.engine.w2w import inversion

    inputs = {
        "model": loaded[0], "vae": loaded[2], "positive": positive, "space": space, "preset": "custom", "steps": 8,
        "image": torch.rand(2, 64, 64, 3, generator=torch.Generator().manual_seed(2)), "lr": 0.5, "batch": 1,
        "components": 9, "prior": 0.0, "seed": 5, "together": True,
    }  # fmt: skip
    steps, step, stop_at = [], inversion._Run.step, [5]

    def counted(run):
        step(run)
        steps.append(run.done)
        if run.done == stop_at[0]:
            management.interrupt_current_processing(True)

    monkeypatch.setattr(inversion._Run, "step", counted)
    folder = Path(folder_paths.get_folder_paths("vitrine_w2w")[0])
    try:
        with pytest.raises(management.InterruptProcessingException):
            comfy.call("VitrineW2WInvert", **inputs)
    finally:
        management.interrupt_current_processing(False)
    assert len(list(folder.glob("inversion-*/state.safetensors"))) == 1
    stop_at[0], first = -1, steps[-1]
    resumed, _ = comfy.call("VitrineW2WInvert", **inputs)
    assert first in (5, 6) and steps == list(range(1, 9)), "goes on from the stopped step"
    assert resumed.coefficients.shape[0] == 1, "two pictures together are one model"
    assert not list(folder.glob("inversion-*")), "a finished run leaves nothing"
    steps.clear()
    whole, _ = comfy.call("VitrineW2WInvert", **inputs)
    assert steps == list(range(1, 9)) and torch.equal(whole.coefficients, resumed.coefficients)


def test_doras_join_with_their_base_model(comfy, loaded, pipe, tmp_path):
    """Row norms of base + change come from the checkpoint, not from a LoRA that is on the MODEL at the moment."""
    import folder_paths
    from comfy import model_management
    from safetensors.torch import save_file
    from vitrine.engine.w2w import BaseWeights, initial_lora, read_lora
    from vitrine.engine.w2w.export import kohya
    from vitrine.nodes.comfy.lora import with_lora

    random = torch.Generator().manual_seed(4)
    for i in range(3):
        layers = initial_lora(pipe.unet, rank=2, alpha=2.0, seed=i)
        tensors = kohya({p: replace(v, up=torch.randn(v.up.shape, generator=random) * 0.1) for p, v in layers.items()})
        weights = BaseWeights.of_module(pipe.unet)
        for path in layers if i else ():
            scale = weights[path].norm(dim=1, keepdim=True) * (1 + 0.2 * i)
            tensors[f"lora_unet_{path.replace('.', '_')}.dora_scale"] = scale
        (tmp_path / "loras" / "mixed").mkdir(parents=True, exist_ok=True)
        save_file(tensors, tmp_path / "loras" / "mixed" / f"m{i}.safetensors")
    kept = dict(folder_paths.folder_names_and_paths)
    folder_paths.folder_names_and_paths["loras"] = ([str(tmp_path / "loras")], {".safetensors"})
    folder_paths.folder_names_and_paths["w2w"] = ([str(tmp_path / "w2w")], {".safetensors"})
    told = {"folder": "mixed", "name": "doras", "mode": "delta", "components": 0, "base": ""}
    try:
        with pytest.raises(VitrineError, match="DoRA"):
            comfy.call("VitrineBuildW2WSpace", **told)
        other = with_lora(loaded[0], read_lora(tmp_path / "loras" / "mixed" / "m0.safetensors"), 5.0)
        for model in (loaded[0], other):
            model_management.load_models_gpu([other])
            built, report = comfy.call("VitrineBuildW2WSpace", **told, model=model)
            assert built.count == 3 and "left out" not in report
            for i in range(3):
                file = tmp_path / "loras" / "mixed" / f"m{i}.safetensors"
                truth = read_lora(file, base=BaseWeights.of_module(pipe.unet))
                ours = materialise(built, built.coefficients[i])
                for path, layer in truth.items():
                    torch.testing.assert_close(ours[path].delta(), layer.delta(), atol=1e-4, rtol=1e-3)
        with pytest.raises(VitrineError, match="linked"):
            comfy.call("VitrineBuildW2WSpace", **told, model=loaded[0], linked=True)
    finally:
        folder_paths.folder_names_and_paths.clear()
        folder_paths.folder_names_and_paths.update(kept)


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


def test_a_published_space_works_in_every_node(comfy, loaded, space, positive, tmp_path):
    """10,000 components of which projections cover 1,000, or none: reports used to fail on the last line."""
    from dataclasses import replace

    leading = replace(space, coefficients=space.coefficients[:, :50], names=(), directions={})
    bare = replace(leading, coefficients=torch.zeros(0, space.dimension), singular_values=0 * space.singular_values)
    told = {"factor": 1.0, "components": 0, "truncation": 0.0, "wanted": ""}
    model, report = comfy.call("VitrineW2WSample", space=leading, seed=3, **told)
    assert "nearest" in report
    taught, _ = comfy.call(
        "VitrineTrainW2WDirection", space=leading, label="early", labels="* 0\n1? 1", method="means", components=0,
        save_as="",
    )  # fmt: skip
    edited, report = comfy.call("VitrineW2WEdit", space=taught, w2w_model=model, **sliders(early=1.0))
    assert "early" in report and not torch.equal(edited.coefficients, model.coefficients)
    with pytest.raises(VitrineError, match="spread"):
        comfy.call("VitrineW2WSample", space=bare, seed=3, **told)
    values = {"steps": 2, "lr": 0.5, "batch": 1, "components": 20, "prior": 0.0, "seed": 1}
    found, report = comfy.call(
        "VitrineW2WInvert", model=loaded[0], vae=loaded[2], positive=positive, space=bare, preset="custom", **values,
        image=torch.rand(1, 64, 64, 3),
    )  # fmt: skip
    assert "held-out loss" in report and "unknown" in report and found.coefficients.abs().max() > 0


def test_the_node_draws_what_the_pipeline_draws(comfy, pipe, space):
    told = {"factor": 1.0, "components": 0, "truncation": 0.0, "wanted": ""}
    row = comfy.call("VitrineW2WSample", space=space, seed=0, **told)[0].coefficients
    assert torch.equal(row, pipe.sample_models(space, [0]).coefficients)
    more = comfy.call("VitrineW2WSample", space=space, seed=0, **told, emphasis=1.5, inherit=0.4)[0].coefficients
    how = SampleConfig(emphasis=1.5, inherit=0.4)
    assert torch.equal(more, pipe.sample_models(space, [0], how).coefficients) and not torch.equal(more, row)
    own = with_sampling(space, how)
    assert torch.equal(comfy.call("VitrineW2WSample", space=own, seed=0, **told)[0].coefficients, more)


def test_a_lora_or_a_member_becomes_a_model(comfy, space, tmp_path):
    import folder_paths

    write_lora(tmp_path / "mine.safetensors", materialise(space, space.coefficients[11]), "diffusers")
    kept = folder_paths.folder_names_and_paths["loras"]
    folder_paths.folder_names_and_paths["loras"] = ([str(tmp_path)], {".safetensors"})
    try:
        mine, report = comfy.call("VitrineLoadW2WModel", file="", space=space, lora="mine.safetensors")
    finally:
        folder_paths.folder_names_and_paths["loras"] = kept
    torch.testing.assert_close(mine.coefficients[0], space.coefficients[11], atol=2e-2, rtol=2e-2)
    assert "holds 100.0%" in report and "person-0011 1.00" in report
    member, report = comfy.call("VitrineLoadW2WModel", file="", space=space, member="person-0011")
    assert torch.equal(member.coefficients[0], space.coefficients[11]) and "training model" in report
    with pytest.raises(VitrineError, match="Load W2W Space"):
        comfy.call("VitrineLoadW2WModel", file="", member="person-0011")


def test_saving_with_a_rank_and_a_precision(comfy, space, person):
    from safetensors.torch import load_file

    told = {"space": space, "w2w_model": person, "name": "slim", "names": "auto"}
    (path,) = comfy.call("VitrineSaveW2WLora", **told, rank=1, dtype="float16")
    assert {v.dtype for k, v in load_file(path).items() if k.endswith("up.weight")} == {torch.float16}


def test_a_transformers_lora_is_a_patch_under_its_own_names(comfy):
    """PixArt: core's map has ``transformer.`` and diffusers' paths, and none of kohya's."""
    from vitrine.nodes.comfy.lora import with_lora
    from vitrine_tests.comfy import controlled
    from vitrine_tests.engine.small_loras import lora

    twins = controlled.pixart_twins()
    linear = {n: m for n, m in twins.pipe.transformer.named_modules() if n.endswith(("attn1.to_q", "attn2.to_v"))}
    made = lora(1, rank=2, shapes={n: tuple(m.weight.shape) for n, m in linear.items()})
    patches = with_lora(twins.model, made).patches
    assert len(patches) == len({n.rsplit("_", 1)[0] if "attn2" in n else n for n in linear})


def test_a_model_of_another_space_or_base_is_refused(comfy, loaded, space, person):
    stranger = W2WModel(torch.zeros(1, 5), "0" * 16)
    with pytest.raises(VitrineError, match="space"):
        comfy.call("VitrineApplyW2WModel", model=loaded[0], space=space, w2w_model=stranger, strength=1.0, start=1000.0)


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


def test_the_file_is_the_packs(space):
    assert isinstance(space, WeightSpace) and PEOPLE_SPACE.is_file()
