"""The claim on a UNet's receptive field: its arms, what decides it, and that nothing stays on the network."""

import pytest
import torch
from vitrine.engine.portraits import load_portraits, sample_scenes
from vitrine.evidence.resolution import receptive
from vitrine.evidence.resolution.claims import SIDES, judged_field
from vitrine.evidence.resolution.positions import Look

pytestmark = pytest.mark.usefixtures("few_draws")


@pytest.mark.nightly
def test_every_arm_draws_another_picture_and_leaves_the_network(monkeypatch):
    monkeypatch.setattr(receptive, "STEPS", 2)
    model, scenes = load_portraits(), sample_scenes(range(2))
    convolutions = [m for m in model.unet.modules() if isinstance(m, torch.nn.Conv2d)]
    before = [m.dilation for m in convolutions]
    drawn = [receptive.draw(model, arm, 128, scenes, 1) for arm in receptive.ARMS]
    assert {tuple(images.shape) for images in drawn} == {(2, 3, 128, 128)}
    assert all(not torch.equal(drawn[i], drawn[j]) for i in range(5) for j in range(i))
    assert [m.dilation for m in convolutions] == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.unet.modules())
    assert torch.equal(receptive.draw(model, receptive.UNTOUCHED, 128, scenes, 1), drawn[1]), "of a seed, and again"


def look(hits, heads):
    ones = torch.ones(6)
    return Look(hits * ones + 0.01 * torch.arange(6), 1.0, 1.0, heads * ones, 0.1 * ones)


GOOD, PLAIN = (0.9, 1), (0.4, 4)


@pytest.mark.parametrize(
    ("second", "alone", "holds"),
    [(GOOD, GOOD, True), ((0.4, 1), GOOD, False), ((0.9, 4), GOOD, False), (GOOD, (0.4, 1), False)],
)
def test_the_claim_is_decided_by_attributes_under_every_seed_and_by_heads(second, alone, holds):
    dilated = {receptive.SECOND_DILATED: look(*second), receptive.DILATED: look(*alone)}
    arms = dict.fromkeys((receptive.SECOND, receptive.UNTOUCHED), look(*PLAIN)) | dilated
    result = judged_field(dict.fromkeys(SIDES, arms), 3, {"renders": 1.0})
    assert result.holds is holds and all(result.parts.values()) is holds
    gains = result.details["a second pass, 128 px: 95 % interval of the gain in shown attributes"]
    assert len(gains["by seed"]) == 3
