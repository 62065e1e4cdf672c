"""The other remedy: a prompt's embedding is moved until guidance pulls no more than usual; the model stays."""

from dataclasses import replace

import pytest
import torch
from diffusers import DDIMScheduler
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import FewStepConfig, FewStepSampler, SampleThreshold, value_sites
from vitrine.engine.nemo.adjust import AdjustConfig, Adjusted, adjust, first_timestep, recommended, usual_pull
from vitrine.engine.nemo.dose import UNTOUCHED, Dose, DoseCurve, DosePoint
from vitrine.engine.nemo.few_step_detection import Agreement
from vitrine.engine.network.condition import Condition
from vitrine_tests import models

SHAPE = (4, 16, 16)
KNOWN = SampleThreshold(1e3, 2e3, torch.ones(64, 64), 100, FewStepConfig())


@pytest.fixture(scope="module")
def sampler():
    net = models.unet(cross_attention_dim=models.TEXT).requires_grad_(False)
    texts = torch.randn(5, 5, models.TEXT, generator=torch.Generator().manual_seed(3))
    conds = [Condition(text[None]) for text in texts]
    denoiser, sites = Denoiser.from_diffusers(net, DDIMScheduler()), value_sites(net, "all")
    return FewStepSampler(denoiser, empty=conds[0], sites=sites, threshold=KNOWN, ordinary=conds[1:3])


def pull(sampler, cond):
    noise = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))[:1]
    return usual_pull(sampler.denoiser, [cond], sampler.empty, noise, first_timestep(sampler.denoiser))


def test_guidance_pulls_less_and_neither_the_model_nor_the_first_token_change(sampler):
    cond = Condition(3 * torch.randn(1, 5, models.TEXT, generator=torch.Generator().manual_seed(9)))
    weights = {name: value.clone() for name, value in sampler.denoiser.backbone.state_dict().items()}
    counted, bar = [], []
    handle = sampler.denoiser.backbone.register_forward_pre_hook(
        lambda _, args, kwargs: counted.append(len(args[0] if args else kwargs["sample"])), with_kwargs=True
    )
    try:
        config = AdjustConfig(fraction=0.05, noises=2, steps=6)
        adjusted = adjust(sampler, cond, SHAPE, config, lambda step, total, _: bar.append((step, total)))
    finally:
        handle.remove()
    assert pull(sampler, adjusted.condition) < 0.9 * pull(sampler, cond)
    moved = adjusted.condition.text
    assert torch.equal(moved[:, :1], cond.text[:, :1]) and not torch.allclose(moved, cond.text, atol=1e-3)
    assert all(torch.equal(value, weights[name]) for name, value in sampler.denoiser.backbone.state_dict().items())
    assert adjusted.rows == sum(counted) + 2 * 6 * 2, "a backward pass counts as two more evaluations"
    parts = {total: [step for step, of in bar if of == total] for _, total in bar}
    assert all(steps == sorted(steps) and steps[-1] == total for total, steps in parts.items()) and len(parts) == 2
    assert len(parts[max(parts)]) > 20, "samples are counted evaluation by evaluation"
    assert adjusted.point.copies == adjusted.point.samples == 12, "at this threshold everything agrees"
    assert f"{adjusted.rows} evaluations" in adjusted.text()
    left = pull(sampler, adjusted.condition) / pull(sampler, cond)
    assert 0 < adjusted.kept < 0.95 and abs(adjusted.kept - left) < 0.2 and f"{adjusted.kept:.0%}" in adjusted.text()
    with pytest.raises(VitrineError, match="captions"):
        adjust(replace(sampler, ordinary=()), cond, SHAPE)
    with pytest.raises(VitrineError, match="fraction"):
        AdjustConfig(fraction=0)


@pytest.mark.parametrize(
    ("untouched", "blocked", "moved", "words"),
    [
        (12, 0, 0, "blocking"),
        (12, 4, 0, "the adjusted embedding, for this prompt alone, which keeps 42%"),
        (12, 4, 3, "neither cures"),
        (12, 0, None, "blocking"),
        (12, 4, None, "adjust"),
        (0, 0, 0, "neither"),
    ],
)
def test_one_of_both_is_recommended(untouched, blocked, moved, words):
    """Of full samples: of the few-step ones none agrees in each case."""
    agreement = Agreement.of(torch.randn(4, *SHAPE), FewStepConfig(), KNOWN)
    curve = DoseCurve(DosePoint(UNTOUCHED, untouched, 12, 0.1, 0.0, 4, 4), agreement)
    curve = curve.with_point(DosePoint(Dose("found", {"a": (1,)}), 0, 12, 0.9, 0.1, blocked, 32), agreement, 96)
    other = None if moved is None else Adjusted(Condition(), DosePoint(UNTOUCHED, 0, 12, 0.9, 0, moved, 32), 1300, 0.42)
    assert recommended(curve, other).startswith(f"recommended: {words}")
    assert ("reduced" in recommended(curve, other)) is (words.startswith(("the adjusted", "adjust")))
