"""Encoding: somebody's LoRA or a member as a model of a space; edit, invert, encode and export as commands."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from vitrine.cli.main import main
from vitrine.engine.errors import VitrineError
from vitrine.engine.portraits.shipped import PEOPLE_SPACE
from vitrine.engine.w2w import (
    DeltaSpace,
    LoraLayer,
    W2WModel,
    encode,
    fraction_inside,
    load_space,
    materialise,
    member,
    official_model,
    read_lora,
    sample,
    write_lora,
)
from vitrine.engine.w2w.space.official_files import import_official
from vitrine_tests.engine.official_files import official_files
from vitrine_tests.engine.small_loras import deltas, same


def stranger(like, seed=999):
    g = torch.Generator().manual_seed(seed)
    return {
        p: LoraLayer(torch.randn(v.down.shape, generator=g), torch.randn(v.up.shape, generator=g), 1.0)
        for p, v in like.items()
    }


@pytest.fixture(params=["factors", "delta"])
def either(request, space, loras):
    names = [f"m{i:02d}" for i in range(12)]
    return space if request.param == "factors" else DeltaSpace.of(loras(12), names)


def test_a_member_is_held_whole_and_a_stranger_is_not(either):
    own = materialise(either, sample(either, [1])[0])
    found = encode(either, own, "own")
    assert found.captured > 0.999 and found.ignored == 0 and found.model.belongs(either) is found.model
    torch.testing.assert_close(found.model.coefficients[0], sample(either, [1])[0], atol=2e-3, rtol=1e-2)
    other = encode(either, stranger(own))
    assert other.captured < 0.5 and "is outside" in other.summary(either) and fraction_inside(either, own) > 0.99
    # by hand: 1 - |D - D'|^2 / |D|^2
    d, near = deltas(stranger(own)), deltas(materialise(either, other.model.coefficients[0]))
    missed = sum(float((d[p] - near[p]).square().sum()) for p in d) / sum(float(v.square().sum()) for v in d.values())
    assert abs(other.captured - max(0.0, 1 - missed)) < 1e-4


def test_a_member_by_name(either):
    found = member(either, "m07")
    assert torch.equal(found.model.coefficients[0], either.coefficients[7].float()) and found.captured is None
    assert "m07 1.00" in found.summary(either) and found.model.history == ({"encode": {"member": "m07"}},)
    with pytest.raises(VitrineError, match="names such as m07"):
        member(either, "m077")


def test_layers_that_a_delta_space_lacks_count_as_not_held(loras):
    made = loras(12)
    space = DeltaSpace.of(made, [f"m{i}" for i in range(12)])
    more = dict(made[3]) | {"another.to_q": LoraLayer(torch.ones(1, 4), torch.ones(4, 1), 1.0)}
    found = encode(space, more)
    assert (
        found.ignored == 1 and found.captured < encode(space, made[3]).captured and "1 layers" in found.summary(space)
    )
    with pytest.raises(VitrineError, match="base model"):
        encode(space, {"another.to_q": more["another.to_q"]})


def test_the_published_codes_model(space, tmp_path):
    folder = tmp_path / "official"
    folder.mkdir()
    official_files(space, folder)
    offset = torch.linspace(-1, 1, 20)
    torch.save(space.coefficients[:, :20] + offset, folder / "proj_1000pc.pt")
    theirs = torch.randn(1, 12)
    torch.save(theirs, folder / "w2wmodel.pt")
    target = import_official(folder, None).save(tmp_path / "o.w2w.safetensors")
    ours = official_model(folder / "w2wmodel.pt", load_space(target))
    wanted = space.decode(torch.nn.functional.pad(theirs, (0, space.dimension - 12)))
    torch.testing.assert_close(load_space(target).decode(ours.coefficients), wanted, atol=1e-4, rtol=1e-3)
    with pytest.raises(VitrineError, match="import-official"):
        official_model(folder / "w2wmodel.pt", space)
    with pytest.raises(VitrineError, match=r"w2wmodel\.pt"):
        official_model(folder / "w2wmodel.pt", import_official(folder, 5))
    assert main(["w2w", "export", str(target), str(folder / "w2wmodel.pt"), "--out", str(tmp_path / "m")]) == 0
    assert len(W2WModel.load(tmp_path / "m" / "w2wmodel.w2wmodel.safetensors")) == 1


# --- commands -------------------------------------------------------------------------------------------------------
@pytest.fixture
def people(tmp_path):
    """The shipped space, and a person of it as a LoRA file of other names."""
    space = load_space(PEOPLE_SPACE)
    lora = materialise(space, space.coefficients[5])
    return space, write_lora(tmp_path / "somebody.safetensors", lora, "diffusers")


def test_edit_and_export(people, tmp_path, capsys):
    space, path = people
    out, name = tmp_path / "models", str(PEOPLE_SPACE)
    encoded = encode(space, read_lora(path), "somebody")
    assert "the space captures 100.0%" in encoded.summary(space) and "person-0005 1.00" in encoded.summary(space)
    encoded.model.save(out / "somebody.w2wmodel.safetensors")
    somebody = str(out / "somebody.w2wmodel.safetensors")
    edit = ["w2w", "edit", name, somebody, "person-0007", "--out", str(out)]
    assert main([*edit, "--edits", "beard=2", "--protect", "glasses"]) == 0
    edited = W2WModel.load(out / "somebody-beard+2.w2wmodel.safetensors")
    assert edited.history[-1]["edit"] == {"beard": 2.0} and (out / "person-0007-beard+2.safetensors").is_file()
    assert main(edit) == 2 and "--edits" in capsys.readouterr().err
    slim = tmp_path / "slim"
    export = ["w2w", "export", name, somebody, "--save-dtype", "float16", "--rank", "1", "--out", str(slim)]
    assert main(export) == 0 and "keeps 100.0%" in capsys.readouterr().out
    found = read_lora(slim / "somebody.safetensors")
    assert same(deltas(found), deltas(materialise(space, W2WModel.load(somebody).coefficients[0])), 2e-3)
    stored = {v.dtype for k, v in load_file(slim / "somebody.safetensors").items() if not k.endswith(".alpha")}
    assert stored == {torch.float16}
    assert main(["w2w", "export", name, "person-1", "--dialect", "peft", "--out", str(slim)]) == 2


def test_sample_takes_every_setting(tmp_path, capsys):
    how = ["--components", "400", "--attributes", "joined", "--emphasis", "1.5", "--inherit", "0.4", "--spread", "0.9"]
    wanted = ["--wanted", "glasses=1", "--protect", "bald", "--edits", "beard=1"]
    assert main(["w2w", "sample", "--seeds", "7", *how, *wanted, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.w2wmodel.safetensors")
    history = W2WModel.load(path).history
    told = {"emphasis": 1.5, "inherit": 0.4, "spread": 0.9, "components": 400, "seeds": [7]}
    assert told.items() <= history[0]["sample"].items() and history[1:] == (
        {"conditioned": {"glasses": 1.0}},
        {"edit": {"beard": 1.0}},
    )
    assert (
        main(["w2w", "sample", "--inherit", "2", "--out", str(tmp_path)]) == 2 and "inherit" in capsys.readouterr().err
    )


def test_label_sets_how_a_space_is_drawn(space, tmp_path, capsys):
    path = space.save(tmp_path / "s.w2w.safetensors")
    assert main(["w2w", "label", str(path), "--sampling", "emphasis=1.5", "components=9", "attributes=joined"]) == 0
    found = load_space(path).info["sampling"]
    assert (found["emphasis"], found["components"], found["attributes"]) == (1.5, 9, "joined")
    assert main(["w2w", "label", str(path), "--sampling", "emphases=1"]) == 2
    assert main(["w2w", "label", str(path)]) == 2 and "--sampling" in capsys.readouterr().err


def test_invert(tmp_path, capsys):
    pixels = np.random.default_rng(0).integers(0, 255, (70, 90, 3), dtype=np.uint8)
    for name in ("a", "b"):
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    told = ["w2w", "invert", str(PEOPLE_SPACE), str(tmp_path / "a.png"), str(tmp_path / "b.png"), "--steps", "3"]
    assert main([*told, "--prompt", "a face", "--components", "20", "--out", str(tmp_path)]) == 0
    assert "held-out loss" in capsys.readouterr().out
    found = [W2WModel.load(tmp_path / f"{n}-inverted.w2wmodel.safetensors") for n in "ab"]
    assert len(found[0]) == 1 and found[0].coefficients.abs().max() > 0
    torch.testing.assert_close(found[0].coefficients, found[1].coefficients, atol=1e-3, rtol=1e-2)
    assert main([*told, "--preset", "paper", "--out", str(tmp_path)]) == 2


@pytest.mark.nightly
def test_invert_several_pictures_of_one_subject_with_masks(tmp_path, capsys):
    """A mask that hides one of two pictures' halves; together they give one model."""
    pixels = np.random.default_rng(0).integers(0, 255, (70, 90, 3), dtype=np.uint8)
    white, half = np.full((70, 90), 255, np.uint8), np.zeros((70, 90), np.uint8)
    half[:, :45] = 255
    for name, array in (("a", pixels), ("b", pixels[:, ::-1]), ("white", white), ("half", half)):
        Image.fromarray(np.ascontiguousarray(array)).save(tmp_path / f"{name}.png")
    usual = ["w2w", "invert", str(PEOPLE_SPACE), str(tmp_path / "a.png"), str(tmp_path / "b.png"), "--steps", "3"]
    usual += ["--components", "20", "--together"]
    rows = []
    for name, masks in (("plain", ()), ("white", ("white", "white")), ("half", ("white", "half"))):
        out, paths = tmp_path / name, [str(tmp_path / f"{m}.png") for m in masks]
        assert main([*usual, *(["--masks", *paths] if paths else []), "--out", str(out)]) == 0
        (file,) = out.glob("*.w2wmodel.safetensors")
        rows.append(W2WModel.load(file).coefficients)
    torch.testing.assert_close(rows[0], rows[1], atol=1e-4, rtol=1e-3)
    assert len(rows[0]) == 1 and not torch.allclose(rows[1], rows[2], atol=1e-3)
    assert main([*usual, "--masks", str(tmp_path / "half.png")]) == 2
    capsys.readouterr()


@pytest.mark.nightly
def test_an_interrupted_inversion_keeps_the_best(tmp_path, monkeypatch, capsys):
    from vitrine.engine.runtime import progress

    def stop(self, step, total, preview=None):
        if step == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(progress.TqdmProgress, "__call__", stop)
    Image.fromarray(np.full((64, 64, 3), 99, np.uint8)).save(tmp_path / "a.png")
    told = ["w2w", "invert", str(PEOPLE_SPACE), str(tmp_path / "a.png"), "--steps", "9", "--prompt", "a face"]
    assert main([*told, "--out", str(tmp_path)]) == 130
    history = W2WModel.load(tmp_path / "a-inverted.w2wmodel.safetensors").history
    assert history[0]["invert"] == {"steps": 2, "interrupted": True}
    monkeypatch.undo()
    assert main([*told, "--out", str(tmp_path)]) == 0 and main([*told, "--out", str(tmp_path / "whole")]) == 0
    on, whole = (W2WModel.load(d / "a-inverted.w2wmodel.safetensors") for d in (tmp_path, tmp_path / "whole"))
    assert torch.equal(on.coefficients, whole.coefficients) and on.history[0]["invert"] == {"steps": 9}
    assert not list(tmp_path.glob("**/.a-inverted.work"))
