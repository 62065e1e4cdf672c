"""Misaligned portraits: points and parts follow the pixels."""

import torch
from vitrine.engine.portraits import KEYPOINTS
from vitrine.evidence.activations.filter_claims import random_rule_keeps
from vitrine.evidence.activations.tapped_pictures import (
    SCALE,
    mirrored,
    random_warps,
    swap_sides,
    warp_images,
    warp_points,
)


def test_points_follow_the_pixels():
    """A dot painted at a point is found at the warped point."""
    warps = random_warps(range(40))
    points = torch.rand(40, 1, 2, generator=torch.Generator().manual_seed(0)) * 0.5 + 0.25
    y, x = torch.meshgrid(*[(torch.arange(64) + 0.5) / 64] * 2, indexing="ij")
    dots = torch.exp(-((x - points[..., :1, None]) ** 2 + (y - points[..., 1:, None]) ** 2).squeeze(1) / 0.002)
    moved, found = warp_points(points, warps)[:, 0], warp_images(dots[:, None], warps)[:, 0]
    inside = (moved > 0.1).all(1) & (moved < 0.9).all(1)
    best = found.flatten(1).argmax(1)
    seen = torch.stack([(best % 64 + 0.5) / 64, (best // 64 + 0.5) / 64], 1)
    assert int(inside.sum()) >= 20 and float((seen - moved)[inside].abs().max()) < 1.5 / 64


def test_warps_are_of_the_size_they_say_and_half_of_them_flip():
    warps = random_warps(range(200))
    flips = mirrored(warps)
    size = torch.linalg.det(warps[:, :, :2]).abs().rsqrt()
    assert 70 < int(flips.sum()) < 130 and float(size.min()) >= SCALE[0] - 1e-5 and float(size.max()) <= SCALE[1] + 1e-5
    assert torch.equal(random_warps([7]), warps[7:8]), "each from its own seed"
    outside = warp_points(torch.tensor([[[0.5, 0.5]]]), torch.tensor([[[1.0, 0, 3], [0, 1, 0]]]))
    assert bool(torch.isnan(outside).all())


def test_a_mirror_image_exchanges_left_and_right():
    points = torch.arange(2 * len(KEYPOINTS) * 2).float().view(2, -1, 2)
    swapped = swap_sides(points, torch.tensor([False, True]), KEYPOINTS)
    assert torch.equal(swapped[0], points[0])
    left, right, nose = (KEYPOINTS.index(n) for n in ("left_eye", "right_eye", "nose"))
    assert torch.equal(swapped[1, left], points[1, right]) and torch.equal(swapped[1, nose], points[1, nose])


def test_the_chance_of_a_random_rule():
    assert random_rule_keeps(10, 10, 3) == 1 and random_rule_keeps(10, 2, 3) == 0
    assert abs(random_rule_keeps(4, 2, 1) - 0.5) < 1e-12 and abs(random_rule_keeps(4, 2, 2) - 1 / 6) < 1e-12
