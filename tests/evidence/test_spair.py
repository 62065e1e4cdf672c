"""SPair-71k: the published folder, its arithmetic, and a pipeline's scores, against plain NumPy and by hand.

On Stable Diffusion's shape and on Flux's: the shipped models.
"""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from vitrine.engine.errors import VitrineError
from vitrine.engine.pipelines import ActivationTapPipeline, CorrespondencePipeline
from vitrine.engine.portraits import load_portraits, render, sample_scenes
from vitrine.engine.portraits.flow import FLOW_WEIGHTS, load_flow_portraits
from vitrine.evidence.verify.spair import SPairScore, TappedPictures, read_spair, score_spair, spair_scores

pytestmark = pytest.mark.rounding
SIDES = (40, 30)


def annotation(rng, category, size, points=6):
    other = (size[0] * 3, size[1] * 2)
    kps, far = (rng.integers(0, limits, (points, 2)).tolist() for limits in (size, other))
    return {
        "category": category,
        "src_imname": "a.jpg",
        "trg_imname": "b.jpg",
        "src_imsize": [*size, 3],
        "trg_imsize": [*other, 3],
        "src_kps": kps,
        "trg_kps": far,
        "src_bndbox": [1, 2, size[0] - 1, size[1] - 3],
        "trg_bndbox": [10, 5, other[0] // 2, other[1] - 4],
    }


@pytest.fixture
def annotated(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "PairAnnotation" / "test").mkdir(parents=True)
    told = []
    for n, category in enumerate(["cat", "dog", "cat", "bus", "dog"]):
        told.append(annotation(rng, category, (SIDES[0] + n, SIDES[1] + 2 * n), points=3 + n))
        (tmp_path / "PairAnnotation" / "test" / f"00000{n}-a-b:{category}.json").write_text(json.dumps(told[-1]))
    return tmp_path, told


def test_pairs_are_read_in_original_pixels(annotated):
    root, told = annotated
    pairs = read_spair(root)
    assert [p.category for p in pairs] == [t["category"] for t in told]
    for pair, t in zip(pairs, told, strict=True):
        assert pair.target == root / "JPEGImages" / t["category"] / "b.jpg"
        assert pair.source_points.tolist() == t["src_kps"] and pair.target_points.tolist() == t["trg_kps"]
        assert list(pair.target_box) == t["trg_bndbox"] and list(pair.source_size) == t["src_imsize"][:2]
        assert torch.allclose(pair.in_pixels(pair.target_points / torch.tensor(pair.target_size)), pair.target_points)


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.3])
def test_pck_is_the_published_arithmetic(annotated, alpha):
    """distance <= alpha x longer side, of the target picture or of its box; mean over points, not over pairs."""
    root, told = annotated
    rng = np.random.default_rng(1)
    guesses = [np.clip(np.array(t["trg_kps"]) + rng.normal(0, 12, (len(t["trg_kps"]), 2)), 0, 59) for t in told]
    sizes = [np.array(t["trg_imsize"][:2]) for t in told]
    answers = {
        f"00000{n}-a-b:{t['category']}": torch.tensor(g / s)
        for n, (t, g, s) in enumerate(zip(told, guesses, sizes, strict=True))
    }
    score = score_spair(read_spair(root), lambda pair: answers[pair.name], alpha)
    img, bbox, names = [], [], []
    for t, g, s in zip(told, guesses, sizes, strict=True):
        distance = np.sqrt(((g - np.array(t["trg_kps"])) ** 2).sum(1))
        left, top, right, bottom = t["trg_bndbox"]
        img.append(distance <= alpha * s.max())
        bbox.append(distance <= alpha * max(right - left, bottom - top))
        names += [t["category"]] * len(distance)
    assert score.img == pytest.approx(np.concatenate(img).mean())
    assert score.bbox == pytest.approx(np.concatenate(bbox).mean())
    assert score.each_img.tolist() == pytest.approx([h.mean() for h in img])
    assert score.each_bbox.tolist() == pytest.approx([h.mean() for h in bbox])
    for name, (by_img, by_box) in score.categories.items():
        mine = np.array(names) == name
        assert by_img == pytest.approx(np.concatenate(img)[mine].mean())
        assert by_box == pytest.approx(np.concatenate(bbox)[mine].mean())
    assert 0 < score.bbox < score.img <= 1


def test_bad_folders_are_explained(annotated, tmp_path):
    root, told = annotated
    with pytest.raises(VitrineError, match="trn, val, test"):
        read_spair(root, "train")
    with pytest.raises(VitrineError, match="unpack"):
        read_spair(root, "val")
    with pytest.raises(VitrineError, match="at least one"):
        score_spair([], lambda pair: pair.query_points())
    with pytest.raises(VitrineError, match="one per source point"):
        score_spair(read_spair(root), lambda pair: pair.query_points()[:1])
    bad = root / "PairAnnotation" / "trn"
    bad.mkdir()
    (bad / "broken.json").write_text("{")
    with pytest.raises(VitrineError, match="again"):
        read_spair(root, "trn")
    (bad / "broken.json").write_text(json.dumps({**told[0], "trg_kps": told[0]["trg_kps"][:-1]}))
    with pytest.raises(VitrineError, match="broken.json"):
        read_spair(root, "trn")


# --- a pipeline's scores ---------------------------------------------------------------------------------------------
PLACES = ("up-level0-repeat0-res-increment", "up-level0-repeat0-vit-block0-cross-q")
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
            "category": category,
            "src_imname": f"{i}.jpg",
            "trg_imname": f"{j}.jpg",
            "src_kps": points[0],
            "trg_kps": points[1],
            "src_imsize": [*SIZES[i], 3],
            "trg_imsize": [*SIZES[j], 3],
            "src_bndbox": [4, 4, SIZES[i][0] - 4, SIZES[i][1] - 4],
            "trg_bndbox": [8, 8, SIZES[j][0] // 2, SIZES[j][1] - 8],
        }
        (root / "PairAnnotation" / "test" / f"{n:06d}.json").write_text(json.dumps(told))
    return root


def features(stock, folder, category, name, places, size, **settings):
    """Unit features of a whole picture, squeezed to the model's size, on 128 x 128."""
    pipe = ActivationTapPipeline.from_pipe(stock)
    picture = Image.open(folder / "JPEGImages" / category / name)
    call = {"size": size, "output_type": "none"} | settings
    taps = pipe.tap(picture, f"a photo of a {category}", list(places), **call).activations
    maps = [F.normalize(v.tensor, dim=1) for v in taps.values()]
    side = max(m.shape[-1] for m in maps)
    joined = torch.cat([F.interpolate(m, (side, side), mode="bilinear") for m in maps], 1)
    return F.normalize(F.interpolate(F.normalize(joined, dim=1), (128, 128), mode="bilinear"), dim=1)


def by_hand(folder, features_of, alpha=0.1):
    """The four totals for boxes, by nearest features."""
    hits = {}
    for file in sorted((folder / "PairAnnotation" / "test").glob("*.json")):
        t = json.loads(file.read_text())
        source, target = (features_of(t["category"], t[f"{end}_imname"]) for end in ("src", "trg"))
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


@pytest.mark.parametrize(
    ("load", "places", "size", "tap"),
    [
        pytest.param(lambda: load_portraits().pipeline(), PLACES, 64, {}, id="unet"),
        pytest.param(
            lambda: load_flow_portraits(FLOW_WEIGHTS).pipeline(),
            ("vit-block3-in",),
            128,
            {"modulate": True, "discard": (5,)},
            id="flux",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_scores_are_the_published_arithmetic_and_nothing_is_tapped_twice(folder, tmp_path, load, places, size, tap):
    stock, pairs, plain = load(), read_spair(folder), TappedPictures(places)
    pipe = CorrespondencePipeline.from_pipe(stock)
    assert max(pipe._adapter.usual_size()) == size, "not the 1024 of FluxPipeline"
    chosen = TappedPictures(places, tap=tap)
    score = spair_scores(pipe, pairs, tmp_path / "cache", chosen)
    expected = by_hand(folder, lambda *picture: features(stock, folder, *picture, places, size, **tap))
    ours = score.totals(True)
    assert set(ours) == set(expected) and all(abs(ours[name] - value) < 1e-6 for name, value in expected.items())
    written = {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").glob("shard-*")}
    again = spair_scores(pipe, pairs, tmp_path / "cache", chosen)
    assert written and again.totals(True) == ours
    assert spair_scores(pipe, pairs[2:], tmp_path / "cache", chosen).names == ("head",)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").glob("shard-*")} == written
    if tap:  # modulation and the channel that is off have an effect
        without = spair_scores(pipe, pairs, tmp_path / "plain", plain)
        assert not torch.equal(without.each_img, score.each_img) or without.totals(False) != score.totals(False)


def test_points_and_pictures_pooled_and_by_category():
    """Two categories, one with a pair of one point that is right, one with two pairs of which half is."""
    each = torch.tensor([1.0, 0.0, 0.5])
    score = SPairScore(0.5, 0.5, each, each, {"a": (1.0, 1.0), "b": (0.4, 0.4)}, ("a", "b", "b"))
    assert score.totals(True) == {
        "per point, all": 0.5,
        "per point, mean of categories": 0.7,
        "per picture, all": 0.5,
        "per picture, mean of categories": 0.625,
    }
