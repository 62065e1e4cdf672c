"""Checks of gdf.md section 7 that compare whole extractions with plain code, and mutants that must not slip through."""

from dataclasses import replace

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionImg2ImgPipeline,
)
from vitrine.engine.activations import TapConfig, tap_latents
from vitrine.engine.activations.picture_latents import encode_pixels
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.network.condition import Condition
from vitrine.engine.tracing.addresses import sites_of
from vitrine.engine.tracing.hooks import capture
from vitrine_tests import models

pytestmark = pytest.mark.rounding
SCHEDULE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
BY_HAND = {
    "down-level0-repeat0-res-increment": "down_blocks.0.resnets.0.conv2",
    "mid-repeat1-res-out": "mid_block.resnets.1",
    "up-level0-repeat1-res-out": "up_blocks.0.resnets.1",
    "up-level1-repeat1-vit-block0-cross-q": "up_blocks.1.attentions.1.transformer_blocks.0.attn2.to_q",
    "up-level3-repeat2-vit-out": "up_blocks.3.attentions.2",
}
"""Address -> the module GDF's official code reads, named here by hand."""


@pytest.fixture(scope="module")
def unet():
    return models.unet(
        sample_size=32,
        block_out_channels=(16, 32, 32, 32),
        layers_per_block=2,
        cross_attention_dim=32,
        attention_head_dim=2,
    )


@pytest.fixture(scope="module")
def vae():
    return models.vae(block_out_channels=(8, 8, 8, 8), norm_num_groups=4)


def by_hand(unet, vae, pixels, text, seed=3, timestep=51, sample=True):
    """Posterior sample, then noise, from one generator for each picture; full forward; bare torch hooks; fp16."""
    posterior = vae.encode(pixels).latent_dist
    g = torch.Generator().manual_seed(seed)
    first, second = (torch.randn(posterior.mean.shape[1:], generator=g) for _ in range(2))
    z = (posterior.mean + posterior.std * first if sample else posterior.mean) * vae.config.scaling_factor
    abar = DDIMScheduler(**SCHEDULE).alphas_cumprod[timestep].double()
    x = (abar.sqrt() * z + (1 - abar).sqrt() * second).float()
    seen, handles = {}, []
    for address, path in BY_HAND.items():

        def hook(module, args, output, address=address):
            value = output[0] if isinstance(output, tuple) else getattr(output, "sample", output)
            seen[address] = value

        handles.append(unet.get_submodule(path).register_forward_hook(hook))
    unet(x, timestep, encoder_hidden_states=text.expand(len(x), -1, -1))
    for handle in handles:
        handle.remove()
    tokens = {a: v for a, v in seen.items() if v.ndim == 3}
    seen |= {a: v.transpose(1, 2).unflatten(2, (int(v.shape[1] ** 0.5),) * 2) for a, v in tokens.items()}
    return {a: v.half() for a, v in seen.items()}


@pytest.fixture(scope="module")
def case(unet, vae):
    pixels = torch.rand(2, 3, 256, 256, generator=torch.Generator().manual_seed(4)) * 2 - 1
    text = torch.randn(1, 77, 32, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return pixels, text, by_hand(unet, vae, pixels, text)


def ours(unet, vae, pixels, text, **changes):
    settings = {"timestep": 51.0, "seeds": (3,), "dtype": "float16", "posterior": "sample"} | changes
    config = TapConfig(tuple(BY_HAND), **settings)
    latents = encode_pixels(vae, pixels, config.posterior, 3)
    return tap_latents(Denoiser.from_diffusers(unet, DDIMScheduler(**SCHEDULE)), latents, Condition(text), config)


def agree(taps, expected):
    return all(torch.allclose(taps[a].tensor.float(), v.float(), atol=2e-3, rtol=2e-3) for a, v in expected.items())


def test_an_extraction_is_the_published_one(unet, vae, case):
    """Checks 1 and 5: same posterior sample, same noise, timestep 51 (GDF's 50 under PNDM), equal in float16."""
    pixels, text, expected = case
    taps = ours(unet, vae, pixels, text)
    for address, value in expected.items():
        assert taps[address].tensor.shape == value.shape
        assert float((taps[address].tensor.float() - value.float()).abs().max()) <= 1e-3 * float(value.abs().max())


def test_mutants_are_caught(unet, vae, case, monkeypatch):
    """gdf.md section 7, at its end: each of these mistakes must make the comparison above fail."""
    import vitrine.engine.activations.tap as tap

    pixels, text, expected = case
    table = sites_of(unet)
    real = tap.resolve

    def with_paths(changed):
        def resolve(backbone, patterns):
            return [replace(s, **changed.get(s.address, {})) for s in real(backbone, patterns)]

        return resolve

    q, out = "up-level1-repeat1-vit-block0-cross-q", "up-level0-repeat1-res-out"
    swapped = {q: {"path": table[q.replace("repeat1", "repeat2")].path}}
    upside_down = {out: {"path": "up_blocks.3.resnets.1"}}
    too_early = {"down-level0-repeat0-res-increment": {"path": "down_blocks.0.resnets.0.conv1"}}
    assert agree(ours(unet, vae, pixels, text), expected)
    for mutant in (swapped, upside_down, too_early):
        monkeypatch.setattr(tap, "resolve", with_paths(mutant))
        taps = ours(unet, vae, pixels, text)
        shapes = all(taps[a].tensor.shape == v.shape for a, v in expected.items())
        assert not (shapes and agree(taps, expected)), mutant
        monkeypatch.setattr(tap, "resolve", real)
    assert not agree(ours(unet, vae, pixels, text, timestep=50.0), expected), "t shifted by one"
    assert not agree(ours(unet, vae, pixels, text, posterior="mean"), expected), "posterior mean"
    assert agree(ours(unet, vae, pixels, text), expected)


def test_what_gdfs_timestep_means_under_each_scheduler():
    """Check 6: the img2img rule gives t + 1 under PNDM and t under DDIM and Euler; ours is the network's own."""
    makers = {
        "PNDM": PNDMScheduler(**SCHEDULE, skip_prk_steps=True, steps_offset=1),
        "DDIM": DDIMScheduler(**SCHEDULE, steps_offset=1, clip_sample=False),
        "Euler": EulerDiscreteScheduler(**SCHEDULE, steps_offset=1, timestep_spacing="leading"),
    }
    for name, scheduler in makers.items():
        scheduler.set_timesteps(1000)
        pipe = StableDiffusionImg2ImgPipeline.__new__(StableDiffusionImg2ImgPipeline)
        object.__setattr__(pipe, "scheduler", scheduler)
        for t in (1, 50, 261, 500, 998):
            effective = float(StableDiffusionImg2ImgPipeline.get_timesteps(pipe, 1000, t / 1000, "cpu")[0][0])
            assert effective == (t + 1 if name == "PNDM" else t), (name, t, effective)


def test_flux_block_output_is_the_blocks_not_its_norms():
    """Check 20: GDF's joint ``out`` is in truth the input of the feed-forward; ours is what the block returns."""
    net = models.flux()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.05 * torch.randn_like(p))
    seen = {}
    block = net.transformer_blocks[0]
    block.register_forward_hook(lambda m, a, o: seen.update(out=o[1].clone()))
    block.norm2.register_forward_hook(lambda m, a, o: seen.update(norm=o.clone()))
    denoiser = Denoiser.from_diffusers(net, FlowMatchEulerDiscreteScheduler())
    with torch.no_grad(), capture(net, "vit-block0-out") as taps:
        denoiser.forward(torch.randn(1, 4, 8, 12), 500, Condition(torch.randn(1, 5, 24), torch.randn(1, 20)))
    found = taps["vit-block0-out"].tensor.flatten(2).transpose(1, 2)
    assert torch.equal(found, seen["out"]) and not torch.allclose(found, seen["norm"], atol=1e-2)
