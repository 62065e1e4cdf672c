"""What judges enlarged portraits: renders of the size are right, detailed and near; other pictures are not."""

import pytest
import torch
from vitrine.engine.portraits import render, sample_scenes
from vitrine.engine.portraits.flow import load_flow_portraits
from vitrine.evidence.portraits.readout import load_readout
from vitrine.evidence.resolution import positions


@pytest.fixture(scope="module")
def scenes():
    return sample_scenes(range(8_650_000, 8_650_024))


def test_renders_are_right_and_detailed(scenes):
    drawn, net = render(scenes, 256, details=True).images, load_readout()
    ours = positions.judge(net, drawn, scenes)
    assert float(ours.hits.mean()) > 0.98 and 0.8 < ours.detail < 1.25
    small = torch.nn.functional.interpolate(render(scenes, 128, details=True).images, (256, 256), mode="bilinear")
    blurred = positions.judge(net, small, scenes)
    assert float(blurred.hits.mean()) > 0.95 and blurred.detail < 0.5
    tiled = torch.nn.functional.interpolate(drawn, (128, 128), mode="area").repeat(1, 1, 2, 2)
    repeated = positions.judge(net, tiled, scenes)
    assert float(repeated.hits.mean()) < 0.7 and repeated.frechet > 2 * ours.frechet, "four heads are not one"


def test_wide_pictures_are_judged_by_their_middle():
    wide = torch.arange(320.0).expand(1, 3, 192, 320)
    assert positions.square(wide)[0, 0, 0].tolist() == list(map(float, range(64, 256)))


def test_arms_differ_and_the_enlarged_picture_is_the_trained_one(scenes):
    model = load_flow_portraits()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(positions, "STEPS", 2)
        drawn = {arm: positions.draw(model, arm, (160, 128), scenes[[0]], lambda *_: None)
                 for arm in (positions.ENLARGED, positions.EXTRAPOLATED, "rope_yarn")}  # fmt: skip
    assert {tuple(images.shape) for images in drawn.values()} == {(1, 3, 128, 160)}
    assert not torch.equal(drawn[positions.EXTRAPOLATED], drawn["rope_yarn"])
