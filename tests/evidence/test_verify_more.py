"""``vitrine verify`` of weights2weights and told sizes, on the shipped models in the role: killed, resumed, refused."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline
from vitrine.cli.main import main
from vitrine.engine.control import GammaConfig
from vitrine.engine.portraits import load_portraits
from vitrine.engine.portraits.shipped import FLOW_PEOPLE_SPACE, PEOPLE_SPACE
from vitrine.engine.runtime.progress import silent
from vitrine.evidence.control.controlled_transformer import ControlledTransformer
from vitrine.evidence.verify import sizes, w2w
from vitrine.evidence.verify.context import Asked, Context
from vitrine.evidence.verify.embedded import SETTINGS, WORLDS, context_of, write_data
from vitrine.evidence.verify.judge import face_descriptor, lpips_distance
from vitrine.evidence.verify.protocol import all_checks
from vitrine.evidence.verify.run import verify
from vitrine.evidence.verify.settings import FILE, InversionSettings, SizeSettings, VerifySettings
from vitrine_tests import models
from vitrine_tests.killed import killed, killing
from vitrine_tests.machine import stock


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    """The portraits world's data, with short inversions and samples."""
    folder = write_data("portraits", tmp_path_factory.mktemp("portraits") / "data")
    chosen = SETTINGS["portraits"].inversion
    invert = replace(chosen.invert, steps=40, check_every=10)
    settings = VerifySettings(inversion=replace(chosen, invert=invert, pictures=2, steps=8))
    (folder / FILE).write_text(json.dumps(settings.to_dict()))
    return folder


@pytest.fixture(scope="module")
def hurried(people, tmp_path_factory):
    """The same with as little to do as possible."""
    folder = tmp_path_factory.mktemp("hurried") / "data"
    shutil.copytree(people, folder)
    chosen = SETTINGS["portraits"].inversion
    invert = replace(chosen.invert, steps=8, check_every=4, batch=1)
    settings = VerifySettings(inversion=replace(chosen, invert=invert, pictures=1, steps=2))
    (folder / FILE).write_text(json.dumps(settings.to_dict()))
    return folder


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """The sized world's data, with few steps."""
    folder = write_data("sized", tmp_path_factory.mktemp("sized") / "data")
    settings = VerifySettings(sizes=SizeSettings((16, 64, 256), steps=6, guidance=2.0))
    (folder / FILE).write_text(json.dumps(settings.to_dict()))
    return folder


def figures_of(out, claim):
    """A claim of verify.json, and its figures by key."""
    told = json.loads((out / "verify.json").read_text())
    (row,) = (c for c in told["claims"] if c["claim"] == claim)
    return row, {f["key"]: f for f in row["figures"]}


def scripted(path, function):
    """A TorchScript file."""
    torch.jit.script(function).save(str(path))
    return path


class Faces(torch.nn.Module):
    """Coarse colours in the role of a face recogniser."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.adaptive_avg_pool2d(x, 4).flatten(1)


class Away(torch.nn.Module):
    """A mean difference in the role of LPIPS, in its shape (n, 1, 1, 1)."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a - b).abs().mean((1, 2, 3), keepdim=True)


def stopping(label, step):
    """Bars of which one kills the process."""
    return lambda name: killing(lambda done, total: name == label and done >= step)


def resumed(job, label, step):
    """A run in one go, and one that is killed at a step and goes on: what the latter's bars then showed."""
    seen = []

    def watching(name):
        return lambda done, total, preview=None: seen.append((name, done))

    assert job("whole", lambda name: silent)() == 0
    killed(job("stopped", stopping(label, step)))
    assert job("stopped", watching)() == 0
    return seen


# --- weights2weights --------------------------------------------------------------------------------------------------
@pytest.mark.nightly
def test_models_from_photos_end_to_end(people, tmp_path, capsys):
    out = tmp_path / "out"
    command = ["verify", "--model", "portraits", "--data", str(people), "--subset", "3", "--claim", "w2w.inversion"]
    assert main([*command, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.index("about") < printed.index("measured"), "the plan comes first"
    row, figures = figures_of(out, "w2w.inversion")
    own, stranger, mean = (figures[f"w2w.readout.{k}"]["measured"] for k in ("identity", "stranger", "mean"))
    assert own["n"] == 3 and own["value"] > stranger["value"] and own["value"] > mean["value"]
    assert figures["w2w.readout.gain"]["measured"]["value"] == pytest.approx(own["value"] - mean["value"], abs=2e-4)
    for key, value in (("identity", 0.64), ("identity.again", 0.557)):
        beside = figures[f"w2w.face.{key}"]
        assert beside["published"]["value"] == value and beside["measured"] is None
        assert beside["why not"] == "needs --face"
    differs = " ".join(row["differs"])
    assert all(
        words in differs for words in ("role", "float32", "3 of 16 photos", "a space of 400 components", "prompt")
    )
    assert {"people.w2w.safetensors", "faces"} <= set(row["data"])


def test_a_face_recogniser_stands_beside_the_published_identity(hurried, tmp_path):
    face = scripted(tmp_path / "face.pt", Faces())
    asked = Asked("portraits", hurried, subset=2, out=tmp_path / "out", face=face)
    assert verify(asked, ["w2w.inversion"], bar=lambda name: silent) == 0
    _, figures = figures_of(asked.out, "w2w.inversion")
    for key in ("identity", "identity.again"):
        assert figures[f"w2w.face.{key}"]["published"] and -1 <= figures[f"w2w.face.{key}"]["measured"]["value"] <= 1
    assert figures["w2w.face.lora"]["why not"] == "no LoRA is trained here"
    picture = torch.rand(2, 3, 64, 64)
    assert face_descriptor(face)(picture).shape == (2, 48)
    assert float(face_descriptor(face)(torch.ones(1, 3, 8, 8)).mean()) == pytest.approx(127.5 / 128)


@pytest.mark.nightly
def test_killed_inversions_and_pictures_go_on(hurried, tmp_path):
    def job(out, bar):
        return lambda: verify(Asked("portraits", hurried, subset=2, out=tmp_path / out), ["w2w.inversion"], bar=bar)

    seen = resumed(job, "pictures", 1)
    assert [done for name, done in seen if name == "pictures"] == [1, 2, 3]
    killed(job("early", stopping("inversions", 1)))
    assert job("early", lambda name: silent)() == 0
    whole = (tmp_path / "whole/verify.json").read_bytes()
    assert (tmp_path / "stopped/verify.json").read_bytes() == whole == (tmp_path / "early/verify.json").read_bytes()


def test_a_space_of_another_base_is_not_for_this_model(people, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    shutil.copy(FLOW_PEOPLE_SPACE, data)
    context = Context(Asked(str(WORLDS["portraits"]), data, out=tmp_path / "out"))
    assert "a space of another base" in w2w.fits(context)
    shutil.copy(PEOPLE_SPACE, data / "a.w2w.safetensors")  # the first by name
    assert w2w.fits(context) == ""
    (data / "a.w2w.safetensors").unlink()
    asked = Asked(str(WORLDS["portraits"]), data, out=tmp_path / "none")
    assert verify(asked, ["w2w.inversion"], dry=True, bar=lambda name: silent) == 0
    row, _ = figures_of(asked.out, "w2w.inversion")
    assert row["status"].startswith("not for this model: flow-people.w2w.safetensors is a space of another base")


# --- told sizes -------------------------------------------------------------------------------------------------------
@pytest.mark.nightly
def test_told_sizes_end_to_end(told, tmp_path):
    out, lpips = tmp_path / "out", scripted(tmp_path / "lpips.pt", Away())
    command = ["verify", "--model", "sized", "--data", str(told), "--subset", "4", "--lpips", str(lpips)]
    assert main([*command, "--out", str(out)]) == 0
    row, figures = figures_of(out, "control.sizes")
    for key in ("lpips", "readout", "pixels", "coarse"):
        constant, weighted, share, noise = (
            figures[f"sizes.{key}.{arm}"]["measured"]["value"] for arm in ("constant", "weighted", "share", "noise")
        )
        assert 0 < weighted < constant and noise > 0 and share == pytest.approx(weighted / constant, rel=0.02)
    beside = {arm: figures[f"sizes.lpips.{arm}"]["published"]["value"] for arm in ("constant", "weighted")}
    assert beside == {"constant": 0.33, "weighted": 0.04}
    assert 0 < figures["sizes.detail.constant"]["measured"]["value"] < 1, "told 16 px it draws less detail"
    assert "training-free" in " ".join(row["differs"]) and "4 of 40 prompts" in " ".join(row["differs"])
    others = {c["claim"]: c["status"] for c in json.loads((out / "verify.json").read_text())["claims"]}
    assert all("not for this model" in s for claim, s in others.items() if claim != "control.sizes")
    plan = json.loads((out / "plan.json").read_text())
    (estimate,) = (c["estimate"] for c in plan["claims"] if c["claim"] == "control.sizes")
    assert estimate["seconds"] > 0 and estimate["bytes"] > 0 and estimate["rows"] == 4 * 2 * 4 * (2 * 6 + 3)
    assert lpips_distance(lpips)(torch.zeros(2, 3, 8, 8), torch.ones(2, 3, 8, 8)).tolist() == [2.0, 2.0]


@pytest.mark.nightly
def test_killed_sizes_go_on(told, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(told, data)
    (data / FILE).write_text(json.dumps({"sizes": SizeSettings((16, 64), steps=2).to_dict()}))

    def job(out, bar):
        return lambda: verify(Asked("sized", data, subset=2, out=tmp_path / out), ["control.sizes"], bar=bar)

    seen = resumed(job, "sizes, weighted", 1)
    assert [done for name, done in seen if name == "sizes, weighted"] == [1, 2]
    assert (tmp_path / "stopped/verify.json").read_bytes() == (tmp_path / "whole/verify.json").read_bytes()


def test_the_stand_in_draws_as_its_own_world_does(told, tmp_path):
    """At a constant weight, and told its own size at any: the same pictures as the claims of control.* draw."""
    context = context_of(Asked(str(WORLDS["sized"]), told, out=tmp_path, world="sized"))
    plain = ControlledTransformer.open("constant")
    prompts, controls = ["a smiling face"] * 2, {"height": 16.0, "width": 16.0}
    told_16 = sizes.drawn(context, prompts[0], [16, 16], [3, 4], GammaConfig("constant"))
    assert (told_16 - plain.draw(prompts, [3, 4], controls, steps=6)).abs().max() < 1e-4
    told_own = sizes.drawn(context, prompts[0], [64, 64], [3, 4], GammaConfig())
    assert (told_own - plain.draw(prompts, [3, 4], steps=6)).abs().max() < 1e-4


def sdxl_folder(folder, numbers=6):
    """A small SDXL with real text encoders, as a pipeline folder; with ``numbers`` other than six, as its refiner."""
    tokenizer = load_portraits().tokenizer
    ids = {"vocab_size": len(tokenizer), "max_position_embeddings": 24, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    unet = models.unet_xl(
        sample_size=8, cross_attention_dim=2 * models.TEXT, addition_time_embed_dim=32,
        projection_class_embeddings_input_dim=models.POOLED + 32 * numbers,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in unet.add_embedding.parameters():
            parameter.mul_(6)
    pipe = StableDiffusionXLPipeline(
        models.vae(), models.text_encoder(**ids), models.text_encoder(projected=True, **ids), tokenizer, tokenizer,
        unet, EulerDiscreteScheduler(), add_watermarker=False,
    )  # fmt: skip
    pipe.save_pretrained(str(folder), safe_serialization=True)
    return folder


def test_a_small_sdxl_is_measured_without_training(told, tmp_path):
    model, data = sdxl_folder(tmp_path / "xl"), tmp_path / "data"
    shutil.copytree(told, data)
    settings = VerifySettings(sizes=SizeSettings((16, 64), steps=3))
    (data / FILE).write_text(json.dumps(settings.to_dict()))
    asked = Asked(str(model), data, subset=2, out=tmp_path / "out")
    assert verify(asked, ["control.sizes"], bar=lambda name: silent) == 0
    _, figures = figures_of(asked.out, "control.sizes")
    constant, weighted = (figures[f"sizes.pixels.{arm}"]["measured"]["value"] for arm in ("constant", "weighted"))
    assert 0 < weighted < constant and figures["sizes.lpips.weighted"]["why not"] == "needs --lpips"
    context = Context(replace(asked, world=""))
    mine = sizes.drawn(context, "a face", [16], [0], GammaConfig("constant"))
    plain = StableDiffusionXLPipeline(**context.pipe.components)
    call = {"generator": torch.Generator().manual_seed(0), "num_inference_steps": 3, "guidance_scale": 5.0}
    theirs = plain("a face", original_size=(16, 16), output_type="pt", **call).images
    assert (mine - theirs).abs().max() < 1e-4, "a constant weight is the stock model"


@pytest.mark.parametrize("conditions", [True, False])
def test_pixart_is_measured_where_it_has_sizes(told, tmp_path, conditions):
    model, data = tmp_path / "pixart", tmp_path / "data"
    stock.pixart(conditions).save_pretrained(str(model), safe_serialization=True)
    shutil.copytree(told, data)
    (data / FILE).write_text(json.dumps({"sizes": SizeSettings((16, 64), steps=2).to_dict()}))
    asked = Asked(str(model), data, subset=2, out=tmp_path / "out")
    assert verify(asked, ["control.sizes"], bar=lambda name: silent) == (0 if conditions else 1)
    row, figures = figures_of(asked.out, "control.sizes")
    if conditions:
        assert figures["sizes.pixels.constant"]["measured"]["value"] > 0
    else:
        assert row["status"] == "not for this model: this PixArt was trained without size conditions"


def test_models_that_are_told_no_sizes_are_refused(told, tmp_path):
    refiner = Context(Asked(str(sdxl_folder(tmp_path / "refiner", numbers=5)), told, out=tmp_path / "out"))
    assert "takes 5 numbers" in sizes.fits(refiner)


def test_new_published_figures():
    checks = all_checks()
    values = {p.key: (p.value, p.spread) for c in checks.values() for p in c.published}
    assert values["w2w.face.identity"] == (0.64, 0.01) and values["w2w.face.identity.again"] == (0.557, 0.017)
    assert values["sizes.lpips.constant"][0] == 0.33 and values["sizes.lpips.weighted"][0] == 0.04
    default = VerifySettings().inversion
    assert (default.invert.components, default.invert.steps, default.invert.posterior) == (10_000, 400, "sample")
    assert InversionSettings.from_dict(default.to_dict()) == default
