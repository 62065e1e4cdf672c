"""Correspondence, probes and the comparison of places, against straightforward code."""

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from vitrine.engine.activations import Activations
from vitrine.engine.activations.correspondence import (
    feature_maps,
    find_correspondence,
    flip_ensemble,
    pck,
    sample_points,
)
from vitrine.engine.activations.segmentation import (
    ProbeSettings,
    fit_probe,
    mean_iou,
)
from vitrine.engine.activations.site_search import Budget, greedy_search
from vitrine.engine.errors import VitrineError
from vitrine.engine.jobs.run import Run
from vitrine.engine.tracing.hooks import Activation

pytestmark = pytest.mark.rounding


def g(seed=0):
    return torch.Generator().manual_seed(seed)


# --- correspondence ------------------------------------------------------------------------------------------------
def test_a_matcher_walks_the_whole_way():
    """Features that are their own coordinates: the match is the same relative place, within half a cell."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, 20), torch.linspace(-1, 1, 20), indexing="ij")
    code = torch.stack([torch.cos(x), torch.sin(x), torch.cos(y), torch.sin(y)])
    points = torch.rand(9, 2, generator=torch.Generator().manual_seed(0))
    matched = find_correspondence(code, code, points).points
    assert float((matched - points).abs().max()) <= 0.5 / 20 + 1e-5


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


def test_sampling_is_bilinear_between_cell_centres():
    features = torch.randn(3, 4, 6, generator=g())
    for x, y in ((0.5, 0.5), (0.21, 0.77), (0.0, 1.0)):
        column, row = x * 6 - 0.5, y * 4 - 0.5
        c0, r0 = math.floor(column), math.floor(row)
        fc, fr = column - c0, row - r0

        def at(r, c):
            return features[:, min(max(r, 0), 3), min(max(c, 0), 5)]

        top = at(r0, c0) * (1 - fc) + at(r0, c0 + 1) * fc
        low = at(r0 + 1, c0) * (1 - fc) + at(r0 + 1, c0 + 1) * fc
        (found,) = sample_points(features, torch.tensor([[x, y]]))
        assert torch.allclose(found, top * (1 - fr) + low * fr, atol=1e-6)


def test_nearest_neighbour_by_hand():
    source, target = torch.randn(8, 5, 7, generator=g(1)), torch.randn(8, 6, 4, generator=g(2))
    points = torch.rand(9, 2, generator=g(3))
    found = find_correspondence(source, target, points)
    for n, point in enumerate(points):
        asked = sample_points(source, point[None])[0]
        best, where = -2.0, None
        for row in range(6):
            for column in range(4):
                cosine = float(torch.cosine_similarity(asked, target[:, row, column], dim=0))
                if cosine > best:
                    best, where = cosine, ((column + 0.5) / 4, (row + 0.5) / 6)
        assert found.points[n].tolist() == pytest.approx(where, abs=1e-6)
        assert float(found.similarity[n]) == pytest.approx(best, abs=1e-5)


def test_a_picture_corresponds_to_itself_and_to_its_shift():
    features = torch.randn(16, 8, 8, generator=g(4))
    centres = (torch.cartesian_prod(torch.arange(8), torch.arange(8)).float() + 0.5) / 8
    same = find_correspondence(features, features, centres)
    assert torch.allclose(same.points, centres) and bool(same.mutual.all())
    shifted = find_correspondence(features, features.roll(2, -1), centres[centres[:, 0] < 0.7])
    assert torch.allclose(shifted.points[:, 0] - centres[centres[:, 0] < 0.7][:, 0], torch.tensor(0.25), atol=1e-6)


def test_soft_argmax_lies_between_equal_neighbours():
    target = torch.zeros(2, 4, 4)
    target[0], target[1] = 1, 0
    target[:, 1, 1] = target[:, 1, 2] = torch.tensor([0.0, 1.0])
    source = torch.tensor([0.0, 1.0]).view(2, 1, 1).expand(2, 4, 4)
    found = find_correspondence(source, target, torch.tensor([[0.5, 0.5]]), temperature=0.01)
    assert found.points[0].tolist() == pytest.approx([0.5, 0.375], abs=1e-4)


def test_mutual_check_rejects_a_point_that_does_not_come_back():
    source, target = torch.zeros(3, 4, 4), torch.zeros(3, 4, 4)
    source[2], target[2] = 1, 1
    source[:, 0, 0], source[:, 3, 3] = torch.tensor([1.0, 0.3, 0.0]), torch.tensor([1.0, 0.0, 0.0])
    target[:, 2, 2] = torch.tensor([1.0, 0.0, 0.0])
    found = find_correspondence(source, target, torch.tensor([[0.125, 0.125], [0.875, 0.875]]))
    assert found.points.tolist() == [[0.625, 0.625]] * 2 and found.mutual.tolist() == [False, True]


def test_flip_ensemble_is_blind_to_mirroring():
    plain, mirrored = torch.randn(1, 5, 4, 6, generator=g(5)), torch.randn(1, 5, 4, 6, generator=g(6))
    once, back = flip_ensemble(plain, mirrored), flip_ensemble(mirrored, plain)
    assert torch.allclose(once, back.flip(-1), atol=1e-6)


def test_pck_by_hand_by_point_and_by_pair():
    true = [torch.tensor([[10.0, 10], [50, 50], [float("nan"), 0]]), torch.tensor([[0.0, 0]])]
    found = [torch.tensor([[14.0, 10], [70, 50], [0, 0]]), torch.tensor([[3.0, 4]])]
    overall, each = pck(found, true, [100, 40], 0.1)
    assert overall == pytest.approx(1 / 3) and each.tolist() == [0.5, 0.0]
    assert pck(found, true, [200, 50], 0.1)[0] == 1.0
    with pytest.raises(VitrineError, match="one length"):
        pck(found, true, [1])


def test_joined_maps_weigh_every_place_alike():
    items = {
        "a": Activation("a", 100 * torch.randn(2, 4, 4, 4, generator=g(7)), (4, 4)),
        "b": Activation("b", torch.randn(2, 8, 8, 8, generator=g(8)), (8, 8)),
        "text": Activation("text", torch.randn(2, 5, 3), None),
    }
    joined = feature_maps(Activations(items))
    assert joined.shape == (2, 12, 8, 8) and torch.allclose(joined.norm(dim=1), torch.ones(2, 8, 8), atol=1e-5)
    with pytest.raises(VitrineError, match="spatial"):
        feature_maps(Activations({"text": items["text"]}))


@pytest.mark.parametrize(
    ("points", "word"), [(torch.zeros(0, 2), "at least one"), (torch.tensor([[3.0, 1.0]]), "divide pixels")]
)
def test_bad_points_are_explained(points, word):
    with pytest.raises(VitrineError, match=word):
        find_correspondence(torch.randn(2, 4, 4), torch.randn(2, 4, 4), points)
    with pytest.raises(VitrineError, match="same layers"):
        find_correspondence(torch.randn(2, 4, 4), torch.randn(3, 4, 4), torch.zeros(1, 2))


# --- segmentation --------------------------------------------------------------------------------------------------
def toy(count, seed, noise=0.7):
    """Three classes in blocks; features are noisy one-hot codes at a quarter of the masks' resolution."""
    masks = torch.randint(3, (count, 4, 4), generator=g(seed)).repeat_interleave(4, 1).repeat_interleave(4, 2)
    clean = torch.nn.functional.one_hot(masks[:, ::4, ::4], 3).movedim(-1, 1).float()
    return clean + noise * torch.randn(clean.shape, generator=g(seed + 100)), masks


def test_linear_probe_is_multinomial_logistic_regression():
    features, masks = toy(6, 1)
    same = features.repeat_interleave(4, 2).repeat_interleave(4, 3)
    probe = fit_probe(same, masks, settings=ProbeSettings(pixels=10_000, steps=300, weight_decay=1e-3))
    cells = ((same.movedim(1, -1).reshape(-1, 3) - probe.mean) / probe.std).double()
    # scikit-learn minimises C * sum of losses + |w|^2 / 2; ours mean of losses + decay * |w|^2.
    reference = LogisticRegression(C=1 / (2 * 1e-3 * len(cells)), tol=1e-10, max_iter=2000)
    reference.fit(cells.numpy(), masks.flatten().numpy())
    theirs = torch.tensor(reference.predict_proba(cells.numpy()))
    ours = torch.softmax(probe.net(cells.float()), 1)
    assert float((ours - theirs).abs().max()) < 2e-3


@pytest.mark.parametrize("hidden", [0, 16])
def test_probe_learns_from_few_and_is_deterministic(hidden):
    features, masks = toy(5, 2, noise=0.2)
    fresh, truth = toy(10, 3, noise=0.2)
    settings = ProbeSettings(hidden=hidden, steps=100)
    with torch.inference_mode():  # as ComfyUI runs nodes
        probe = fit_probe(features, masks, settings=settings)
    predicted = probe.predict(fresh, (16, 16))
    assert mean_iou(predicted, truth, 3)[0] > 0.8
    again = fit_probe(features, masks, settings=settings)
    assert torch.equal(again.predict(fresh, (16, 16)), predicted)


def test_iou_by_hand_with_ignored_pixels():
    predicted, true = torch.tensor([[[0, 1], [1, 1]]]), torch.tensor([[[0, 0], [1, 255]]])
    overall, each = mean_iou(predicted, true, 3)
    assert each[:2].tolist() == [0.5, 0.5] and math.isnan(float(each[2])) and overall == 0.5


def test_bad_labels_are_explained():
    features = torch.randn(2, 3, 4, 4)
    for masks, word in (
        (torch.zeros(1, 4, 4, dtype=torch.long), "one mask"),
        (torch.zeros(2, 4, 4, dtype=torch.long), "background"),
    ):
        with pytest.raises(VitrineError, match=word):
            fit_probe(features, masks)
    with pytest.raises(VitrineError, match="relabel"):
        fit_probe(features, torch.randint(5, (2, 4, 4)), classes=2)


# --- comparison ----------------------------------------------------------------------------------------------------
def test_greedy_choice_budget_and_resume(tmp_path):
    worth, calls = {"a": 3.0, "b": 2.5, "c": 2.0, "d": 1.0}, []

    def score(picked):
        calls.append(picked)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return sum(worth[p] for p in picked) - (4.0 if {"a", "b"} <= set(picked) else 0.0)

    state = tmp_path / "state.safetensors"
    with pytest.raises(KeyboardInterrupt):
        greedy_search(list(worth), score, state=Run(state, "comparison", {}))
    done = len(Run(state, "comparison", {}).load().facts["scores"])
    calls.extend([()] * 10)
    found = greedy_search(list(worth), score, most=2, state=Run(state, "comparison", {}))
    assert done == 5 and found.chosen == ("a", "c") and found.score == 5.0 and list(found.singles) == list("abcd")
    tight = greedy_search(list(worth), score, budget=Budget({"a": 9, "b": 4, "c": 4, "d": 4}, 8), most=3)
    assert tight.chosen == ("b", "c")
    with pytest.raises(VitrineError, match="budget"):
        greedy_search(["a"], score, budget=Budget({"a": 9}, 8))
