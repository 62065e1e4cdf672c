"""Faces put together from layers: labels, parts and keypoints are exact, and the portraits' recipe trains on them."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from vitrine.cli.main import main as cli
from vitrine.engine.errors import VitrineError
from vitrine.engine.portraits.captions import MAX_TOKENS
from vitrine.engine.portraits.models import load_portraits
from vitrine.evidence.control.claims import _Counts
from vitrine.evidence.nemo.probed_model import SampleBudget
from vitrine.evidence.portraits.avataaars import LAYERS, avataaars, open_model
from vitrine.evidence.portraits.sampling import sample_latents
from vitrine.evidence.recipes.commands import main as recipe
from vitrine.evidence.registry import all_claims

SHIPPED = Path(__file__).parents[1] / "data" / "avataaars"
SIDE, BODY = 128, slice(44, 84)
PALETTES = {
    "skin": {"pale": "ffdbb4", "brown": "d08b5b"},
    "hair": {"raven": "2c1b18", "ginger": "c93305"},
    "clothes": {"coal": "262e33", "azure": "5199e4"},
    "background": {"sky": "65c9ff", "lemon": "ffffb1", "ash": "e6e6e6"},
}
# part -> value -> (rows, columns, kinds of its colours)
DRAWN = {
    "skin": {"skin": (slice(30, 128), BODY, ("skin",))},
    "clothing": {
        "hoodie": (slice(95, 128), slice(20, 108), ("clothes",)),
        "graphicShirt:bat": (slice(100, 128), slice(20, 108), ("clothes",)),
        "graphicShirt:bear": (slice(98, 128), slice(20, 108), ("clothes",)),
    },
    "mouth": {"smile": (slice(69, 74), slice(56, 72), ()), "sad": (slice(70, 78), slice(60, 68), ())},
    "nose": {"default": (slice(60, 63), slice(62, 66), ())},
    "eyes": {"default": (slice(52, 58), slice(50, 78), ()), "wink": (slice(54, 56), slice(50, 78), ())},
    "eyebrows": {"flat": (slice(46, 48), slice(50, 78), ()), "angry": (slice(47, 49), slice(50, 78), ())},
    "top": {
        "bob": (slice(20, 66), slice(34, 46), ("hair",)),
        "winterHat02": (slice(16, 40), slice(40, 88), ("clothes",)),
    },
    "facialHair": {"beardLight": (slice(76, 88), slice(46, 82), ("hair",))},
    "accessories": {"round": (slice(50, 60), slice(48, 80), ())},
}


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    """A file like that of ``draw_layers.mjs``, written as it writes it, of boxes instead of drawings."""
    pixels, table = [], []
    for part, values in DRAWN.items():
        for value, (rows, columns, kinds) in values.items():
            for word in PALETTES[kinds[0]] if kinds else [None]:
                rgb = bytes.fromhex(PALETTES[kinds[0]][word]) if word else bytes([20, 20, 20])
                layer = np.zeros((SIDE, SIDE, 4), np.uint8)
                faint = 40 if part == "nose" else 255
                layer[rows, columns] = [*(c * faint // 255 for c in rgb), faint]
                pixels.append(layer)
                table.append({"part": part, "value": value, "colours": {kinds[0]: word} if word else {}})
    data = np.stack(pixels).tobytes()
    own = {"kind": "avataaars layers", "version": 1, "order": list(DRAWN), "palettes": PALETTES, "layers": table}
    entry = {"dtype": "U8", "shape": [len(pixels), SIDE, SIDE, 4], "data_offsets": [0, len(data)]}
    header = json.dumps({"__metadata__": {"vitrine": json.dumps(own)}, "layers": entry}).encode()
    path = tmp_path_factory.mktemp("drawn") / LAYERS
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def unmoved(scenes):
    return scenes.with_pose(shift_x=0, shift_y=0, scale=1, tilt=0)


def test_pictures_show_their_labels(layers):
    faces = avataaars(layers)
    plain = unmoved(faces.sample_scenes([3])).with_attributes(
        background="lemon", skin="pale", top="none", accessories="none", facial_hair="none", clothing="hoodie"
    )
    drawn = faces.render(plain, SIDE)
    assert drawn.images.shape == (1, 3, SIDE, SIDE)
    assert torch.allclose(drawn.images[0, :, 2, 2], torch.tensor([255, 255, 177]) / 255, atol=1e-3)
    assert torch.allclose(drawn.images[0, :, 40, 64], torch.tensor([255, 219, 180]) / 255, atol=1e-3)
    assert faces.parts[0] == "background" and drawn.parts[0, 2, 2] == 0
    assert "nose" not in faces.parts, "it covers nothing, so no pixel is its own"
    for value, (rows, columns, kinds) in DRAWN["top"].items():
        word = "ginger" if kinds == ("hair",) else "azure"
        worn = faces.render(plain.with_attributes(top=value, hair_color="ginger", clothes_color="azure"), SIDE)
        rgb = torch.tensor(list(bytes.fromhex(PALETTES[kinds[0]][word]))) / 255
        changed = (worn.images - drawn.images).abs().amax((0, 1)) > 1e-3
        box = torch.zeros(SIDE, SIDE, dtype=torch.bool)
        box[rows, columns] = True
        assert not (changed & ~box)[:95].any()  # the clothes changed their colour
        assert torch.equal(worn.parts[0] == faces.parts.index("top"), box)
        assert torch.allclose(worn.images[0, :, rows.start + 4, columns.start + 4], rgb, atol=1e-3)


def test_keypoints_follow_the_pose_and_are_hidden_by_hair(layers):
    faces = avataaars(layers)
    scene = faces.sample_scenes([1]).with_attributes(top="none")
    still = faces.render(unmoved(scene)).keypoints[0]
    moved = faces.render(unmoved(scene).with_pose(shift_x=0.25)).keypoints[0]
    assert not still.isnan().any() and torch.allclose(moved - still, torch.tensor([0.125, 0.0]).expand(7, 2), atol=1e-5)
    turned = faces.render(unmoved(scene).with_pose(tilt=0.3)).keypoints[0]
    middle = torch.tensor([0.5, 0.5])
    assert torch.allclose((turned - middle).norm(dim=1), (still - middle).norm(dim=1), atol=1e-5)
    covered = faces.render(unmoved(scene).with_attributes(top="bob")).keypoints[0]
    assert faces.keypoints[5] == "left_ear" and covered[5].isnan().all() and covered.isnan().sum() == 2
    # the eyes of a picture are where the layer of eyes is
    eyes = faces.render(unmoved(scene).with_attributes(accessories="none"), SIDE)
    x, y = (eyes.keypoints[0, 0] * SIDE).long()
    assert eyes.parts[0, y, x] == faces.parts.index("eyes")


def test_captions_name_what_is_seen(layers):
    faces = avataaars(layers)
    scene = faces.sample_scenes([0]).with_attributes(
        mouth="smile",
        skin="brown",
        top="winterHat02",
        facial_hair="none",
        hair_color="ginger",
        accessories="round",
        clothing="hoodie",
        clothes_color="azure",
        background="sky",
    )
    assert faces.caption(scene) == ["a smile brown face with winterhattwo round azure hoodie on sky"]
    assert "ginger hair beardlight" in faces.caption(scene.with_attributes(facial_hair="beardLight"))[0]
    assert "with bald head round" in faces.caption(scene.with_attributes(top="none"))[0]
    silent = faces.caption(scene, np.ones((1, len(faces.optional)), bool))
    assert silent == ["a face with winterhattwo round"]
    shown = faces.shown(torch.from_numpy(scene.attributes))[0]
    assert dict(zip(faces.attributes, shown.tolist(), strict=True))["hair_color"] is False and shown.sum() == 8
    words = {w for c in faces.caption(faces.sample_scenes(range(200))) for w in c.split()}
    assert words <= set(faces.vocabulary)


def test_a_scene_depends_on_its_two_seeds_only(layers):
    faces = avataaars(layers)
    one, many = faces.sample_scenes([5], [9]), faces.sample_scenes([4, 5, 6], [8, 9, 10])
    assert np.array_equal(one.attributes[0], many.attributes[1]) and np.array_equal(one.pose[0], many.pose[1])
    same = faces.sample_scenes([5] * 40, range(40))
    for name in faces.identity:
        assert len(set(same.column(name))) == 1
    assert len(set(same.column("background"))) == 3 and len(set(same.geometry[:, 0])) == 1
    assert torch.equal(faces.render(many).images[1], faces.render(one).images[0])


def test_memorized_pictures_are_as_many_as_of_the_portraits(layers):
    memorized = avataaars(layers).plants()
    assert [p.kind for p in memorized] == ["verbatim"] * 8 + ["template"] * 4
    assert all(len(p.scenes) == (1 if p.kind == "verbatim" else 12) for p in memorized)  # 3 x 2 x 2 colours here
    assert all(c.endswith(p.name) for p in memorized for c in p.captions)


def test_files_of_another_kind_are_refused(layers, tmp_path):
    (tmp_path / LAYERS).write_bytes(layers.read_bytes()[:200])
    with pytest.raises(VitrineError, match="whole"):
        avataaars(tmp_path / LAYERS)
    for name, claim in all_claims().items():
        if name.endswith(".avataaars"):
            with pytest.raises(VitrineError, match="recipes avataaars"):
                claim.measure()


FLAGS = ["--pictures", "48", "--readout-steps", "2", "--vae-steps", "2", "--unet-steps", "2"]
FLAGS += ["--readout-batch", "8", "--vae-batch", "2", "--unet-batch", "8"]


@pytest.fixture(scope="module")
def finished(layers, tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    assert recipe(["avataaars", str(layers), "--out", str(out), *FLAGS]) == 0
    return out / "avataaars"


@pytest.fixture(scope="module")
def with_everything(finished):
    """With the transformers and students that claims need, by the commands that the claims' errors name."""
    for weight in ("power-cosine", "constant"):
        own = ["--model", str(finished), "--out", str(finished / "transformer"), "--weight", weight]
        assert recipe(["sizes", *own, "--pictures", "64", "--steps", "2", "--batch", "4"]) == 0
    assert recipe(["identity", str(finished), "--people", "40"]) == 0
    # of twelve, some of the last three lack each attribute
    people = ["--model", str(finished), "--people", "12", "--out", str(finished / "people"), "--workers", "1"]
    assert cli(["w2w", "train-loras", *people]) == 0
    for _ in "twice":  # finished parts are not trained again
        assert recipe(["students", "--model", str(finished), "--share", "0.001"]) == 0
    return finished


@pytest.mark.nightly
def test_the_recipe_trains_on_them(finished, layers):
    model = open_model(finished)
    assert model.dataset.name == "avataaars" and open_model().dataset.name == "portraits"
    prompts = model.dataset.caption(model.dataset.sample_scenes(range(50)))
    ids = model.tokenizer(prompts + [p.captions[0] for p in model.dataset.plants()]).input_ids
    assert max(map(len, ids)) <= MAX_TOKENS
    words = [len(text.split()) + 2 for text in prompts]
    assert [len(row) for row in ids[:50]] == words  # every word is one token
    assert model.encode(["a smile face"]).shape == (1, 24, 64)


@pytest.mark.nightly
def test_a_model_without_its_drawings_is_not_taken_for_the_portraits(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "model")
    (folder / LAYERS).unlink()
    for without in (folder, SHIPPED):
        with pytest.raises(VitrineError, match="make the layers"):
            open_model(without)


def test_the_model_in_the_repository_knows_these_faces():
    model = load_portraits(SHIPPED)
    assert {"bob</w>", "hoodie</w>"} <= set(model.tokenizer.get_vocab())
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) < 12e6
    latents = sample_latents(model, ["a smile pale face with bob ginger hair navy hoodie on sky"], [0], steps=2)
    assert torch.isfinite(latents).all()


@pytest.mark.nightly
def test_other_drawings_do_not_resume_a_run(finished, layers, tmp_path, capsys):
    other = tmp_path / LAYERS
    data = bytearray(layers.read_bytes())
    data[-70_000] ^= 255
    other.write_bytes(data)
    assert recipe(["avataaars", str(other), "--out", str(finished.parent), *FLAGS]) != 0
    assert "other pictures" in capsys.readouterr().err


@pytest.fixture
def tiny(monkeypatch):
    """Fewer pictures yet than quick ones: an untrained model has nothing to measure."""
    monkeypatch.setattr("vitrine.evidence.nemo.probed_model.QUICK", SampleBudget(8, 6, 1, 2, 6, 8, 2))
    monkeypatch.setattr("vitrine.evidence.control.claims.QUICK", _Counts(2, 12, 4))
    monkeypatch.setattr("vitrine.evidence.emd.student_claims.QUICK_SAMPLES", 12)
    monkeypatch.setattr("vitrine.evidence.portraits.claims.QUICK", {"samples": 8, "renders": 32})


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in all_claims() if "avataaars" in name])
def test_claims_run_end_to_end(name, with_everything, tiny):
    result = all_claims()[name].measure(avataaars=str(with_everything), quick=True)
    assert result.verdict in {"pass", "partly", "fail"} and result.n
    assert np.isfinite(result.value)
