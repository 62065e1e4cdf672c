"""Both ends of the noise schedule: finite and equal in both libraries; what is no number stops the work.

The families of transformers are in ``test_family_models``.
"""

import copy
from dataclasses import replace

import pytest
import torch
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo.noise_similarity import Score
from vitrine.engine.network.condition import Condition
from vitrine.engine.runtime.finite import FiniteLosses, require_finite
from vitrine_tests.comfy.controlled import POOLED, POSITIVE, TEXT, TOLD, pixart_twins, xl_twins
from vitrine_tests.comfy.guided_graphs import NEURONS


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def agree(model, conditioning, denoiser, cond, x, bound=2e-5):
    """Predictions of a MODEL and of its diffusers twin at t = 0, 1 and the two last timesteps."""
    from vitrine.nodes.comfy.conditioning import condition_of
    from vitrine.nodes.comfy.model import denoiser_of

    with torch.inference_mode():
        theirs, told = denoiser_of(model), condition_of(model, conditioning, x)
        for t in (0.0, 1.0, 998.0, float(theirs.schedule.last)):
            with torch.no_grad():
                one, other = denoiser.predict(x, t, cond), theirs.predict(x, t, told)
            for a, b in zip(one, other, strict=True):
                assert bool(torch.isfinite(a).all()) and bool(torch.isfinite(b).all()), t
                assert (a - b).abs().max() <= bound * max(1.0, float(a.abs().max())), t


def test_portraits(comfy):
    from vitrine.engine.portraits import load_portraits

    model, clip, _ = comfy.call("VitrineLoadPortraits")
    portraits = load_portraits()
    with torch.inference_mode():
        told = clip.encode_from_tokens_scheduled(clip.tokenize("a smiling face"))
    cond = Condition(portraits.encode(["a smiling face"]))
    agree(model, told, Denoiser.from_diffusers(portraits.unet, portraits.scheduler), cond, noise(1, 4, 16, 16), 2e-4)


def test_flow_portraits(comfy):
    from vitrine.nodes.comfy.conditioning import condition_of
    from vitrine.nodes.comfy.model import denoiser_of

    model, clip, _ = comfy.call("VitrineLoadPortraits", model="flow portraits, 128 px")
    with torch.inference_mode():
        told = clip.encode_from_tokens_scheduled(clip.tokenize("a smiling face"))
        x, denoiser = noise(2, 16, 16, 16), denoiser_of(model)
        cond = condition_of(model, told, x)
        at_zero, near = denoiser.predict(x, 0.0, cond), denoiser.predict(x, 0.01, cond)
        assert torch.equal(at_zero.x0, x) and bool(torch.isfinite(at_zero.eps).all())
        assert torch.allclose(at_zero.eps, near.eps, atol=1e-2)
        assert "calculate_denoised" not in vars(model.get_model_object("model_sampling"))


@pytest.mark.parametrize("terminal", [False, True], ids=["SD's betas", "zero terminal SNR"])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_xl(comfy, terminal, prediction):
    from diffusers import DDIMScheduler

    twins = xl_twins()
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    scheduler = DDIMScheduler(**betas, prediction_type=prediction, rescale_betas_zero_snr=terminal)
    model = twins.model
    if (terminal, prediction) != (False, "epsilon"):
        if prediction == "epsilon":
            pytest.skip("no noise is left to predict a picture from at zero SNR")
        from comfy_extras.nodes_model_advanced import ModelSamplingDiscrete

        model = ModelSamplingDiscrete().patch(model, "v_prediction", terminal)[0]
    sizes = torch.tensor([[*TOLD.original, *TOLD.crop, 64, 64]], dtype=torch.float32)
    cond = Condition(TEXT, POOLED, {"time_ids": sizes})
    from vitrine.nodes.comfy.conditioning import with_sizes

    told = with_sizes(POSITIVE, TOLD, (64, 64))
    denoiser = Denoiser.from_diffusers(twins.pipe.unet, scheduler)
    # at zero SNR ComfyUI's table ends at sigma 4518, ours at 2^20: one picture to a thousandth
    agree(model, told, denoiser, cond, noise(1, 4, 8, 8), 2e-3 if terminal else 5e-4)


def test_pixart(comfy):
    twins = pixart_twins()
    mask = torch.ones(1, 7)
    sizes = {"resolution": torch.tensor([[512.0, 512.0]]), "aspect_ratio": torch.tensor([[1.0]])}
    cond = Condition(TEXT, None, {"encoder_attention_mask": mask, **sizes})
    denoiser = Denoiser.from_diffusers(twins.pipe.transformer, twins.pipe.scheduler)
    agree(twins.model, [[TEXT, {}]], denoiser, cond, noise(1, 4, 64, 64), 5e-4)


# --- numbers that are not -----------------------------------------------------------------------------------------
def test_no_score_of_nan():
    with pytest.raises(VitrineError, match="score"):
        Score(torch.tensor([0.5, float("nan")]), 0.5)
    with pytest.raises(VitrineError, match="figure"):
        require_finite(torch.tensor([1.0, float("inf")]), "figure")


def test_a_loss_stops_at_once():
    losses = FiniteLosses("loss")
    losses.see(torch.tensor([1.0, 2.0]))
    with pytest.raises(VitrineError, match="loss"):
        losses.see(torch.tensor(float("nan")))


def spoilt(denoiser, from_call):
    """The denoiser, whose network puts out NaN from one of its calls on."""
    calls = []

    def call(x, t, cond):
        calls.append(1)
        out = denoiser.call(x, t, cond)
        return out if len(calls) < from_call else out * float("nan")

    return replace(denoiser, call=call)


def test_an_inversion_stops_at_its_first_loss_that_is_none():
    """And keeps what was best before: it used to go on, and to return that as its result."""
    from vitrine.engine.portraits import load_portraits
    from vitrine.engine.portraits.shipped import PEOPLE_SPACE
    from vitrine.engine.w2w import InvertConfig, load_space
    from vitrine.engine.w2w.edit.inversion import invert, partial_inversion

    portraits = load_portraits()
    denoiser = Denoiser.from_diffusers(portraits.unet, portraits.scheduler)
    cond, config = Condition(portraits.encode(["a face"])), InvertConfig(None, 6, 0.1, 2, check_every=1)
    with pytest.raises(VitrineError, match="inversion's loss") as caught:
        invert(spoilt(denoiser, 6), load_space(PEOPLE_SPACE), noise(1, 4, 16, 16), cond, config)
    partial = partial_inversion(caught.value)
    assert partial.interrupted and [step for step, _ in partial.losses] == [1, 2]
    assert all(bool(torch.isfinite(torch.tensor(row)).all()) for _, row in partial.losses)
    assert bool(torch.isfinite(partial.coefficients).all())


def test_a_verdict_is_never_made_of_nan(comfy):
    from vitrine.engine.nemo import AttackConfig, ProbeConfig, VerifyConfig, make_probe, verify
    from vitrine.engine.portraits import load_portraits

    portraits = load_portraits()
    denoiser = Denoiser.from_diffusers(portraits.unet, portraits.scheduler)
    cond, shape = Condition(portraits.encode(["a face"])), (4, 16, 16)
    for bad, words in ((1, "score"), (4, "embedding")):
        probe = make_probe(spoilt(denoiser, bad), "all", ProbeConfig(seeds=2, timestep_index=4))
        config = VerifyConfig(0.5, 101, AttackConfig(steps=4, batch=2))
        with pytest.raises(VitrineError, match=words):
            verify(probe, cond, copy.copy(NEURONS), shape, config, reference=noise(1, *shape))
