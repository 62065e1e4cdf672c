"""``vitrine taps spair`` on a tiny folder in SPair-71k's layout, against the same arithmetic by hand.

On Stable Diffusion's shape and on Flux's: the shipped models.
"""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from vitrine.cli.main import main
from vitrine.engine.activations.spair_dataset import SPairScore
from vitrine.engine.pipelines import ActivationTapPipeline, CorrespondencePipeline
from vitrine.engine.portraits import load_portraits, render, sample_scenes
from vitrine.engine.portraits.flow import FLOW_WEIGHTS, load_flow_portraits

PLACES = "up-level0-repeat0-res-increment up-level0-repeat0-vit-block0-cross-q"
SIZES = [(64, 64), (96, 128), (128, 80), (64, 96)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two categories of two and one pairs; pictures of several sizes, keypoints in their own pixels."""
    root = tmp_path_factory.mktemp("spair")
    drawn = render(sample_scenes(range(7_200_000, 7_200_004)))
    for name in ("face", "head"):
        (root / "JPEGImages" / name).mkdir(parents=True)
    (root / "PairAnnotation" / "test").mkdir(parents=True)
    for i, size in enumerate(SIZES):
        picture = Image.fromarray((drawn.images[i] * 255).round().byte().permute(1, 2, 0).numpy())
        for name in ("face", "head"):
            picture.resize(size).save(root / "JPEGImages" / name / f"{i}.jpg", quality=95)
    for n, (category, i, j) in enumerate([("face", 0, 1), ("face", 2, 1), ("head", 3, 0)]):
        seen = ~torch.isnan(drawn.keypoints[[i, j]]).any(0).any(1)
        points = [(drawn.keypoints[k][seen] * torch.tensor(SIZES[k])).round().int().tolist() for k in (i, j)]
        told = {
            "category": category, "src_imname": f"{i}.jpg", "trg_imname": f"{j}.jpg", "src_kps": points[0],
            "trg_kps": points[1], "src_imsize": [*SIZES[i], 3], "trg_imsize": [*SIZES[j], 3],
            "src_bndbox": [4, 4, SIZES[i][0] - 4, SIZES[i][1] - 4],
            "trg_bndbox": [8, 8, SIZES[j][0] // 2, SIZES[j][1] - 8],
        }  # fmt: skip
        (root / "PairAnnotation" / "test" / f"{n:06d}.json").write_text(json.dumps(told))
    return root


def whole(folder, category, name, **settings):
    """Unit features of a whole picture, squeezed to the model's size, on 128 x 128."""
    pipe = ActivationTapPipeline.from_pipe(load_portraits().pipeline())
    picture = Image.open(folder / "JPEGImages" / category / name)
    settings = {"size": 64, "output_type": "none"} | settings
    taps = pipe(picture, f"a photo of a {category}", PLACES.split(), **settings).activations
    if settings.get("protocol") == "gdf":
        maps = [F.interpolate(v.tensor, (128, 128), mode="bilinear") for v in taps.values()]
        return F.normalize(torch.cat(maps, 1), dim=1)
    maps = [F.normalize(v.tensor, dim=1) for v in taps.values()]
    side = max(m.shape[-1] for m in maps)
    joined = torch.cat([F.interpolate(m, (side, side), mode="bilinear") for m in maps], 1)
    return F.normalize(F.interpolate(F.normalize(joined, dim=1), (128, 128), mode="bilinear"), dim=1)


def wide(folder, category, name):
    """DiTF's features on the flow model: the longer side 128, the other a multiple of 16, one massive channel off."""
    pipe = ActivationTapPipeline.from_pipe(load_flow_portraits(FLOW_WEIGHTS).pipeline())
    picture = Image.open(folder / "JPEGImages" / category / name).convert("RGB")
    sides = [16 * round(8 * side / max(picture.size)) for side in picture.size[::-1]]
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None] / 127.5 - 1
    pixels = F.interpolate(pixels, sides, mode="bicubic", antialias=True).clamp(-1, 1)
    (tap,) = pipe(
        pixels, f"a photo of a {category}", "vit-block3-in", modulate=True, discard=(5,), value_range=(-1, 1),
        output_type="none",
    ).activations.values()  # fmt: skip
    assert tap.grid == (sides[0] // 16, sides[1] // 16)
    return F.normalize(F.interpolate(F.normalize(tap.tensor, dim=1), (128, 128), mode="bilinear"), dim=1)


def by_hand(folder, alpha, features=whole):
    """The four totals for boxes, by nearest features."""
    hits = {}
    for file in sorted((folder / "PairAnnotation" / "test").glob("*.json")):
        t = json.loads(file.read_text())
        source, target = (features(folder, t["category"], t[f"{end}_imname"]) for end in ("src", "trg"))
        grid = torch.tensor(t["src_kps"]) / torch.tensor(t["src_imsize"][:2]) * 2 - 1
        query = F.normalize(F.grid_sample(source, grid[None, None], align_corners=False)[0, :, 0].T, dim=1)
        best = (query @ target[0].flatten(1)).argmax(1)
        found = torch.stack([best % 128 + 0.5, best // 128 + 0.5], 1) / 128 * torch.tensor(t["trg_imsize"][:2])
        left, top, right, bottom = t["trg_bndbox"]
        near = (found - torch.tensor(t["trg_kps"])).norm(dim=1) <= alpha * max(right - left, bottom - top)
        hits.setdefault(t["category"], []).append(near.float().numpy())
    pairs = [p for group in hits.values() for p in group]
    return {
        "per point, all": np.concatenate(pairs).mean(),
        "per point, mean of categories": np.mean([np.concatenate(g).mean() for g in hits.values()]),
        "per picture, all": np.mean([p.mean() for p in pairs]),
        "per picture, mean of categories": np.mean([np.mean([p.mean() for p in g]) for g in hits.values()]),
    }


@pytest.mark.nightly
def test_the_command_prints_the_published_arithmetic(folder, tmp_path, capsys):
    out, cache = tmp_path / "figures.json", tmp_path / "cache"
    command = ["taps", "spair", str(folder), "--addresses", PLACES, "--cache", str(cache), "--out", str(out)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "PCK@0.1 bbox: per point, all" in printed and "  face: img" in printed
    figures = json.loads(out.read_text())
    assert figures["pairs"] == 3
    for alpha in (0.05, 0.1):
        expected = by_hand(folder, alpha)
        ours = figures["totals"][f"PCK@{alpha} bbox"]
        assert set(ours) == set(expected)
        assert all(abs(ours[name] - value) < 1e-6 for name, value in expected.items()), alpha
    # again: nothing is tapped anew
    written = {p.name: p.stat().st_mtime_ns for p in cache.glob("shard-*")}
    assert main(command) == 0 and json.loads(out.read_text()) == figures
    assert {p.name: p.stat().st_mtime_ns for p in cache.glob("shard-*")} == written
    assert main([*command, "--category", "head", "--pairs", "1"]) == 0
    assert json.loads(out.read_text())["pairs"] == 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "features"),
    [
        ((), None),
        (("--size", "128", "--keep-aspect", "--modulate", "--discard", "5"), wide),
    ],
)
def test_a_flux_pipeline_is_scored_too(folder, tmp_path, options, features):
    out = tmp_path / "figures.json"
    command = ["taps", "spair", str(folder), "--model", str(FLOW_WEIGHTS), "--addresses", "vit-block3-in", "--out"]
    assert main([*command, str(out), *options]) == 0
    figures = json.loads(out.read_text())
    assert figures["pairs"] == 3
    if features is not None:
        ours = figures["totals"]["PCK@0.1 bbox"]
        assert all(abs(ours[name] - value) < 1e-6 for name, value in by_hand(folder, 0.1, features).items())


def test_the_size_of_a_flux_pipeline_is_its_own():
    assert ActivationTapPipeline.from_pipe(load_flow_portraits(FLOW_WEIGHTS).pipeline()).own_size() == 128


def test_under_gdfs_protocol_every_picture_is_a_batch_of_its_own(folder, tmp_path):
    out, cache = tmp_path / "figures.json", tmp_path / "cache"
    command = ["taps", "spair", str(folder), "--addresses", PLACES, "--protocol", "gdf", "--cache", str(cache)]
    assert main([*command, "--out", str(out)]) == 0
    expected = by_hand(folder, 0.1, lambda *picture: whole(*picture, protocol="gdf"))
    ours = json.loads(out.read_text())["totals"]["PCK@0.1 bbox"]
    assert all(abs(ours[name] - value) < 1e-6 for name, value in expected.items())
    written = {p.name: p.stat().st_mtime_ns for p in cache.glob("shard-*")}
    assert written and main([*command, "--out", str(out)]) == 0
    assert {p.name: p.stat().st_mtime_ns for p in cache.glob("shard-*")} == written


def test_gdfs_protocol_squeezes_to_squares(folder, capsys):
    assert main(["taps", "spair", str(folder), "--addresses", PLACES, "--protocol", "gdf", "--keep-aspect"]) == 2
    assert "squares" in capsys.readouterr().err


def test_points_and_pictures_pooled_and_by_category():
    """Two categories, one with a pair of one point that is right, one with two pairs of which half is."""
    each = torch.tensor([1.0, 0.0, 0.5])
    score = SPairScore(0.5, 0.5, each, each, {"a": (1.0, 1.0), "b": (0.4, 0.4)}, ("a", "b", "b"))
    assert score.totals(True) == {
        "per point, all": 0.5, "per point, mean of categories": 0.7, "per picture, all": 0.5,
        "per picture, mean of categories": 0.625,
    }  # fmt: skip


def test_pictures_are_squeezed_to_what_a_transformer_was_trained_on():
    pipe = CorrespondencePipeline.from_pipe(load_flow_portraits().pipeline())
    assert pipe.own_size() == 128, "not the 1024 of FluxPipeline"
