"""Taps, points and masks through the nodes and through the pipelines around the stock one: tests that two files share.

A file gives the fixtures ``doors`` (the MODEL, VAE and prompt as ``parts``, the ``stock`` pipeline with its ``encoded``
prompt, and where to tap: ``node`` and ``tap``) and ``pictures`` (four renders).
"""

import torch
from vitrine.engine.pipelines import ActivationTapPipeline, CorrespondencePipeline, SegmentationPipeline
from vitrine.engine.portraits import PARTS


def image(pictures, rows):
    return pictures.images[rows].permute(0, 2, 3, 1)


def close(a, b, bound=1e-5):
    return float((a - b).abs().max()) <= bound * float(b.abs().max())


def test_a_tap(comfy, doors, pictures):
    taps, _, _ = comfy.call(
        "VitrineActivationTap", **doors.parts, image=image(pictures, [0, 1]), dtype="float32", **doors.node
    )
    pipe = ActivationTapPipeline.from_pipe(doors.stock)
    ours = pipe.tap(pictures.images[:2], **doors.tap, **doors.encoded, output_type="none").activations
    assert list(taps) == list(ours) == doors.tap["addresses"]
    assert all(close(taps[a].tensor, ours[a].tensor) for a in ours)


def test_points_travel(comfy, doors, pictures):
    points = pictures.keypoints[0, :3]
    lines = "\n".join(f"{x} {y}" for x, y in points.tolist())
    pair = {"source": image(pictures, [0]), "target": image(pictures, [1]), "points": lines, "softness": 0.02}
    table, _ = comfy.call("VitrineFindCorrespondence", **doors.parts, **pair, **doors.node)
    rows = torch.tensor([[float(v) for v in line.split()[:2]] for line in table.splitlines()])
    pipe = CorrespondencePipeline.from_pipe(doors.stock)
    (match,) = pipe.match(pictures.images[:1], pictures.images[1:2], points, **doors.tap, **doors.encoded)
    assert torch.allclose(rows, match.points, atol=1e-3)


def test_masks_travel(comfy, doors, pictures):
    background = (pictures.parts == PARTS.index("background")).float()
    lesson = {"examples": image(pictures, [0, 1]), "masks": background[:2], "images": image(pictures, [2, 3])}
    hard, _ = comfy.call("VitrineSegmentLikeThis", **doors.parts, **lesson, hidden=0, **doors.node)
    pipe = SegmentationPipeline.from_pipe(doors.stock)
    ours = pipe.segment(pictures.images[:2], background[:2].long(), pictures.images[2:], **doors.tap, **doors.encoded)
    assert float((ours.float() == hard).float().mean()) > 0.99, "pixels on edges follow rounding, by threads"
    assert float((hard == background[2:]).float().mean()) > 0.8, "it was trained"
