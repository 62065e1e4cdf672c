"""Taps of published selections at full size with random weights. Not part of the test run:

    VITRINE_BENCH=1 pytest tests/benchmarks/test_tap_speed.py -s

Eight seeds of one image against eight straightforward extractions, and each SDXL selection against its share of the
FLOPs. Float32; SDXL takes 10 GB of memory and a minute a forward on one core. VITRINE_BENCH_ROUNDS (default 1) repeats.
"""

import os
import time

import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from vitrine.engine.activations import PRESETS, TapConfig, tap_latents
from vitrine.engine.activations.images import encode_pixels
from vitrine.engine.addresses import sites_of
from vitrine.engine.denoiser import Condition, Denoiser
from vitrine.engine.hooks import capture

pytestmark = pytest.mark.skipif(os.environ.get("VITRINE_BENCH") != "1", reason="minutes of CPU: set VITRINE_BENCH=1")
ROUNDS = int(os.environ.get("VITRINE_BENCH_ROUNDS", "1"))
SDXL = {
    "block_out_channels": (320, 640, 1280), "cross_attention_dim": 2048, "attention_head_dim": (5, 10, 20),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10), "use_linear_projection": True, "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816, "sample_size": 128,
}  # fmt: skip


@pytest.fixture
def say(request):
    """Shows a measured figure in the test run's own output."""
    return request.config.get_terminal_writer().line


def seconds(fn):
    start = time.perf_counter()
    with torch.no_grad():
        fn()
    return time.perf_counter() - start


def test_eight_seeds_of_one_image(say):
    """DIFT's ensemble on SD1.5: encode once, eight rows, stop after the place."""
    torch.manual_seed(0)
    unet = UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8).eval()
    wide = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2}
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    vae = AutoencoderKL(latent_channels=4, sample_size=512, **wide, **kinds).eval()
    scheduler = DDIMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    image, text, place = torch.rand(1, 3, 512, 512) * 2 - 1, torch.randn(1, 77, 768), "up-level1-upsampler-out"
    every = [a for a, s in sites_of(unet).items() if s.kind in ("spatial", "tokens")]

    def straightforward():
        found = []
        for seed in range(8):
            latents = vae.encode(image).latent_dist.mean * vae.config.scaling_factor
            noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(seed))
            x = scheduler.add_noise(latents, noise, torch.tensor([261]))
            with capture(unet, every) as taps:
                unet(x, 261, encoder_hidden_states=text)
            found.append(taps[place].tensor)
        return torch.stack(found).mean(0)

    denoiser = Denoiser.from_diffusers(unet, scheduler)

    def ours():
        config = TapConfig((place,), 261.0, tuple(range(8)), batch=8)
        return tap_latents(denoiser, encode_pixels(vae, image), Condition(text), config)[place].tensor

    times = [[seconds(straightforward), seconds(ours)] for _ in range(ROUNDS)]
    plain, fast = (min(column) for column in zip(*times, strict=True))
    say(f"\neight seeds: straightforward {plain:.1f} s, ours {fast:.1f} s, ratio {fast / plain:.3f}")
    assert fast <= 0.5 * plain


def sdxl(device="cpu"):
    with torch.device(device):
        net = UNet2DConditionModel(**SDXL).eval()
        x, text, t = torch.randn(1, 4, 128, 128), torch.randn(1, 77, 2048), torch.tensor(51)
        added = {"text_embeds": torch.randn(1, 1280), "time_ids": torch.randn(1, 6)}
    return net, lambda: net(x, t, encoder_hidden_states=text, added_cond_kwargs=added)


def share(addresses):
    """Share of a forward's FLOPs up to the last place, counted on a twin without weights."""
    net, call = sdxl("meta")

    def stopped():
        with capture(net, addresses, early_exit=True) as taps:
            taps.run(call)

    counts = []
    for run in (stopped, call):
        with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            run()
        counts.append(counter.get_total_flops())
    return counts[0] / counts[1]


def test_sdxl_selections_take_their_share_of_the_flops(say):
    net, call = sdxl()
    names = ["Ours-XL", "Legacy-XL"]

    def stopped(name):
        def run():
            with capture(net, list(PRESETS[name].addresses), early_exit=True) as taps:
                taps.run(call)

        return run

    runs = [call, *[stopped(n) for n in names]]
    seconds(call)  # warm
    rounds = [[seconds(run) for run in runs] for _ in range(ROUNDS)]
    bare, *times = (min(column) for column in zip(*rounds, strict=True))
    missed = []
    for name, found in zip(names, times, strict=True):
        limit = share(list(PRESETS[name].addresses))
        say(f"\n{name}: FLOP share {limit:.3f}, time share {found / bare:.3f} (bare {bare:.1f} s)")
        missed += [name] if found / bare > limit + 0.05 else []
    assert not missed
