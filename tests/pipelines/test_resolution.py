"""The transfer around real pipelines of every family, at tiny size."""

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DiTPipeline,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    PixArtAlphaPipeline,
    StableDiffusion3Pipeline,
    StableDiffusionXLPipeline,
)
from vitrine.engine.diffusion.schedule import NoiseSchedule
from vitrine.engine.errors import VitrineError
from vitrine.engine.pipelines import ResolutionTransferPipeline
from vitrine.engine.portraits import load_portraits
from vitrine.engine.resolution import ResolutionTransferConfig, apply, facts_of, resample, transferred_copy
from vitrine_tests import models

pytestmark = pytest.mark.rounding
PROMPT = "a smiling pale face with curly red hair"


def rand(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def vae(channels=4):
    return models.vae(levels=2, latent_channels=channels, block_out_channels=(8, 8), norm_num_groups=4)


def portraits():
    pipe = load_portraits().pipeline()
    pipe.set_progress_bar_config(disable=True)
    return pipe, {"prompt": PROMPT, "num_inference_steps": 2, "output_type": "latent"}


def sdxl():
    unet = models.unet_xl(
        sample_size=32,
        cross_attention_dim=16,
        use_linear_projection=False,
        projection_class_embeddings_input_dim=12 + 48,
    )
    names = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    pipe = StableDiffusionXLPipeline(
        vae(), unet=unet, scheduler=EulerDiscreteScheduler(), **dict.fromkeys(names), add_watermarker=False
    )
    told = {"prompt_embeds": rand(1, 5, 16), "negative_prompt_embeds": rand(1, 5, 16, seed=1)}
    told |= {"pooled_prompt_embeds": rand(1, 12), "negative_pooled_prompt_embeds": rand(1, 12, seed=1)}
    return pipe, told | {"num_inference_steps": 3, "output_type": "latent"}


def pixart(size=16):
    net = models.pixart(
        sample_size=size,
        num_layers=1,
        attention_head_dim=8,
        caption_channels=12,
        cross_attention_dim=16,
    )
    pipe = PixArtAlphaPipeline(tokenizer=None, text_encoder=None, vae=vae(), transformer=net, scheduler=DDIMScheduler())
    told = {"prompt": None, "negative_prompt": None}
    told |= {"prompt_embeds": rand(1, 5, 12), "negative_prompt_embeds": rand(1, 5, 12, seed=1)}
    told |= {"prompt_attention_mask": torch.ones(1, 5), "negative_prompt_attention_mask": torch.ones(1, 5)}
    return pipe, told | {"num_inference_steps": 3, "output_type": "latent"}


def sd3():
    net = models.sd3(
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=12,
        pooled_projection_dim=16,
        pos_embed_max_size=24,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    names = [f"{kind}{n}" for kind in ("text_encoder", "tokenizer") for n in ("", "_2", "_3")]
    pipe = StableDiffusion3Pipeline(net, scheduler, vae(), **dict.fromkeys(names))
    told = {"prompt_embeds": rand(1, 5, 12), "negative_prompt_embeds": rand(1, 5, 12, seed=1)}
    told |= {"pooled_prompt_embeds": rand(1, 16), "negative_pooled_prompt_embeds": rand(1, 16, seed=1)}
    return pipe, told | {"num_inference_steps": 3, "output_type": "latent"}


def flux():
    net = models.flux(num_layers=1, joint_attention_dim=12, pooled_projection_dim=16)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    names = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    pipe = FluxPipeline(scheduler, vae(), transformer=net, **dict.fromkeys(names))
    told = {"prompt_embeds": rand(1, 5, 12), "pooled_prompt_embeds": rand(1, 16)}
    return pipe, told | {"num_inference_steps": 3, "output_type": "latent"}


FAMILIES = {
    "sd": (portraits, 64, "keep"),
    "sdxl": (sdxl, 64, "keep"),
    "pixart": (pixart, 32, "grid"),
    "sd3": (sd3, 32, "grid"),
    "flux": (flux, 32, "rope_pi"),
}


def run(pipe, told, **more):
    if getattr(pipe, "set_progress_bar_config", None):
        pipe.set_progress_bar_config(disable=True)
    if isinstance(pipe, PixArtAlphaPipeline):
        more = more | {"use_resolution_binning": False}
    with torch.no_grad():
        return pipe(**told | more, generator=torch.Generator().manual_seed(5)).images


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family):
    make, side, positions = FAMILIES[family]
    pipe, told = make()
    before = run(pipe, told, height=side, width=side)
    large = run(pipe, told, height=2 * side, width=side * 3 // 2)
    scheduler, tables = pipe.scheduler, [b for b in pipe.components.values() if isinstance(b, torch.nn.Module)]
    tables = [(b, b.data_ptr(), b.clone()) for module in tables for b in module.buffers()]
    train = (side, side)
    same = ResolutionTransferPipeline.from_pipe(pipe, ResolutionTransferConfig(train, train))
    assert torch.equal(run(same, told), before), "r = 1 is the untouched model"
    wide = ResolutionTransferPipeline.from_pipe(pipe, ResolutionTransferConfig((side * 3 // 2, 2 * side), train))
    assert wide.plan.positions == positions and wide.plan.schedule == "resample"
    moved = run(wide, told)
    assert moved.shape == large.shape and bool(torch.isfinite(moved).all()) and not torch.equal(moved, large)
    assert pipe.scheduler is scheduler and all(torch.equal(b, kept) for b, _, kept in tables)
    assert torch.equal(run(pipe, told, height=side, width=side), before), "and it is untouched again"
    assert torch.equal(run(pipe, told, height=2 * side, width=side * 3 // 2), large)
    copied, plan = transferred_copy(pipe, wide.transfer)
    assert torch.equal(run(copied, told, height=2 * side, width=side * 3 // 2), moved) and plan == wide.plan
    assert torch.equal(run(pipe, told, height=2 * side, width=side * 3 // 2), large), "the copy shares weights only"
    other = {"height": side, "width": side}  # the first pass of two
    with pytest.raises(VitrineError, match=f"latent size: given {side} x {side}"):
        run(copied, told, **other)
    with apply(pipe, wide.transfer), pytest.raises(VitrineError, match=f"latent size: given {side} x {side}"):
        run(pipe, told, **other)
    assert torch.equal(run(pipe, told, **other), before)


def test_resample_is_euler_on_the_moved_grid():
    pipe, told = portraits()
    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config, timestep_spacing="trailing")
    pipe.scheduler.set_timesteps(5)
    sigmas, told_t = resample(NoiseSchedule.from_diffusers(pipe.scheduler), pipe.scheduler.sigmas, 1.5)
    z = rand(1, 4, 24, 24)
    wide = ResolutionTransferPipeline.from_pipe(pipe, ResolutionTransferConfig((96, 96), guidance=3.0))
    found = wide(**told | {"num_inference_steps": 5}, latents=z).images
    with torch.no_grad():
        text, null = pipe.encode_prompt(PROMPT, "cpu", 1, True)
        x = z.double() * sigmas[0]
        for i, t in enumerate(told_t[:-1]):
            seen = (x / (1 + sigmas[i] ** 2).sqrt()).float()
            eps, base = (pipe.unet(seen, t.float(), c).sample.double() for c in (text, null))
            x = x + (base + 3.0 * (eps - base)) * (sigmas[i + 1] - sigmas[i])
    assert (found - x).abs().max() / x.abs().max() < 3e-5, "the pipeline keeps float32 latents, this loop float64"


def test_seeds_belong_to_pictures():
    pipe, told = portraits()
    wide = ResolutionTransferPipeline.from_pipe(pipe, ResolutionTransferConfig((96, 64)))
    both = wide(**told, seeds=[3, 4]).images
    torch.testing.assert_close(wide(**told, seeds=[4]).images[0], both[1], rtol=0, atol=5e-5)
    with pytest.raises(VitrineError, match="one size"):
        wide(**told, height=96)


def test_guidance_law_reaches_the_pipeline():
    pipe, told = portraits()
    train = ResolutionTransferConfig((128, 128), (64, 64), "none", guidance_law=True, guidance=2.0)
    found = ResolutionTransferPipeline.from_pipe(pipe, train)(**told, seeds=[1]).images
    seed = [torch.Generator().manual_seed(1)]
    wanted = pipe(**told, height=128, width=128, guidance_scale=3.0, generator=seed).images
    assert torch.equal(found, wanted)


def test_sd3_table_is_a_grid_with_one_shift():
    pipe, told = sd3()
    part, old = pipe.transformer.pos_embed, pipe.transformer.pos_embed.pos_embed
    facts = facts_of(pipe)
    assert facts.positions.kind == "stored" and facts.train_size == (32, 32) and facts.shift == 3
    with apply(pipe, ResolutionTransferConfig((64, 64))) as applied:
        assert applied.plan.shift == 6
        fine = part.pos_embed.reshape(16, 16, -1)[::2, ::2].reshape(1, 64, -1)
        assert (fine - old.reshape(24, 24, -1)[8:16, 8:16].reshape(1, 64, -1)).abs().max() < 1e-5
    assert part.pos_embed is old and part.pos_embed_max_size == 24 and part.height == 8
    sigmas = [1.0, 0.75, 0.5, 0.25]
    still = {"pos_embed": "keep", "train_size": (32, 32)}
    found = run(
        ResolutionTransferPipeline.from_pipe(pipe, ResolutionTransferConfig((48, 48), **still)), told, sigmas=sigmas
    )
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=4.5)
    wanted = run(pipe, told, sigmas=sigmas, height=48, width=48)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    with pytest.raises(VitrineError, match="at most 24"):
        apply(pipe, ResolutionTransferConfig((128, 128), **still))


def dit(size):
    net = models.dit(
        out_channels=8,
        num_layers=1,
        sample_size=size,
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_zero",
    )
    return DiTPipeline(net, vae(), DDIMScheduler())


def test_a_model_built_larger_extrapolates_unless_pinned():
    small, large = dit(32), dit(64)
    large.transformer.load_state_dict(small.transformer.state_dict())
    inputs = {
        "hidden_states": rand(2, 4, 64, 64),
        "timestep": torch.tensor([3, 400]),
        "class_labels": torch.tensor([1, 2]),
    }

    def out(pipe):
        with torch.no_grad():
            return pipe.transformer.eval()(**inputs).sample

    config = ResolutionTransferConfig((128, 128), (64, 64), "none")
    grid, silent = out(small), out(large)
    assert (grid - silent).abs().max() > 1e-4, "the trap"
    with apply(large, config) as applied:
        assert torch.equal(out(large), grid) and "would extrapolate" in applied.plan.summary
    assert torch.equal(out(large), silent)
    with apply(small, ResolutionTransferConfig((128, 128), (64, 64), "none", pos_embed="extrapolate")):
        assert torch.equal(out(small), silent)
    inputs["hidden_states"] = rand(2, 4, 32, 32)
    trained = out(small)
    assert (trained - out(large)).abs().max() > 1e-4, "wrong at the training size too, where r is 1"
    with apply(large, ResolutionTransferConfig((64, 64), (64, 64))):
        assert torch.equal(out(large), trained)
    inputs["hidden_states"] = rand(2, 4, 64, 64)
    same = ResolutionTransferConfig((128, 128), (128, 128))
    with apply(large, same):
        assert torch.equal(out(large), silent)
    made = ResolutionTransferPipeline.from_pipe(large, config)
    pictures = made(class_labels=[1], num_inference_steps=2, seeds=None, output_type="np").images
    assert pictures.shape == (1, 128, 128, 3)
    with pytest.raises(VitrineError, match="as built"):
        ResolutionTransferPipeline.from_pipe(small, config)(class_labels=[1])


def test_failures_leave_the_pipeline_alone():
    pipe, told = sd3()
    scheduler, old = pipe.scheduler, pipe.transformer.pos_embed.pos_embed
    with pytest.raises(RuntimeError, match="stop"), apply(pipe, ResolutionTransferConfig((64, 64))):
        raise RuntimeError("stop")
    for bad in ({"schedule": "relabel"}, {"pos_embed": "rope_pi"}):
        with pytest.raises(VitrineError):
            ResolutionTransferPipeline.from_pipe(pipe, ResolutionTransferConfig((64, 64), **bad))
    assert pipe.scheduler is scheduler and pipe.transformer.pos_embed.pos_embed is old
    assert not pipe.transformer.pos_embed._forward_pre_hooks


def test_a_second_transfer_is_refused():
    pipe, told = sd3()
    config = ResolutionTransferConfig((64, 64))
    first = ResolutionTransferPipeline.from_pipe(pipe, config)
    copied, _ = transferred_copy(pipe, config)
    for moved in (first, copied):
        with pytest.raises(VitrineError, match="already"):
            ResolutionTransferPipeline.from_pipe(moved, config)
    with apply(pipe, config), pytest.raises(VitrineError, match="already"):
        apply(pipe, config)
    with pytest.raises(VitrineError, match="already"):
        transferred_copy(copied, config)
    assert "_resolution_moved" not in vars(pipe)
    same = ResolutionTransferConfig(first.plan.config.target_size, first.plan.config.target_size)
    unmoved, _ = transferred_copy(pipe, same)
    ResolutionTransferPipeline.from_pipe(unmoved, config)
