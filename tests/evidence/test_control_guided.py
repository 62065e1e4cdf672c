"""Pictures under Eq. 2 are those of plain guidance where Eq. 2 is plain guidance, and detail is what it says."""

import pytest
import torch
from vitrine.engine.control import GuidanceConfig
from vitrine.engine.portraits import render, sample_scenes
from vitrine.evidence.control.controlled_transformer import ControlledTransformer
from vitrine.evidence.control.entropy import ARMS, Arm, draw
from vitrine.evidence.control.guided import draw_guided
from vitrine.evidence.control.prompts import prompts_of
from vitrine.evidence.metrics import fine_detail


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


def test_entropy_guidance_is_plain_guidance_where_nothing_is_weakened(model, no_hooks_left):
    _, prompts, seeds = prompts_of(2)
    plain = model.draw(prompts, seeds, steps=3, guidance=2.0)
    arms = {"same": Arm(2.0, 1.0, empty=True), "both": Arm(2.0, 0.01, empty=True), "weak": Arm(2.0, 0.01)}
    drawn = {name: draw(model, arm, prompts, seeds, rows=6) for name, arm in arms.items()}
    assert torch.equal(drawn["same"], plain)
    assert min(float((drawn[name] - plain).abs().max()) for name in ("both", "weak")) > 1e-3
    nothing = draw(model, Arm(2.0, 1.0), prompts, seeds, rows=6)
    assert (nothing - model.draw(prompts, seeds, steps=3, guidance=1.0)).abs().max() < 1e-3, "away from itself"
    assert [arm.evaluations for arm in ARMS.values()] == [1, 2, 2, 3, 2, 2, 2]
    no_hooks_left(model.transformer)


def test_fine_detail_is_lost_by_enlarging():
    images = render(sample_scenes(range(8_660_000, 8_660_004))).images
    small = torch.nn.functional.interpolate(images, (32, 32), mode="area")
    enlarged = torch.nn.functional.interpolate(small, (64, 64), mode="bilinear")
    assert fine_detail(images).shape == (4,) and bool((fine_detail(enlarged) < fine_detail(images) / 3).all())
