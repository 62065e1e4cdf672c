"""What judges enlarged portraits: renders of the size are right, detailed and near; other pictures are not."""

import pytest
import torch
from vitrine.engine.portraits import render, sample_scenes
from vitrine.engine.portraits.flow import load_flow_portraits
from vitrine.evidence.portraits.classifier import load_classifier
from vitrine.evidence.resolution import positions
from vitrine.evidence.resolution.heads import head_counter, validation


@pytest.fixture(scope="module")
def net():
    return load_classifier()


@pytest.fixture(scope="module")
def count(net):
    return head_counter(net)


@pytest.fixture(scope="module")
def scenes():
    return sample_scenes(range(8_650_000, 8_650_024))


@pytest.mark.nightly
def test_renders_are_right_and_detailed(scenes, net, count):
    drawn = render(scenes, 256, details=True).images
    ours = positions.judge(net, count, drawn, scenes)
    assert float(ours.hits.mean()) > 0.98 and 0.8 < ours.detail < 1.25
    small = torch.nn.functional.interpolate(render(scenes, 128, details=True).images, (256, 256), mode="bilinear")
    blurred = positions.judge(net, count, small, scenes)
    assert float(blurred.hits.mean()) > 0.95 and blurred.detail < 0.5
    tiled = torch.nn.functional.interpolate(drawn, (128, 128), mode="area").repeat(1, 1, 2, 2)
    repeated = positions.judge(net, count, tiled, scenes)
    assert float(repeated.hits.mean()) < 0.7 and repeated.frechet > 2 * ours.frechet, "four heads are not one"
    assert ours.heads.tolist() == [1] * 24 and float((repeated.heads == 4).float().mean()) > 0.9
    assert float(ours.coarse.max()) < 1e-6 and float(repeated.coarse.mean()) > 0.1, (
        "the scene's own render is the measure"
    )


@pytest.mark.nightly
@pytest.mark.parametrize("side", [128, 192])
def test_heads_are_counted(count, side):
    """Held-out renders and tiles, with the shares the claim prints."""
    assert min(validation(count, 16, side).values()) > 0.9


@pytest.mark.nightly
def test_heads_of_a_wide_picture_and_of_none(count, scenes):
    pair = torch.cat(list(render(scenes[[0, 1]], 64).images), -1)
    ground = pair[:, :2, :2].mean((1, 2))[:, None, None].expand(3, 64, 128)
    assert count(torch.stack([pair, ground])).tolist() == [2, 0]


def test_wide_pictures_are_judged_by_their_middle():
    wide = torch.arange(320.0).expand(1, 3, 192, 320)
    assert positions.square(wide)[0, 0, 0].tolist() == list(map(float, range(64, 256)))


def test_arms_differ_and_the_enlarged_picture_is_the_trained_one(scenes):
    model = load_flow_portraits()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(positions, "STEPS", 2)
        drawn = {
            arm: positions.draw(model, arm, (160, 128), scenes[[0]], lambda *_: None)
            for arm in (positions.ENLARGED, positions.EXTRAPOLATED, "rope_yarn")
        }
    assert {tuple(images.shape) for images in drawn.values()} == {(1, 3, 128, 160)}
    assert not torch.equal(drawn[positions.EXTRAPOLATED], drawn["rope_yarn"])
