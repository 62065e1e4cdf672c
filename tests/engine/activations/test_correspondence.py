"""GDF's correspondence protocol (check 16 of the specification) and the SPair-71k reader, against plain NumPy."""

import json

import numpy as np
import pytest
import torch
from vitrine.engine.activations.correspondence import find_correspondence
from vitrine.engine.activations.spair_dataset import read_spair, score_spair
from vitrine.engine.errors import VitrineError

pytestmark = pytest.mark.rounding
SIZE = (40, 30)


def annotation(rng, category, size, points=6):
    other = (size[0] * 3, size[1] * 2)
    kps, far = (rng.integers(0, limits, (points, 2)).tolist() for limits in (size, other))
    return {
        "category": category, "src_imname": "a.jpg", "trg_imname": "b.jpg",
        "src_imsize": [*size, 3], "trg_imsize": [*other, 3], "src_kps": kps, "trg_kps": far,
        "src_bndbox": [1, 2, size[0] - 1, size[1] - 3], "trg_bndbox": [10, 5, other[0] // 2, other[1] - 4],
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "PairAnnotation" / "test").mkdir(parents=True)
    told = []
    for n, category in enumerate(["cat", "dog", "cat", "bus", "dog"]):
        told.append(annotation(rng, category, (SIZE[0] + n, SIZE[1] + 2 * n), points=3 + n))
        (tmp_path / "PairAnnotation" / "test" / f"00000{n}-a-b:{category}.json").write_text(json.dumps(told[-1]))
    return tmp_path, told


def test_pairs_are_read_in_original_pixels(folder):
    root, told = folder
    pairs = read_spair(root)
    assert [p.category for p in pairs] == [t["category"] for t in told]
    for pair, t in zip(pairs, told, strict=True):
        assert pair.target == root / "JPEGImages" / t["category"] / "b.jpg"
        assert pair.source_points.tolist() == t["src_kps"] and pair.target_points.tolist() == t["trg_kps"]
        assert list(pair.target_box) == t["trg_bndbox"] and list(pair.source_size) == t["src_imsize"][:2]
        assert torch.allclose(pair.in_pixels(pair.target_points / torch.tensor(pair.target_size)), pair.target_points)
    assert [p.category for p in read_spair(root, category="cat")] == ["cat", "cat"]


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.3])
def test_pck_is_the_published_arithmetic(folder, alpha):
    """distance <= alpha x longer side, of the target picture or of its box; mean over points, not over pairs."""
    root, told = folder
    rng = np.random.default_rng(1)
    guesses = [np.clip(np.array(t["trg_kps"]) + rng.normal(0, 12, (len(t["trg_kps"]), 2)), 0, 59) for t in told]
    sizes = [np.array(t["trg_imsize"][:2]) for t in told]
    answers = {f"00000{n}-a-b:{t['category']}": torch.tensor(g / s)
               for n, (t, g, s) in enumerate(zip(told, guesses, sizes, strict=True))}  # fmt: skip
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


def test_a_matcher_walks_the_whole_way(folder):
    """Features that are their own coordinates: the match is the same relative place, within half a cell."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, 20), torch.linspace(-1, 1, 20), indexing="ij")
    code = torch.stack([torch.cos(x), torch.sin(x), torch.cos(y), torch.sin(y)])
    for pair in read_spair(folder[0]):
        found = find_correspondence(code, code, pair.query_points()).points
        assert float((found - pair.query_points()).abs().max()) <= 0.5 / 20 + 1e-5


def test_nearest_cell_is_the_published_one_where_both_work_on_pixels():
    """GDF resizes features to the picture, reads the source at whole pixels, and takes the first largest cosine."""
    g = torch.Generator().manual_seed(2)
    source, target = torch.randn(5, 12, 12, generator=g), torch.randn(5, 12, 12, generator=g)
    pixels = torch.randint(12, (8, 2), generator=g)
    ours = find_correspondence(source, target, (pixels.flip(1) + 0.5) / 12).points * 12 - 0.5
    a, b = source.numpy().reshape(5, -1).T, target.numpy().reshape(5, -1).T
    a, b = a / np.linalg.norm(a, axis=1, keepdims=True), b / np.linalg.norm(b, axis=1, keepdims=True)
    best = (a[(pixels[:, 0] * 12 + pixels[:, 1]).numpy()] @ b.T).argmax(1)
    assert np.allclose(ours.numpy(), np.stack([best % 12, best // 12], 1), atol=1e-4)


def test_bad_folders_are_explained(folder, tmp_path):
    root, told = folder
    with pytest.raises(VitrineError, match="trn, val, test"):
        read_spair(root, "train")
    with pytest.raises(VitrineError, match="unpack"):
        read_spair(root, "val")
    with pytest.raises(VitrineError, match="bus"):
        read_spair(root, category="cow")
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
