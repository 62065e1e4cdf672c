"""``vitrine verify`` of weights2weights, on the shipped people in the role: killed, resumed, refused."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from vitrine.cli.main import main
from vitrine.engine.portraits.shipped import FLOW_PEOPLE_SPACE, PEOPLE_SPACE
from vitrine.engine.runtime.progress import silent
from vitrine.evidence.verify import w2w
from vitrine.evidence.verify.context import Asked, Context
from vitrine.evidence.verify.embedded import SETTINGS, WORLDS, write_data
from vitrine.evidence.verify.judge import face_descriptor
from vitrine.evidence.verify.protocol import all_checks
from vitrine.evidence.verify.run import verify
from vitrine.evidence.verify.settings import FILE, InversionSettings, VerifySettings
from vitrine_tests.killed import killed, killing


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
    assert printed.index("    about ") < printed.index(": measured "), "the plan comes first"
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


@pytest.mark.nightly
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


def test_new_published_figures():
    checks = all_checks()
    values = {p.key: (p.value, p.spread) for c in checks.values() for p in c.published}
    assert values["w2w.face.identity"] == (0.64, 0.01) and values["w2w.face.identity.again"] == (0.557, 0.017)
    default = VerifySettings().inversion
    assert (default.invert.components, default.invert.steps, default.invert.posterior) == (10_000, 400, "sample")
    assert InversionSettings.from_dict(default.to_dict()) == default
