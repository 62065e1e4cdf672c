"""Entropy rectifying guidance: the guider in real ComfyUI and the pipeline give one picture; off is the model."""

import copy

import pytest
import torch
from vitrine.engine.control import EntropyConfig
from vitrine.engine.control.entropy_guidance import query_sites
from vitrine.engine.diffusion.guidance import guide
from vitrine.engine.errors import VitrineError
from vitrine.engine.pipelines import EntropyGuidedPipeline
from vitrine.engine.portraits import load_portraits
from vitrine.engine.portraits.flow import load_flow_portraits
from vitrine_tests import models
from vitrine_tests.comfy.twin_tools import euler_sigmas
from vitrine_tests.families.twin import network

PROMPT, STEPS = "a smiling pale face with curly red hair glasses navy shirt on yellow", 4


@pytest.fixture(scope="module")
def portraits(comfy):
    model, clip, _ = comfy.call("VitrineLoadPortraits")
    encode = lambda text: clip.encode_from_tokens_scheduled(clip.tokenize(text))  # noqa: E731
    with torch.inference_mode():
        return model, encode(PROMPT), encode("")


def noise():
    return torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(3))


def guided(guider):
    from comfy import samplers

    sigmas = samplers.KSampler(guider.model_patcher, STEPS, "cpu", "euler", "normal").sigmas
    with torch.inference_mode():
        return guider.sample(noise(), torch.zeros(1, 4, 16, 16), samplers.sampler_object("euler"), sigmas, seed=3)


def node(comfy, portraits, weak=None, **settings):
    model, positive, _ = portraits
    given = {"cfg": 3.0, "tau": 0.01, "places": "*-self-q", "start_timestep": 1000} | settings
    told = {} if weak is None else {"weak": weak}
    return guided(comfy.call("VitrineEntropyGuider", model=model, positive=positive, **given, **told)[0])


def core(portraits, cfg):
    """ComfyUI's own guider."""
    from comfy import samplers

    guider = samplers.CFGGuider(portraits[0])
    guider.set_conds(portraits[1], portraits[2])
    guider.set_cfg(cfg)
    return guided(guider)


def pipeline(config, **told):
    from diffusers import EulerDiscreteScheduler

    pipe = load_portraits().pipeline()
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    sigmas = euler_sigmas(pipe.scheduler, "normal", STEPS)
    pipe.scheduler.set_timesteps(sigmas=sigmas)
    start = (1 + sigmas[0] ** 2) ** 0.5 / pipe.scheduler.init_noise_sigma
    larger = EntropyGuidedPipeline.from_pipe(pipe, config)
    return larger(PROMPT, sigmas=sigmas, latents=noise() * start, output_type="latent", **told).images


@pytest.mark.parametrize(
    ("settings", "negative"),
    [({}, None), ({"tau": 0.3, "places": "mid-*-self-q"}, None), ({"start_timestep": 600}, None), ({}, "")],
    ids=["whole run", "middle", "late", "with an empty prompt"],
)
def test_the_node_and_the_pipeline_give_one_picture(comfy, portraits, settings, negative):
    found = node(comfy, portraits, weak=portraits[2] if negative == "" else None, **settings)
    told = {} if negative is None else {"negative_prompt": negative}
    scale = load_portraits().vae.config.scaling_factor
    wanted = pipeline(EntropyConfig(3.0, **{"tau": 0.01} | settings), **told)
    unguided = core(portraits, 1.0)
    assert min(float((found - w).abs().max()) for w in (wanted, wanted / scale)) < 1e-5 * float(wanted.abs().max())
    assert float((found - unguided).abs().max()) > 0.01


def test_off_is_the_model_itself(comfy, portraits):
    for off in ({"cfg": 1.0}, {"tau": 1.0}, {"start_timestep": 0}):
        assert torch.equal(node(comfy, portraits, **off), core(portraits, 1.0)), off
    assert torch.equal(node(comfy, portraits, tau=1.0, weak=portraits[2]), core(portraits, 3.0)), "ordinary guidance"
    node(comfy, portraits)
    assert torch.equal(core(portraits, 3.0), core(portraits, 3.0))
    plain = pipeline(EntropyConfig(1.0))
    assert torch.equal(pipeline(EntropyConfig(3.0, tau=1.0)), plain)


def test_the_weakened_network_is_the_one_with_smaller_query_weights():
    """softmax(tau Q K^T): tau on the projection's weights instead, in a copy; first step by hand."""
    unet, seen = load_portraits().unet, []
    weak = copy.deepcopy(unet)
    for name, parameter in weak.named_parameters():
        if name.endswith("attn1.to_q.weight"):
            parameter.data.mul_(0.2)
    unet_forward = lambda net, x, t, text: net(x, t, encoder_hidden_states=text).sample  # noqa: E731
    base = load_portraits()
    text = base.encode([PROMPT])
    pipe = base.pipeline()
    pipe.set_progress_bar_config(disable=True)
    start, timestep = noise(), None

    def keep(pipe_, step, t, tensors):
        seen.append((t, tensors["latents"]))
        return {}

    with torch.no_grad():
        EntropyGuidedPipeline(pipe, EntropyConfig(3.0, tau=0.2))(
            PROMPT, latents=start, num_inference_steps=2, output_type="latent", callback_on_step_end=keep
        )
        timestep, found = seen[0]
        eps = guide(*(unet_forward(net, start, timestep, text) for net in (weak, base.unet)), 3.0)
        wanted = pipe.scheduler.step(eps, timestep, start).prev_sample
    assert float((found - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())


def test_what_it_cannot_do_is_refused_first(comfy, portraits):
    flow = load_flow_portraits().pipeline()
    with pytest.raises(VitrineError, match="FluxPipeline"):
        EntropyGuidedPipeline(flow, EntropyConfig(2.0))
    model, clip, _ = comfy.call("VitrineLoadPortraits", model="flow portraits, 128 px")
    with torch.inference_mode():
        positive = clip.encode_from_tokens_scheduled(clip.tokenize(PROMPT))
    settings = {"cfg": 2.0, "tau": 0.01, "start_timestep": 1000}
    with pytest.raises(VitrineError, match="normalised"):
        comfy.call("VitrineEntropyGuider", model=model, positive=positive, places="*-q", **settings)
    with pytest.raises(VitrineError, match="queries of attention"):
        node(comfy, portraits, places="*-self-v")
    for net, said in ((models.sd3(), "reads text and picture at once"), (network("sd35"), "are normalised"),
                      (network("hidream"), "are normalised"), (network("flux"), "are normalised")):  # fmt: skip
        with pytest.raises(VitrineError, match=said):
            query_sites(net, EntropyConfig(2.0))
    pipe = load_portraits().pipeline()
    for wrong in ({"scale": float("nan")}, {"tau": -1.0}, {"start_timestep": 1001}):
        with pytest.raises(VitrineError):
            EntropyConfig(**wrong)
    with pytest.raises(VitrineError, match="EntropyConfig"):
        EntropyGuidedPipeline(pipe, EntropyConfig(2.0))(PROMPT, guidance_scale=3.0)


@pytest.mark.parametrize("kind", ["SDXL", "PixArt"])
def test_encoded_prompts_of_sdxl_and_pixart(kind):
    """The stock pipelines: the weakened rows see the prompt, and the change is seen."""
    from diffusers import DDIMScheduler, PixArtAlphaPipeline, StableDiffusionXLPipeline

    seeded = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(1))  # noqa: E731
    if kind == "SDXL":
        unet = models.unet_xl(
            sample_size=8, block_out_channels=(32, 64), norm_num_groups=32, addition_time_embed_dim=256
        )
        none = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
        pipe = StableDiffusionXLPipeline(models.vae(), unet=unet, scheduler=DDIMScheduler(), **none)
        told = {"prompt_embeds": seeded(1, 7, 24), "pooled_prompt_embeds": seeded(1, 20)}
    else:
        net = models.pixart(sample_size=8)
        pipe = PixArtAlphaPipeline(None, None, models.vae(), net, DDIMScheduler())
        width = net.config.caption_channels
        told = {"prompt_embeds": seeded(1, 7, width), "prompt_attention_mask": torch.ones(1, 7)}
        told |= {"use_resolution_binning": False, "negative_prompt": None}
    pipe.set_progress_bar_config(disable=True)
    told |= {"num_inference_steps": 2, "output_type": "latent", "height": 64, "width": 64}
    off, same, on = (
        EntropyGuidedPipeline(pipe, config)(**told, seeds=[0]).images
        for config in (EntropyConfig(1.0), EntropyConfig(3.0, tau=1.0), EntropyConfig(3.0, tau=0.0))
    )
    assert torch.equal(off, same) and bool(torch.isfinite(on).all())
    assert float((on - off).abs().max()) > 1e-4
