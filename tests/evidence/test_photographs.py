"""The outside check: points follow the pixels of real photographs, and what must win on them wins."""

import sys

import pytest
import torch
import torch.nn.functional as F
from vitrine.engine.activations.correspondence import find_correspondence, pck
from vitrine.engine.errors import VitrineError
from vitrine.evidence.activations.measures import part_agreement_by_picture
from vitrine.evidence.activations.photographs import NAMES, daisy_maps, load_photographs, raw_patches, warped_pairs


def test_points_follow_the_pixels_of_the_photographs():
    """Around every point, source and target show the same colours."""
    pytest.importorskip("skimage")
    pairs = warped_pairs(64, 4, 0)
    assert len(pairs.names) == 4 * len(NAMES) and sum(map(len, pairs.points)) > 300
    near, far = [], []
    for n, (points, truth) in enumerate(zip(pairs.points, pairs.truth, strict=True)):
        soft = [F.avg_pool2d(p[n : n + 1], 3, 1, 1) for p in (pairs.sources, pairs.targets)]
        colours = [
            F.grid_sample(p, (at * 2 - 1)[None, None], align_corners=False)[0, :, 0]
            for p, at in zip(soft, (points, truth), strict=True)
        ]
        near.append((colours[0] - colours[1]).abs().mean())
        far.append((colours[0] - colours[1].roll(5, 1)).abs().mean())
    assert float(torch.stack(near).mean()) < 0.35 * float(torch.stack(far).mean())


@pytest.mark.parametrize("describe", [raw_patches, daisy_maps])
def test_descriptors_find_points_of_a_shifted_copy(describe):
    pytest.importorskip("skimage")
    pictures, corners = load_photographs(64)
    shifted = pictures.roll(4, 3)  # one cell to the right
    first, second = describe(pictures), describe(shifted)
    truth = corners + torch.tensor([4 / 64, 0])
    matched = [
        find_correspondence(a, b, p, temperature=0.02).points for a, b, p in zip(first, second, corners, strict=True)
    ]
    assert pck(matched, list(truth), [1.0] * len(matched), 0.05)[0] > 0.9


def test_without_scikit_image_the_refusal_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "skimage", None)
    with pytest.raises(VitrineError, match=r"vitrine-diffusion\[demo\]"):
        load_photographs(64)


def test_copied_positions_score_as_labels_coincide():
    parts = torch.zeros(3, 16, 16, dtype=torch.long)
    parts[:, 4:8, 4:8] = 1
    assert torch.equal(part_agreement_by_picture(None, parts), torch.ones(3))
    parts[2] = parts[2].roll(2, 1)
    assert float(part_agreement_by_picture(None, parts)[0]) == pytest.approx(0.75)
