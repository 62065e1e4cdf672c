"""Sizes are read of each part of a CONDITIONING: two prompts, one after the other, with sizes of their own."""

import pytest
import torch
from vitrine.engine.control import GammaConfig, GuidanceConfig, SizeCondition
from vitrine.engine.errors import VitrineError
from vitrine_tests.comfy.controlled import NEGATIVE, POSITIVE, TOLD, close, latent, seeded, xl_twins

OTHER = SizeCondition(original=(64, 24), crop=(0, 16), target=(64, 64))
SECOND = [[seeded(1, 7, 24, seed=7), {"pooled_output": seeded(1, 20, seed=8)}]]


@pytest.fixture(scope="module")
def model(comfy):
    from vitrine.nodes.comfy.control import weighted

    return weighted(xl_twins().model, GammaConfig())


def sampled(model, positive, config, sigmas, start, noise, negative=NEGATIVE):
    from comfy import samplers
    from vitrine.nodes.comfy.control_guider import ControlGuider

    guider = ControlGuider(model, positive, negative, config)
    with torch.inference_mode():
        return guider.sample(noise, start, samplers.sampler_object("euler"), sigmas, seed=3).clone()


def parts(first, second, at=0.5):
    def ranged(conditioning, start, end):
        return [[text, settings | {"start_percent": start, "end_percent": end}] for text, settings in conditioning]

    return ranged(first, 0.0, at) + ranged(second, at, 1.0)


@pytest.mark.parametrize("config", [{}, {"nesting": "semantic_inner"}, {"negative_sizes": "positive"}], ids=str)
def test_two_prompts_one_after_the_other_have_their_own(model, config):
    from comfy import samplers
    from vitrine.nodes.comfy.conditioning import with_sizes

    config = GuidanceConfig(3.0, 1.5, **config)
    one, two = with_sizes(POSITIVE, TOLD, (64, 64)), with_sizes(SECOND, OTHER, (64, 64))
    sampling = model.get_model_object("model_sampling")
    sigmas = samplers.KSampler(model, 6, "cpu", "euler", "ddim_uniform").sigmas
    border = sampling.percent_to_sigma(0.5)
    count = int((sigmas > border).sum())
    assert 1 <= count <= 5
    empty, noise = latent()["samples"], torch.randn(1, 4, 8, 8, generator=torch.manual_seed(3))
    first = sampled(model, one, config, sigmas[: count + 1], empty, noise)
    wanted = sampled(model, two, config, sigmas[count:], first, torch.zeros_like(noise))
    same = with_sizes(SECOND, TOLD, (64, 64))
    other = sampled(model, same, config, sigmas[count:], first, torch.zeros_like(noise))
    assert not close(wanted, other), "the sizes have no effect here"
    assert close(sampled(model, parts(one, two), config, sigmas, empty, noise), wanted)


def test_a_negative_with_places_of_its_own_is_refused_beside_other_sizes(model):
    from vitrine.nodes.comfy.conditioning import same_control, with_sizes

    both = parts(with_sizes(POSITIVE, TOLD, (64, 64)), with_sizes(SECOND, OTHER, (64, 64)))
    with pytest.raises(VitrineError, match="negative"):
        same_control(parts(NEGATIVE, NEGATIVE), both, "negative")
    assert len(same_control(parts(NEGATIVE, NEGATIVE), both[:1], "negative")) == 2
