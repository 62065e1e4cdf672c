"""W2W nodes and files in real ComfyUI: spaces from folders, published ones, maps, exports, refusals."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.portraits.shipped import PEOPLE_SPACE
from vitrine.engine.w2w import W2WModel, WeightSpace, map_of, map_picture, materialise, sample, write_lora
from vitrine_tests.comfy.w2w.scene import sliders


def test_the_map_of_a_space(comfy, space, tmp_path):
    shipped = {"space_file": "portraits people (shipped)", "components": 0}
    plain, coloured = (comfy.call("VitrineLoadW2WSpace", **shipped, colour_by=k)[2] for k in ("", "beard"))
    assert plain.shape == coloured.shape == (1, 768, 768, 3) and not torch.equal(plain, coloured)
    wanted = torch.from_numpy(np.asarray(map_picture(map_of(space, method="components"), "beard")) / 255).float()
    assert torch.equal(coloured[0], wanted)
    with pytest.raises(VitrineError, match="label"):
        comfy.call("VitrineLoadW2WSpace", **shipped, colour_by="bread")


def test_a_folder_that_is_not_there_is_named_with_what_to_do(comfy):
    options = {"name": "none", "mode": "auto", "components": 0, "base": "", "linked": False}
    node = {"class_type": "VitrineBuildW2WSpace", "inputs": {"folder": "my_loras_to_come", **options}}
    _, error = comfy.run({"1": node})
    assert "put them into models/loras/my_loras_to_come, press R" in error


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
            "VitrineTrainW2WDirection",
            space=built,
            label="late",
            labels="p[0-2] 0\np[3-5] 1",
            method="means",
            components=0,
            save_as="named",
        )
        assert "late" in more.directions and "chance is 50 %" in told and "late is useless" in told
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


def test_doras_join_with_their_base_model(comfy, loaded, pipe, tmp_path):
    """Row norms of base + change come from the checkpoint, not from a LoRA that is on the MODEL at the moment."""
    import folder_paths
    from comfy import model_management
    from safetensors.torch import save_file
    from vitrine.engine.io.lora_writing import kohya
    from vitrine.engine.w2w import BaseWeights, initial_lora, read_lora
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


def test_a_published_space_works_in_every_node(comfy, loaded, space, positive, tmp_path):
    """10,000 components of which projections cover 1,000, or none: reports used to fail on the last line."""
    from dataclasses import replace

    leading = replace(space, coefficients=space.coefficients[:, :50], names=(), directions={})
    bare = replace(leading, coefficients=torch.zeros(0, space.dimension), singular_values=0 * space.singular_values)
    told = {"spread": 1.0, "components": 0, "truncation": 0.0, "wanted": ""}
    model, report = comfy.call("VitrineW2WSample", space=leading, seed=3, **told)
    assert "nearest" in report
    taught, _ = comfy.call(
        "VitrineTrainW2WDirection",
        space=leading,
        label="early",
        labels="* 0\n1? 1",
        method="means",
        components=0,
        save_as="",
    )
    edited, report = comfy.call("VitrineW2WEdit", space=taught, w2w_model=model, **sliders(early=1.0))
    assert "early" in report and not torch.equal(edited.coefficients, model.coefficients)
    with pytest.raises(VitrineError, match="spread"):
        comfy.call("VitrineW2WSample", space=bare, seed=3, **told)
    values = {"steps": 2, "lr": 0.5, "batch": 1, "components": 20, "prior": 0.0, "seed": 1}
    found, report = comfy.call(
        "VitrineW2WInvert",
        model=loaded[0],
        vae=loaded[2],
        positive=positive,
        space=bare,
        preset="custom",
        **values,
        image=torch.rand(1, 64, 64, 3),
    )
    assert "held-out loss" in report and "unknown" in report and found.coefficients.abs().max() > 0


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
    assert "captures 100.0%" in report and "person-0011 1.00" in report
    member, report = comfy.call("VitrineLoadW2WModel", file="", space=space, member="person-0011")
    assert torch.equal(member.coefficients[0], space.coefficients[11]) and "training model" in report
    with pytest.raises(VitrineError, match=r"Load LoRA Space \(W2W\)"):
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
        comfy.call(
            "VitrineApplyW2WModel",
            model=loaded[0],
            space=space,
            w2w_model=stranger,
            strength=1.0,
            start_timestep=1000.0,
        )


def test_the_file_is_the_packs(space):
    assert isinstance(space, WeightSpace) and PEOPLE_SPACE.is_file()
