"""Few-step samples and how much they agree."""

import pytest
import torch
from diffusers import DDIMScheduler
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.diffusion.noise import seeded_noise
from vitrine.engine.diffusion.schedule import NoiseSchedule
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo.nearest import thumbnails
from vitrine.engine.nemo.picture_agreement import agreement, few_step_samples, few_timesteps
from vitrine.engine.network.condition import Condition
from vitrine_tests import models


def test_steps_are_those_of_diffusers_ddim():
    scheduler = DDIMScheduler(timestep_spacing="trailing", clip_sample=False, set_alpha_to_one=True)
    net = models.unet(sample_size=8)
    denoiser = Denoiser.from_diffusers(net, scheduler)
    times = few_timesteps(denoiser.schedule, 4)
    scheduler.set_timesteps(4)
    assert times == pytest.approx([999, 749.25, 499.5, 249.75])
    whole = [round(t) for t in (999, 749, 499, 249)]
    text = torch.randn(1, 5, net.config.cross_attention_dim, generator=torch.Generator().manual_seed(0))
    empty = Condition(torch.zeros_like(text))
    ours = few_step_samples(denoiser, [3, 4], (4, 8, 8), Condition(text), empty, 3.0, whole)
    x = seeded_noise([3, 4], (4, 8, 8))
    with torch.no_grad():
        for t in scheduler.timesteps:
            both = net(torch.cat([x, x]), t, torch.cat([text, text, 0 * text, 0 * text])).sample.chunk(2)
            x = scheduler.step(both[1] + 3 * (both[0] - both[1]), t, x).prev_sample
    torch.testing.assert_close(ours, x, rtol=0, atol=2e-3 * float(x.abs().max()))


def test_a_flow_ends_at_its_clean_prediction_and_is_shifted_as_published():
    schedule = NoiseSchedule.flow()
    assert few_timesteps(schedule, 2) == [1000, 500]
    assert few_timesteps(schedule, 2, 3.0) == pytest.approx([1000, 750])


def test_equal_samples_agree_and_unlike_ones_do_not():
    g = torch.Generator().manual_seed(0)
    coarse = torch.rand(6, 3, 8, 8, generator=g)
    pictures = torch.nn.functional.interpolate(coarse, (64, 64), mode="bilinear")
    usual = thumbnails(pictures)
    same = agreement(pictures[:1].expand(4, -1, -1, -1) + 0.01 * torch.randn(4, 3, 64, 64, generator=g), usual)
    other = agreement(pictures[:4], usual)
    assert same.median > 0.8 > 0.3 > other.median and len(same.similarity) == 6
    assert float(same.ratios.max()) < 1 / 3 < float(other.ratios.min())
    assert float(same.areas.min()) > 0.9 > 0.1 > float(other.areas.max())
    with pytest.raises(VitrineError, match="2 or more"):
        agreement(pictures[:1], usual)
