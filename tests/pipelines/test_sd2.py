"""SD2: a network that predicts velocity. It is one that predicts noise, rewritten, so every method has to agree.

Shaped as SD2 (linear projections, heads by width), with random weights. The second network gives
v = (eps - sigma x) / alpha of the first's eps (Salimans & Ho 2022, section 4, solved for v), so both are one model.
"""

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput
from vitrine.engine.emd import StudentPreset
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import NeuronSet, ProbeConfig, SearchConfig, fingerprint_of, value_sites
from vitrine.engine.pipelines import (
    ActivationTapPipeline,
    ControlConditionedPipeline,
    CorrespondencePipeline,
    EMDOneStepPipeline,
    NEMOPipeline,
    ResolutionTransferPipeline,
    SegmentationPipeline,
    W2WPipeline,
)
from vitrine.engine.resolution import ResolutionTransferConfig
from vitrine.engine.tracing.fingerprint import width_of
from vitrine.engine.w2w import InvertConfig
from vitrine_tests import models
from vitrine_tests.machine.stock import WIDTH, _parts
from vitrine_tests.pipelines.test_w2w_around import space_on

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
PROMPT = "a smiling pale face with curly red hair"
HOW = {"num_inference_steps": 4, "guidance_scale": 2.0, "output_type": "latent", "height": 64, "width": 64}
SHAPE = {"use_linear_projection": True, "attention_head_dim": (2, 4), "cross_attention_dim": WIDTH}
PLACE = "up-level1-repeat0-vit-block0-out"


_KEPT = DDIMScheduler(**BETAS).alphas_cumprod


class Velocity(UNet2DConditionModel):
    """The same weights, asked for v."""

    def forward(self, sample, timestep, *args, **kwargs):
        eps = super().forward(sample, timestep, *args, **kwargs | {"return_dict": False})[0]
        kept = _KEPT[torch.as_tensor(timestep).long().reshape(-1)].view(-1, 1, 1, 1)
        v = (eps - (1 - kept).sqrt() * sample) / kept.sqrt()
        return UNet2DConditionOutput(v) if kwargs.get("return_dict", True) else (v,)


def pipeline(kind, prediction):
    parts = _parts(12)
    net = models.unet(**SHAPE)
    if kind is not UNet2DConditionModel:
        net = models.seeded(kind, dict(net.config), 0)
        net.load_state_dict(models.unet(**SHAPE).state_dict())
    scheduler = DDIMScheduler(prediction_type=prediction, clip_sample=False, set_alpha_to_one=False, **BETAS)
    pipe = StableDiffusionPipeline(
        parts.vae, parts.text_encoder, parts.tokenizer, net, scheduler, None, None, requires_safety_checker=False
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def both():
    return pipeline(UNet2DConditionModel, "epsilon"), pipeline(Velocity, "v_prediction")


def pictures(count=2):
    return torch.rand(count, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def agree(a, b, limit=2e-5):
    return float((a - b).abs().max()) <= limit * max(1.0, float(b.abs().max()))


def drawn(pipe, **more):
    return pipe(PROMPT, generator=[torch.Generator().manual_seed(3)], **HOW, **more).images


def neurons(pipe):
    net = pipe.unet
    return NeuronSet({s.address: tuple(range(width_of(net, s) // 2)) for s in value_sites(net)}, fingerprint_of(net))


def test_they_are_one_model(both):
    eps, v = (drawn(pipe) for pipe in both)
    assert agree(v, eps) and float(eps.std()) > 0.1


def test_taps_matches_and_masks(both):
    images, how = pictures(), {"timestep": 261, "seeds": (0, 1)}
    eps, v = (ActivationTapPipeline.from_pipe(p).tap(images, PROMPT, PLACE, **how).activations[PLACE] for p in both)
    assert agree(v.tensor, eps.tensor) and eps.grid == v.grid
    found = [
        CorrespondencePipeline.from_pipe(p).match(images[:1], images, [[0.25, 0.75]], addresses=[PLACE], **how)
        for p in both
    ]
    assert all(agree(b.points, a.points, 1e-3) for a, b in zip(*found, strict=True))
    masks = torch.zeros(2, 64, 64, dtype=torch.long)
    masks[:, :, 32:] = 1
    eps, v = (SegmentationPipeline.from_pipe(p).segment(images, masks, images, addresses=[PLACE], **how) for p in both)
    assert float((eps == v).float().mean()) > 0.99 and set(eps.unique().tolist()) == {0, 1}


@pytest.mark.nightly
def test_nemo_blocks_scores_and_searches(both):
    captions, probe = ["a cat", "a smiling face", "a horse on blue"], ProbeConfig(seeds=2, timestep_index=1)
    blocked, results = [], []
    for source in both:
        pipe = NEMOPipeline.from_pipe(source)
        assert torch.equal(drawn(pipe), drawn(source))
        blocked.append(drawn(pipe, neurons=neurons(pipe)))
        assert not agree(blocked[-1], drawn(source), 1e-3)
        scores = [s.value for s in pipe.detect(captions, None, "one step", probe)]
        calibration = pipe.calibrate(captions, ["statistics"])
        (found,) = pipe.find([PROMPT], calibration, SearchConfig(tau=1e-6, k_step=8), probe)
        results.append((scores, found.neurons("").neurons, found.after.value))
    assert agree(blocked[1], blocked[0])
    (eps_scores, eps_set, eps_after), (v_scores, v_set, v_after) = results
    assert torch.allclose(torch.tensor(v_scores), torch.tensor(eps_scores), atol=1e-4)
    assert v_set == eps_set and abs(v_after - eps_after) < 1e-4


def test_a_person_is_drawn_and_found(both):
    space = space_on(both[0].unet)
    people, losses = [], []
    for source in both:
        pipe = W2WPipeline.from_pipe(source)
        person = pipe.sample_models(space, [4])
        people.append(drawn(pipe, space=space, model=person))
        assert not agree(people[-1], drawn(source), 1e-3)
        model, history = pipe.invert_image(space, pictures(1), PROMPT, InvertConfig(steps=4, check_every=1000))
        assert bool(torch.isfinite(model.coefficients).all()) and float(model.coefficients.abs().max()) > 0
        losses.append(history)
    assert agree(people[1], people[0])


def test_one_step(both):
    how = {"preset": StudentPreset(timestep=999.0), "output_type": "latent"}
    once = [EMDOneStepPipeline.from_pipe(p)(PROMPT, [0, 1], **how).images for p in both]
    assert agree(once[1], once[0], 1e-4)


def test_another_size(both):
    trained, wide = (64, 64), (96, 64)
    results = []
    for source in both:
        how = {k: v for k, v in HOW.items() if k not in ("height", "width")}
        call = {"generator": torch.Generator().manual_seed(3)}
        same = ResolutionTransferPipeline.from_pipe(source, ResolutionTransferConfig(trained, trained))
        plain = source(PROMPT, **how, height=64, width=64, generator=torch.Generator().manual_seed(3)).images
        assert torch.equal(same(PROMPT, **how, **call).images, plain)
        moved = ResolutionTransferPipeline.from_pipe(source, ResolutionTransferConfig(wide, trained))
        results.append(moved(PROMPT, **how, generator=torch.Generator().manual_seed(3)).images)
    # moved noise levels lie between two timesteps; the network is told the nearer one, at which its v is meant
    assert results[0].shape[-2:] == (16, 24) and agree(results[1], results[0], 1e-3)


def test_sizes_cannot_be_told_to_a_model_that_never_heard_of_them(both):
    from vitrine.engine.control import GammaConfig
    from vitrine.engine.control.size_condition import SizeCondition

    with pytest.raises(VitrineError, match="size"):
        pipe = ControlConditionedPipeline.from_pipe(both[1])
        pipe(PROMPT, gamma=GammaConfig(), size_condition=SizeCondition((64, 64)), **HOW)
