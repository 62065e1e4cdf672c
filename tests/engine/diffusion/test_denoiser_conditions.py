"""The Denoiser calls each diffusers backbone as its own pipeline does."""

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
)
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.network.condition import Condition
from vitrine.engine.tracing.addresses import sites_of
from vitrine.engine.tracing.hooks import capture, edit
from vitrine_tests import models

pytestmark = pytest.mark.rounding
GENERATOR = torch.Generator().manual_seed(0)


def noise(*shape):
    return torch.randn(*shape, generator=GENERATOR)


def both(net, scheduler, x, t, cond, **direct):
    """(through the Denoiser, through the class itself)."""
    with torch.no_grad():
        return Denoiser.from_diffusers(net.eval(), scheduler).forward(x, t, cond), net(**direct).sample


def test_sdxl_gets_pooled_text_and_time_ids():
    net = models.unet_xl(block_out_channels=(32, 64), cross_attention_dim=32, attention_head_dim=2)
    x, text, pooled = noise(2, 4, 8, 16), noise(2, 7, 32), noise(2, 20)
    ids = torch.tensor([[64.0, 128, 0, 0, 64, 128]] * 2)
    told = {"encoder_hidden_states": text, "added_cond_kwargs": {"text_embeds": pooled, "time_ids": ids}}
    cond = Condition(text, pooled, {"time_ids": ids})
    ours, theirs = both(net, DDIMScheduler(), x, 51, cond, sample=x, timestep=51, **told)
    assert torch.equal(ours, theirs)


def pixart(**options):
    return models.pixart(num_attention_heads=3, attention_head_dim=8, **options)


def test_pixart_gets_sizes_and_a_mask():
    net = pixart(use_additional_conditions=True)
    x, text, mask = noise(2, 4, 16, 16), noise(2, 7, 24), torch.tensor([[1.0] * 3 + [0] * 4, [1.0] * 7])
    size = {"resolution": torch.tensor([[128.0, 128]] * 2), "aspect_ratio": torch.tensor([[1.0]] * 2)}
    cond = Condition(text, None, {"encoder_attention_mask": mask, **size})
    t = torch.full((2,), 51.0)
    told = {"encoder_hidden_states": text, "encoder_attention_mask": mask, "added_cond_kwargs": size}
    ours, theirs = both(net, DDIMScheduler(), x, t, cond, hidden_states=x, timestep=t, **told)
    assert torch.equal(ours, theirs[:, :4])
    with torch.no_grad(), capture(net, "vit-block0-cross-map") as taps:
        Denoiser.from_diffusers(net, DDIMScheduler()).forward(x, 51, cond)
    found = taps["vit-block0-cross-map"].tensor
    assert float(found[0, :, :, 3:].max()) == 0 and float(found[1].min()) > 0
    assert torch.allclose(found.sum(-1), torch.ones_like(found[..., 0]), atol=1e-5)


def test_sd3_gets_pooled_text():
    net = models.sd3()
    x, text, pooled, t = noise(2, 4, 8, 12), noise(2, 7, 24), noise(2, 20), torch.full((2,), 250.0)
    told = {"encoder_hidden_states": text, "pooled_projections": pooled}
    scheduler = FlowMatchEulerDiscreteScheduler()
    ours, theirs = both(net, scheduler, x, 250, Condition(text, pooled), hidden_states=x, timestep=t, **told)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("guided", [False, True])
def test_flux_is_packed_as_its_pipeline_packs(guided):
    net = models.flux(num_layers=1, guidance_embeds=guided)
    x, text, pooled = noise(2, 4, 8, 12), noise(2, 7, 24), noise(2, 20)
    guidance = torch.full((2,), 3.5) if guided else None
    told = {
        "hidden_states": FluxPipeline._pack_latents(x, 2, 4, 8, 12),
        "encoder_hidden_states": text,
        "pooled_projections": pooled,
        "timestep": torch.full((2,), 0.25),
        "guidance": guidance,
        "img_ids": FluxPipeline._prepare_latent_image_ids(2, 4, 6, "cpu", torch.float32),
        "txt_ids": torch.zeros(7, 3),
    }
    cond = Condition(text, pooled, {"guidance": guidance} if guided else {})
    ours, theirs = both(net, FlowMatchEulerDiscreteScheduler(), x, 250, cond, **told)
    # vae_scale_factor 8: the pipeline speaks of pixels
    assert torch.allclose(ours, FluxPipeline._unpack_latents(theirs, 64, 96, 8), atol=1e-6)


@pytest.mark.parametrize("address", ["vit-block0-self-q", "vit-block1-cross-v", "vit-block1-out", "*0-ffn-inner"])
def test_edits_work_on_every_kind_of_transformer_place(address):
    net = pixart(use_additional_conditions=False).eval()
    x, cond = noise(2, 4, 16, 16), Condition(noise(2, 7, 24))
    denoiser = Denoiser.from_diffusers(net, DDIMScheduler())
    with torch.no_grad():
        plain = denoiser.forward(x, 51, cond)
        with edit(net, {address: lambda v: v * 0}, rows=torch.tensor([True, False])):
            changed = denoiser.forward(x, 51, cond)
        again = denoiser.forward(x, 51, cond)
    assert torch.equal(plain[1], changed[1]) and not torch.equal(plain[0], changed[0]) and torch.equal(plain, again)


def test_maps_are_listed_for_pixart():
    names = list(sites_of(pixart(use_additional_conditions=False)))
    assert sum(n.endswith("-map") for n in names) == 4 and len(names) == len(set(names))
