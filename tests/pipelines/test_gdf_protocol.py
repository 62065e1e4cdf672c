"""``protocol="gdf"`` against the equations of the official code, written down once more in a straight line.

The official code itself (Darkbblue/generic-diffusion-feature e4361a6 over diffusers 0.32.2, ``train_unet=True``, which
keeps float32) was run outside this repository on the models below: 56 places of the portraits and 73 of the SDXL-shaped
model at t = 50 and 261 differ by at most 4.4e-6 of each place's largest value.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import EulerDiscreteScheduler, PNDMScheduler
from PIL import Image
from vitrine.engine.errors import VitrineError
from vitrine.engine.pipelines import (
    ActivationTapPipeline,
    CorrespondencePipeline,
    SegmentationPipeline,
)
from vitrine.engine.portraits import load_portraits, render, sample_scenes
from vitrine_tests.machine.stock import deep_sdxl, stable_diffusion

pytestmark = pytest.mark.rounding
SCHEDULE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
PLACES = {
    "down-level0-repeat0-res-increment": "down_blocks.0.resnets.0.conv2",
    "mid-vit-out": "mid_block.attentions.0",
    "up-level0-repeat0-vit-block0-cross-q": "up_blocks.0.attentions.0.transformer_blocks.0.attn2.to_q",
    "up-level1-repeat0-res-out": "up_blocks.1.resnets.0",
}


@pytest.fixture(scope="module")
def sd():
    m = load_portraits()
    scheduler = PNDMScheduler(**SCHEDULE, skip_prk_steps=True)
    return ActivationTapPipeline.from_pipe(stable_diffusion(m, scheduler))


@pytest.fixture(scope="module")
def sdxl():
    scheduler = EulerDiscreteScheduler(**SCHEDULE, timestep_spacing="leading")
    return ActivationTapPipeline.from_pipe(deep_sdxl(scheduler))


@pytest.fixture(scope="module")
def pictures():
    drawn = render(sample_scenes([7_000_000, 7_000_001])).images
    whole = [Image.fromarray((p * 255).round().byte().permute(1, 2, 0).numpy()) for p in drawn]
    return [p.resize((70, 100)) for p in whole]


@torch.no_grad()
def by_hand(pipe, pixels, prompt, timestep, seed, size):
    """(B, 3, S, S) in [-1, 1] -> place -> activation; ``timestep`` is the network's."""
    generator = torch.Generator().manual_seed(seed)
    posterior = pipe.vae.encode(pixels).latent_dist
    sample = torch.randn(posterior.mean.shape, generator=generator)
    z0 = (posterior.mean + posterior.std * sample) * pipe.vae.config.scaling_factor
    betas = torch.linspace(SCHEDULE["beta_start"] ** 0.5, SCHEDULE["beta_end"] ** 0.5, 1000, dtype=torch.float64) ** 2
    abar = (1 - betas).cumprod(0)[timestep]
    noise = torch.randn(z0.shape, generator=generator)
    x_t = (abar.sqrt() * z0 + (1 - abar).sqrt() * noise).float()
    told = {"padding": "max_length", "max_length": pipe.tokenizer.model_max_length, "return_tensors": "pt"}
    ids = pipe.tokenizer([prompt], truncation=True, **told).input_ids
    added = None
    if hasattr(pipe, "text_encoder_2"):
        encoded = [e(ids, output_hidden_states=True) for e in (pipe.text_encoder, pipe.text_encoder_2)]
        text = torch.cat([e.hidden_states[-2] for e in encoded], -1)
        sizes = torch.tensor([[size, size, 0, 0, size, size]]).float().repeat(len(x_t), 1)
        added = {"text_embeds": encoded[1].text_embeds.repeat(len(x_t), 1), "time_ids": sizes}
    else:
        text = pipe.text_encoder(ids)[0]
    seen, handles = {}, []
    for address, path in PLACES.items():

        def keep(module, args, output, address=address):
            seen[address] = output[0] if isinstance(output, tuple) else getattr(output, "sample", output)

        handles.append(pipe.unet.get_submodule(path).register_forward_hook(keep))
    pipe.unet(x_t, timestep, encoder_hidden_states=text.repeat(len(x_t), 1, 1), added_cond_kwargs=added)
    for handle in handles:
        handle.remove()
    side = {a: int(v.shape[1] ** 0.5) for a, v in seen.items() if v.ndim == 3}
    return {a: v.transpose(1, 2).unflatten(2, (side[a],) * 2) if a in side else v for a, v in seen.items()}


def resized(pictures, size):
    arrays = [np.array(p.resize((size, size)).convert("RGB")) for p in pictures]
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).float() / 255 * 2 - 1


def agree(taps, expected):
    return all(float((taps[a].tensor - v).abs().max()) <= 1e-5 * float(v.abs().max()) for a, v in expected.items())


def tapped(pipe, image, **settings):
    settings = {"addresses": list(PLACES), "output_type": "none", "seeds": [7], "protocol": "gdf"} | settings
    return pipe.tap(image, "a portrait", **settings).activations


@pytest.mark.parametrize(("kind", "offset"), [("sd", 1), ("sdxl", 0)])
@pytest.mark.parametrize("t", [50, 261])
def test_the_protocol_is_the_official_codes(request, pictures, kind, offset, t):
    """PNDM of SD 1.5 runs 51 for 50; Euler of SDXL runs 50. The size defaults to the model's own."""
    pipe = request.getfixturevalue(kind)
    size = pipe.unet.config.sample_size * 4
    taps = tapped(pipe, pictures, timestep=t)
    assert taps.info.timestep == t + offset and taps.info.seeds == (7,)
    expected = by_hand(pipe, resized(pictures, size), "a portrait", t + offset, 7, size)
    assert agree(taps, expected)
    assert agree(tapped(pipe, pictures, timestep=t, seeds=None, generator=torch.Generator().manual_seed(7)), expected)
    changes = (
        {"posterior": "mean"},
        {"timestep": t + 1},
        {"protocol": "vitrine", "size": size, "posterior": "sample"},
        {"seeds": [8]},
        {"size": 2 * size},
    )
    for change in changes if t == 50 else ():
        other = tapped(pipe, pictures, **({"timestep": t} | change))
        same = all(other[a].tensor.shape == v.shape for a, v in expected.items())
        assert not (same and agree(other, expected)), change


def test_tensors_are_resized_bilinearly(sd, pictures):
    pixels = torch.stack([torch.from_numpy(np.array(p)).permute(2, 0, 1).float() / 255 for p in pictures])
    shrunk = F.interpolate(pixels * 2 - 1, (64, 64), mode="bilinear")
    assert agree(tapped(sd, pixels, timestep=50), by_hand(sd, shrunk, "a portrait", 51, 7, 64))


def test_features_are_joined_without_normalisation(sd, pictures):
    pipe = CorrespondencePipeline.from_pipe(sd)
    first, second = by_hand(sd, resized(pictures, 64), "", 51, 7, 64), [[0.3, 0.4], [0.6, 0.7]]
    joined = torch.cat([F.interpolate(v, (128, 128), mode="bilinear") for v in first.values()], 1)
    told = {"addresses": list(PLACES), "timestep": 50, "seeds": [7], "protocol": "gdf", "temperature": 0.0}
    (match,) = pipe.match(pictures[0], pictures[1], second, **told)
    points = torch.tensor(second) * 2 - 1
    queries = F.grid_sample(joined[:1], points[None, None], align_corners=False)[0, :, 0].T
    cosines = F.normalize(queries, dim=1) @ F.normalize(joined[1].flatten(1), dim=0)
    assert torch.allclose(match.similarity, cosines.max(1).values, atol=1e-5)
    best = cosines.argmax(1)
    assert torch.allclose(match.points, torch.stack([best % 128 + 0.5, best // 128 + 0.5], 1) / 128)
    mask = (torch.arange(100)[:, None] > 50).long().expand(1, 100, 70)
    segmentation, told = SegmentationPipeline.from_pipe(sd), {k: v for k, v in told.items() if k != "temperature"}
    assert segmentation.segment(pictures[:1], mask, pictures[1:], size=64, **told).shape == (1, 100, 70)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"protocol": "official"}, "protocol"),
        ({"seeds": [1, 2]}, "one under protocol"),
        ({"timestep": 1000}, "timestep"),
    ],
)
def test_what_the_official_code_has_not_is_refused(sd, pictures, change, word):
    with pytest.raises(VitrineError, match=word):
        tapped(sd, pictures, **change)


def test_timestep_nought_is_refused_where_no_step_is_left(sdxl, pictures):
    with pytest.raises(VitrineError, match="protocol='gdf'"):
        tapped(sdxl, pictures, timestep=0)
