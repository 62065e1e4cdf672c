"""The published label-scarce head (check 17 of the specification) and the folder readers, against plain code."""

from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from vitrine.engine.activations.labelled import drop_rare, read_ade20k, read_cityscapes, read_horse21, read_masks
from vitrine.engine.activations.segmentation import (
    fit_probe,
    mean_iou,
)
from vitrine.engine.activations.votes import VoteSettings, fit_voters, published_iou, vote, voter
from vitrine.engine.errors import VitrineError

pytestmark = pytest.mark.rounding


def g(seed=0):
    return torch.Generator().manual_seed(seed)


# --- the published head --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("classes", "first", "second"), [(21, 128, 32), (30, 256, 128)])
def test_a_voter_is_the_published_network(classes, first, second):
    net, x = voter(7, classes), torch.randn(40, 7, generator=g())
    net(x)  # running statistics away from their start
    state = {k: v.double() for k, v in net.eval().state_dict().items()}

    def norm(x, n):
        scale = state[f"{n}.weight"] / (state[f"{n}.running_var"] + 1e-5).sqrt()
        return (x - state[f"{n}.running_mean"]) * scale + state[f"{n}.bias"]

    inner = norm((x.double() @ state["0.weight"].T + state["0.bias"]).clamp_min(0), 2)
    inner = norm((inner @ state["3.weight"].T + state["3.bias"]).clamp_min(0), 5)
    by_hand = inner @ state["6.weight"].T + state["6.bias"]
    assert torch.allclose(net(x).double(), by_hand, atol=1e-5)
    assert state["0.weight"].shape == (first, 7) and state["3.weight"].shape == (second, first)


def test_the_vote_is_the_most_frequent_class():
    voters = [torch.nn.Linear(4, 5) for _ in range(10)]
    cells = torch.randn(200, 4, generator=g(1))
    ballots = np.stack([v(cells).argmax(1).numpy() for v in voters], 1)
    by_hand = [min(Counter(row).items(), key=lambda c: (-c[1], c[0]))[0] for row in ballots.tolist()]
    assert vote(voters, cells).tolist() == by_hand


def test_voters_learn_stop_early_and_repeat():
    labels = torch.randint(3, (600,), generator=g(2))
    cells = torch.nn.functional.one_hot(labels, 3).float() + 0.2 * torch.randn(600, 3, generator=g(3))
    labels[::10] = 255
    settings, seen = VoteSettings(voters=3, epochs=40), []
    with torch.inference_mode():  # as ComfyUI runs nodes
        voters = fit_voters(cells, labels, 3, settings, lambda step, total, preview: seen.append((step, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    known = labels != 255
    assert float((vote(voters, cells[known]) == labels[known]).float().mean()) > 0.97
    again = fit_voters(cells, labels, 3, settings)
    assert all(torch.equal(a[0].weight, b[0].weight) for a, b in zip(voters, again, strict=True))
    assert not torch.equal(voters[0][0].weight, voters[1][0].weight)


def test_a_voter_stops_when_its_loss_makes_no_new_minimum():
    """Labels that nothing explains: watched from epoch 4 (from 0) on, 51 steps without a new minimum end it."""
    cells, labels = torch.randn(640, 2, generator=g(6)), torch.randint(3, (640,), generator=g(7))
    (stopped,) = fit_voters(cells, labels, 3, VoteSettings(voters=1, epochs=100))
    taken = int(stopped[2].num_batches_tracked)
    assert 4 * 10 + 52 <= taken < 100 * 10
    (short,) = fit_voters(cells, labels, 3, VoteSettings(voters=1, epochs=4))
    assert int(short[2].num_batches_tracked) == 4 * 10
    (dropped,) = fit_voters(cells[:639], labels[:639], 3, VoteSettings(voters=1, epochs=2))
    assert int(dropped[2].num_batches_tracked) == 2 * 9, "the incomplete batch is left out"


def test_published_iou_by_counting_pixels():
    true, predicted = torch.randint(4, (3, 9, 9), generator=g(4)), torch.randint(4, (3, 9, 9), generator=g(5))
    true[:, :2] = 255
    hits, unions = Counter(), Counter()
    for p, t in zip(predicted.flatten().tolist(), true.flatten().tolist(), strict=True):
        for k in {p, t}:
            unions[k] += 1
        hits[p] += p == t
    by_hand = sum(hits[k] / (unions[k] + 1e-8) for k in range(5)) / 5  # class 4 never occurs and counts 0
    assert published_iou(predicted, true, 5) == pytest.approx(by_hand)
    assert mean_iou(predicted, true, 5)[0] > by_hand, "unknown pixels and absent classes do not count there"
    assert published_iou(predicted, predicted, 4) == pytest.approx(1)


def test_bad_votes_are_explained():
    with pytest.raises(VitrineError, match="one label per pixel"):
        fit_voters(torch.randn(4, 2), torch.zeros(3, dtype=torch.long), 2)
    with pytest.raises(VitrineError, match="raise classes"):
        fit_voters(torch.randn(4, 2), torch.tensor([0, 1, 2, 3]), 2)
    with pytest.raises(VitrineError, match="batch >= 2"):
        VoteSettings(batch=1)


# --- bad input -------------------------------------------------------------------------------------------------------
def test_unlabelled_classes_are_explained():
    masks = torch.tensor([0, 2]).view(1, 1, 2).expand(2, 2, 2)
    for classes in (None, 3):
        with pytest.raises(VitrineError, match=r"unlabelled classes.*\[1\]"):
            fit_probe(torch.randn(2, 3, 2, 2), masks, classes)


# --- folders -------------------------------------------------------------------------------------------------------
def picture(path, size=(12, 8), seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)).save(path)


def mask(path, table):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npy":
        np.save(path, table)
    else:
        Image.fromarray(table.astype(np.uint8)).save(path)


def table(seed, top, size=(12, 8)):
    return np.random.default_rng(seed).integers(0, top, (size[1], size[0]))


def test_ade20k_counts_from_one_and_zero_is_unknown(tmp_path):
    for n in range(2):
        picture(tmp_path / "images" / "validation" / f"ADE_val_{n}.jpg")
        mask(tmp_path / "annotations" / "validation" / f"ADE_val_{n}.png", table(n, 151))
    found = read_ade20k(tmp_path)
    assert len(found) == 2 and found.classes == 150
    stored = table(1, 151)
    assert found.mask(1).tolist() == np.where(stored == 0, 255, stored - 1).tolist()


def test_cityscapes_keeps_the_nineteen_evaluated_classes(tmp_path):
    picture(tmp_path / "leftImg8bit" / "val" / "ulm" / "ulm_000_leftImg8bit.png")
    stored = np.arange(96).reshape(8, 12) % 34
    mask(tmp_path / "gtFine" / "val" / "ulm" / "ulm_000_gtFine_labelIds.png", stored)
    found = read_cityscapes(tmp_path)
    labels = found.mask(0).numpy()
    # road, sidewalk, building, sky, person, car, bicycle; and what nobody evaluates
    for old, new in ((7, 0), (8, 1), (11, 2), (23, 10), (24, 11), (26, 13), (33, 18), (0, 255), (9, 255), (29, 255)):
        assert set(labels[stored == old].tolist()) == {new}
    assert found.classes == 19 and sorted(set(labels.flatten().tolist())) == [*range(19), 255]


def test_horse21_masks_lie_beside_the_pictures(tmp_path):
    picture(tmp_path / "real" / "train" / "h.png")
    mask(tmp_path / "real" / "train" / "h.npy", table(3, 21))
    found = read_horse21(tmp_path)
    assert found.classes == 21 and found.mask(0).tolist() == table(3, 21).tolist()
    pictures, masks = found.read([0], 16)
    assert pictures.shape == (1, 3, 16, 16) and masks.shape == (1, 16, 16) and pictures.abs().max() <= 1
    nearest = table(3, 21)[np.floor((np.arange(16) + 0.5) * 8 / 16).astype(int)]
    assert masks[0].tolist() == nearest[:, np.floor((np.arange(16) + 0.5) * 12 / 16).astype(int)].tolist()


def test_own_masks_and_rare_classes(tmp_path):
    picture(tmp_path / "p" / "one.png")
    mask(tmp_path / "m" / "one.png", table(4, 3))
    found = read_masks(tmp_path / "p", tmp_path / "m", 3)
    assert found.mask(0).tolist() == table(4, 3).tolist()
    rare = torch.zeros(2, 6, 6, dtype=torch.long)
    rare[0, 0, :3], rare[1, :4] = 1, 1
    kept = drop_rare(rare, 4)
    assert kept[0, 0].tolist() == [255] * 3 + [0] * 3 and torch.equal(kept[1], rare[1])


def test_bad_folders_and_masks_are_explained(tmp_path):
    for read in (read_ade20k, read_cityscapes, read_horse21):
        with pytest.raises(VitrineError, match="top folder"):
            read(tmp_path)
    picture(tmp_path / "p" / "one.png")
    with pytest.raises(VitrineError, match="1 of 1 are missing, e.g. one.png"):
        read_masks(tmp_path / "p", tmp_path / "m", 3)
    mask(tmp_path / "m" / "one.png", table(5, 9))
    with pytest.raises(VitrineError, match="layout of this data set"):
        read_masks(tmp_path / "p", tmp_path / "m", 3).mask(0)
    mask(tmp_path / "m" / "one.png", table(5, 3, size=(6, 8)))
    with pytest.raises(VitrineError, match="picture's size"):
        read_masks(tmp_path / "p", tmp_path / "m", 3).read([0], 8)
    mask(tmp_path / "m" / "one.png", np.zeros((8, 12, 3)))
    with pytest.raises(VitrineError, match="not colours"):
        read_masks(tmp_path / "p", tmp_path / "m", 3).mask(0)
    (tmp_path / "m" / "one.png").unlink()
    np.save(tmp_path / "m" / "one.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(VitrineError, match="never unpickled"):
        read_masks(tmp_path / "p", tmp_path / "m", 3).mask(0)
