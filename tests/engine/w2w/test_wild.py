"""LoRA files as people have them: each is read right, with a remark on what is left out, or refused with the reason."""

import os
from pathlib import Path

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.w2w import BaseWeights, build_space, materialise, read_header, read_lora, scan_folder
from vitrine_tests.engine.small_loras import lora
from vitrine_tests.engine.wild import CASES, FP8, tiny

PAGE = Path(__file__).parents[3] / "docs" / "wild-loras.md"
HEAD = """# LoRA files as people have them

What *Build LoRA Space (W2W)* and `vitrine w2w build` make of each kind of file, compared with PEFT's own change of
the weights where it is read. Written by `VITRINE_WRITE_DOCS=1 pytest tests/engine/w2w/test_wild.py`, from files that
the tests make with the programs named, or under their names.

| written by | file | outcome |
|---|---|---|
"""


def test_the_page():
    told = {"read": "read"}
    rows = []
    for case in CASES:
        if "base weights" in case.outcome:
            outcome = case.outcome
        elif case.outcome.startswith("read, says"):
            outcome = f"read; the summary says that {case.outcome.split('says ')[1]} are left out"
        else:
            outcome = told.get(case.outcome, f"left out: {case.outcome}")
        rows.append(f"| {case.writer} | {case.file} | {outcome} |\n")
    text = HEAD + "".join(rows)
    if os.environ.get("VITRINE_WRITE_DOCS"):
        PAGE.write_text(text, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.writer}: {c.file}")
def test_a_wild_file(case, tmp_path):
    path, wanted = case.make(tmp_path)
    if not case.outcome.startswith("read"):
        with pytest.raises(VitrineError, match=case.outcome):
            read_lora(path)
        return
    base = None
    if "base weights" in case.outcome:
        with pytest.raises(VitrineError, match="DoRA.*depends on the base model's weights"):
            read_lora(path)
        base = BaseWeights.of_module(tiny())
    found = read_lora(path, base=base)
    assert set(found) == set(wanted)
    coarse = next(iter(found.values())).down  # the truth is that of float32 factors
    stored = {torch.finfo(d).eps for d in (torch.bfloat16, FP8) if torch.equal(coarse, coarse.to(d).float())}
    for name, change in wanted.items():
        delta = found[name].delta()  # without base weights, LoHa and LoKr cannot tell 1 x 1 convolutions from layers
        assert change[0, 0].numel() == 1 or delta.shape == change.shape
        error = (delta.flatten(1) - change.flatten(1)).norm() / change.norm()
        assert error < max([1e-6, *stored]), name
    said = case.outcome.partition("says ")[2]
    second = tmp_path / "second"
    second.mkdir()
    other, _ = case.make(second)
    assert said in scan_folder([path, other], base=base).summary()
    if not said:
        assert "left out" not in scan_folder([path, other], base=base).summary()


# --- folders ------------------------------------------------------------------------------------------------------
def saved(folder, name, number, **how):
    """A kohya file of three layers."""
    from vitrine.engine.w2w import write_lora

    return write_lora(folder / f"{name}.safetensors", lora(number, **how))


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["models/a/unet/adapter_model", "models/b/unet/adapter_model"], ["a", "b"]),
        (["anna/last", "bob/last"], ["anna", "bob"]),
        (["anna/last", "anna/old/last", "bob/x"], ["anna/last", "anna/old/last", "x"]),
        (["anna/v1/last", "bob/v1/last", "v1"], ["anna", "bob", "v1"]),
        (["anna/last", "bob/last", "anna"], ["anna", "anna/last", "bob"]),
        (["a/pytorch_lora_weights", "b"], ["a", "b"]),
    ],
)
def test_every_model_has_a_name_of_its_own(tmp_path, files, names):
    for i, name in enumerate(files):
        saved(tmp_path, name, i, start=7)
    built = build_space(tmp_path)
    assert sorted(built.space.names) == names


def test_labels_find_models_by_path_or_by_a_name_that_only_one_has(tmp_path):
    from vitrine.engine.w2w.space.labels import parse_labels, read_table

    names = ("anna/last", "anna/old/last", "x/bob")
    assert parse_labels("bob 1\nanna/* 0", names).tolist() == [0, 0, 1]
    table = tmp_path / "labels.csv"
    table.write_text("name,age\nanna/old/last.safetensors,3\nbob,5\n")
    assert read_table(table, names)["age"][1:].tolist() == [3, 5]
    table.write_text("name,age\nlast,3\n")
    with pytest.raises(VitrineError, match="'last'"):
        read_table(table, names)


@pytest.mark.parametrize("mode", ["factors", "delta"])
def test_projections_stored_with_two_or_four_dimensions(tmp_path, mode):
    from vitrine.engine.w2w import BuildConfig, LoraLayer, write_lora

    path = "mid_block.attentions.0.proj_in"
    loras = []
    for i in range(5):
        made = lora(i, shapes={path: (12, 8)}, start=7)[path]
        loras.append(made)
        four = LoraLayer(made.down[..., None, None], made.up[..., None, None], made.alpha)
        write_lora(tmp_path / f"m{i}.safetensors", {path: made if i % 2 else four})
    space = build_space(tmp_path, BuildConfig(mode)).space
    assert space.count == 5
    for row, made in zip(space.coefficients, loras, strict=True):
        found = space.lora(row)[path]
        assert found.down.ndim == 4
        torch.testing.assert_close(found.delta().flatten(1), made.delta(), atol=1e-5, rtol=0)
        torch.testing.assert_close(space.encode_lora({path: made}), row, atol=2e-3, rtol=1e-3)


def test_a_file_with_text_encoder_keys_does_not_poison_the_space(tmp_path):
    from safetensors.torch import load_file, save_file
    from vitrine_tests.engine.wild import clip

    for i in range(4):
        path = saved(tmp_path, f"m{i}", i, start=7)
        if i == 2:
            save_file(load_file(path) | clip("text_encoders.clip_l."), path)
    built = build_space(tmp_path)
    assert built.space.mode == "factors" and built.folder.good[2].text_layers == 1
    assert "1 files also change text encoders" in built.summary()
    assert set(built.space.lora(built.space.coefficients[2])) == set(lora(0))


def test_a_header_never_ends_a_scan(tmp_path):
    """A pattern that cannot be read is named next to the file it belongs to."""
    import json

    for name in ("a", "b", "c"):
        saved(tmp_path, f"{name}/adapter_model", 1 + ord(name), start=7)
    (tmp_path / "c" / "adapter_config.json").write_text(json.dumps({"lora_alpha": 1, "alpha_pattern": {"to_(q": 2}}))
    report = scan_folder(tmp_path)
    assert [f.name for f in report.good] == ["a", "b"] and "to_(q; accepted: names of layers" in report.bad[0].problem
    assert read_header(tmp_path / "a" / "adapter_model.safetensors").name == "a"


def test_base_weights_of_files_and_networks(tmp_path):
    """A checkpoint under ldm names, diffusers' folder and the network itself give a DoRA the same weights."""
    from safetensors.torch import save_file

    network, case = tiny(), next(c for c in CASES if c.writer == "PEFT" and c.file == "DoRA")
    path, _ = case.make(tmp_path)
    network.save_pretrained(tmp_path / "unet")
    weights = network.state_dict()
    save_file({f"model.diffusion_model.{k}": v for k, v in weights.items()}, tmp_path / "checkpoint.safetensors")
    wanted = read_lora(path, base=BaseWeights.of_module(network))
    for place in ("unet", "checkpoint.safetensors"):
        found = read_lora(path, base=BaseWeights.of_file(tmp_path / place))
        assert all(torch.equal(found[p].delta(), layer.delta()) for p, layer in wanted.items())
    save_file({"conv_in.weight": weights["conv_in.weight"]}, tmp_path / "part.safetensors")
    with pytest.raises(VitrineError, match="lack down_blocks"):
        read_lora(path, base=BaseWeights.of_file(tmp_path / "part.safetensors"))
    with pytest.raises(VitrineError, match="base weights"):
        read_lora(path, base=BaseWeights.of_file(tmp_path / "missing.safetensors"))


def test_lengths_of_columns(tmp_path):
    """LyCORIS's older (1, in) lengths: each input channel's column gets the length in the file."""
    from safetensors.torch import load_file, save_file

    random = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 4, 3, 3, generator=random)
    layer = lora(0, shapes={"conv_in": (6, 36)})["conv_in"]
    lengths = torch.rand(1, 4, 1, 1, generator=random) + 0.5
    tensors = {"lora_down.weight": layer.down.view(-1, 4, 3, 3), "lora_up.weight": layer.up[..., None, None]}
    tensors |= {"dora_scale": lengths, "alpha": torch.tensor(layer.alpha)}
    save_file({f"lora_unet_conv_in.{k}": v.contiguous() for k, v in tensors.items()}, tmp_path / "d.safetensors")
    save_file({"conv_in.weight": weight}, tmp_path / "base.safetensors")
    assert load_file(tmp_path / "d.safetensors")["lora_unet_conv_in.dora_scale"].shape == (1, 4, 1, 1)
    found = read_lora(tmp_path / "d.safetensors", base=BaseWeights.of_file(tmp_path / "base.safetensors"))
    moved = weight + found["conv_in"].delta()
    assert torch.allclose(moved.square().sum((0, 2, 3)).sqrt(), lengths.flatten(), rtol=1e-5)
    straight = moved / (weight + layer.delta().view_as(weight))  # each column in its old direction
    assert torch.allclose(straight, straight[:1, :, :1, :1].expand_as(straight), rtol=1e-3)


def test_a_space_of_other_adapters_gives_the_members_back(tmp_path):
    """LoHa, LoKr and full differences of one network in one space: their changes come back from their coefficients."""
    truths = {}
    for file in ("LoHa", "LoKr", "full difference"):
        case = next(c for c in CASES if c.file == file)
        (tmp_path / file).mkdir()
        path, true = case.make(tmp_path / file)
        truths[read_header(path).name] = true
    built = build_space(tmp_path)
    space, summary = built.space, built.summary()
    assert space.mode == "delta" and "1 files have LoKr: converted without loss" in summary
    for name, true in truths.items():
        row = space.coefficients[space.names.index(name)].float()
        found = materialise(space, row)
        for layer, change in true.items():
            error = (found[layer].delta().flatten(1) - change.flatten(1)).norm() / change.norm()
            # one file's changes are a hundred times another's, and all come back from float32 coefficients
            assert error < 1e-4, (name, layer)
