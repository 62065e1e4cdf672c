"""Folders of pictures and masks, and what a probe refuses."""

import numpy as np
import pytest
import torch
from PIL import Image
from vitrine.engine.activations.ranked_pictures import read_masks
from vitrine.engine.activations.segmentation import fit_probe
from vitrine.engine.errors import VitrineError

pytestmark = pytest.mark.rounding


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


def test_own_masks_are_read_and_squeezed(tmp_path):
    picture(tmp_path / "p" / "one.png")
    mask(tmp_path / "m" / "one.png", table(4, 3))
    folder = read_masks(tmp_path / "p", tmp_path / "m", 3)
    assert folder.mask(0).tolist() == table(4, 3).tolist()
    pictures, masks = folder.read([0], 16)
    assert pictures.shape == (1, 3, 16, 16) and masks.shape == (1, 16, 16) and pictures.abs().max() <= 1
    nearest = table(4, 3)[np.floor((np.arange(16) + 0.5) * 8 / 16).astype(int)]
    assert masks[0].tolist() == nearest[:, np.floor((np.arange(16) + 0.5) * 12 / 16).astype(int)].tolist()


def test_bad_folders_and_masks_are_explained(tmp_path):
    with pytest.raises(VitrineError, match="check the path"):
        read_masks(tmp_path, tmp_path, 3)
    picture(tmp_path / "p" / "one.png")
    with pytest.raises(VitrineError, match="1 of 1 are missing, e.g. one.png"):
        read_masks(tmp_path / "p", tmp_path / "m", 3)
    mask(tmp_path / "m" / "one.png", table(5, 9))
    with pytest.raises(VitrineError, match="raise classes"):
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
