"""Pictures under Eq. 2 are those of plain guidance where Eq. 2 is plain guidance, and detail is what it says."""

import pytest
import torch
from vitrine.engine.control import GuidanceConfig
from vitrine.engine.errors import VitrineError
from vitrine.engine.portraits import render, sample_scenes
from vitrine.evidence.control.controlled_transformer import ControlledTransformer
from vitrine.evidence.control.guided import draw_guided
from vitrine.evidence.control.prompts import prompts_of
from vitrine.evidence.metrics import fine_detail
from vitrine.evidence.metrics.cross_size import cross_size_consistency, rms_distance


@pytest.fixture(scope="module")
def model():
    return ControlledTransformer.open("power-cosine")


def test_without_control_guidance_it_is_plain_guidance(model, no_hooks_left):
    _, prompts, seeds = prompts_of(3)
    plain = model.draw(prompts, seeds, steps=4, guidance=2.0)
    ours = draw_guided(model, prompts, seeds, GuidanceConfig(2.0, 1.0, skip_below=0.0), steps=4)
    assert (plain - ours).abs().max() < 1e-4
    stronger = draw_guided(model, prompts, seeds, GuidanceConfig(2.0, 1.375), steps=4)
    assert (stronger - ours).abs().max() > 1e-3


def test_fine_detail_is_lost_by_enlarging():
    images = render(sample_scenes(range(8_660_000, 8_660_004))).images
    small = torch.nn.functional.interpolate(images, (32, 32), mode="area")
    enlarged = torch.nn.functional.interpolate(small, (64, 64), mode="bilinear")
    assert fine_detail(images).shape == (4,) and bool((fine_detail(enlarged) < fine_detail(images) / 3).all())


def test_the_meter_is_zero_without_effect_and_means_over_pairs():
    sizes = [(64, 64), (128, 128), (256, 256)]
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    assert cross_size_consistency(lambda s: x, sizes).mean == 0.0
    measured = cross_size_consistency(lambda s: x + s[0] / 64, sizes)
    table = measured.distances
    assert table.shape[:2] == (3, 3) and torch.allclose(table, table.transpose(0, 1))
    assert abs(measured.mean - (1 + 3 + 2) / 3) < 1e-6 and measured.each.shape == (2,)
    other = cross_size_consistency(lambda s: x, sizes, lambda a, b: torch.full((2,), 0.25))
    assert other.mean == 0.25
    enlarged = lambda s: x.repeat_interleave(s[0] // 64, -1).repeat_interleave(s[1] // 64, -2)  # noqa: E731
    assert cross_size_consistency(enlarged, sizes).mean < 1e-6 and float(rms_distance(x, x + 2)[0]) == pytest.approx(2)
    for bad in ([(64, 64)], [(64, 64), (64, 64)]):
        with pytest.raises(VitrineError, match="sizes"):
            cross_size_consistency(lambda s: x, bad)
