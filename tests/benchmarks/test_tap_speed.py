"""Taps of published selections: eight seeds of one image against eight straightforward extractions, and each SDXL
selection against its share of the FLOPs. SDXL has 64 x 64 latents here and takes 11 GB in float32."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from vitrine.engine.activations import PRESETS, TapConfig, tap_latents
from vitrine.engine.activations.picture_latents import encode_pixels
from vitrine.engine.diffusion.denoiser import Condition, Denoiser
from vitrine.engine.tracing.addresses import sites_of
from vitrine.engine.tracing.hooks import capture
from vitrine_tests import models


def eight_seeds(bench, full, vae, scheduler, place, pixels, rounds, warm):
    """DIFT's ensemble: encode once, eight rows, stop after the place; against eight extractions of everything.

    Those run one after another, each from the picture on, so one is timed and counted eight times.
    """
    unet, text = full.net, full.text
    image = (torch.rand(1, 3, pixels, pixels) * 2 - 1).to(text)
    every = [a for a, s in sites_of(unet).items() if s.kind in ("spatial", "tokens")]

    def straightforward(seed=0):
        latents = vae.encode(image).latent_dist.mean * vae.config.scaling_factor
        noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(seed)).to(latents)
        x = scheduler.add_noise(latents, noise, torch.tensor([261]))
        with capture(unet, every) as taps:
            unet(x, 261, encoder_hidden_states=text)
        return taps[place].tensor

    denoiser = Denoiser.from_diffusers(unet, scheduler)

    def ours():
        config = TapConfig((place,), 261.0, tuple(range(8)), batch=8)
        return tap_latents(denoiser, encode_pixels(vae, image), Condition(text), config)[place].tensor

    against = {"eight straightforward extractions": (straightforward, 8), "bare forward": full}
    found = bench.compare("tap, eight seeds of one picture", full.label, ours, against, rounds, warm)
    return found["eight straightforward extractions"]


def test_eight_seeds_of_one_portrait(bench):
    model = bench.portraits()
    row = eight_seeds(bench, bench.model("portraits"), model.vae, model.scheduler, "up-level0-upsampler-out", 64, 10, 1)
    bench.at_most("time", row.ratio, 0.5)


def test_eight_seeds_of_one_image(bench):
    from diffusers import DDIMScheduler

    full = bench.full("SD1.5")
    widths = (32, 32, 32, 32) if bench.tiny else (128, 256, 512, 512)
    vae = models.vae(sample_size=512, block_out_channels=widths, layers_per_block=2, norm_num_groups=32)
    scheduler = DDIMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
    vae = vae.to(full.x.device, full.x.dtype)
    row = eight_seeds(bench, full, vae, scheduler, "up-level1-upsampler-out", 8 * full.side, 2, 0)
    bench.at_most("time", row.ratio, 0.5)


def flop_share(full, addresses):
    """Share of a forward's FLOPs up to the last place, counted on a twin without weights."""

    def stopped():
        with capture(full.net, addresses, early_exit=True):
            full()

    counts = []
    for run in (stopped, full):
        with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            run()
        counts.append(counter.get_total_flops())
    return counts[0] / counts[1]


def sdxl_selection(bench, name):
    """One selection, stopped at its last place, against a bare forward; held to its FLOPs plus 5 points."""
    full, addresses = bench.full("SDXL"), list(PRESETS[name].addresses)

    def stopped():
        with capture(full.net, addresses, early_exit=True):
            full()

    row = bench.compare(f"tap with early exit, {name}", full.label, stopped, {"bare forward": full}, 2)["bare forward"]
    limit = flop_share(bench.full("SDXL", device="meta"), addresses)
    bench.say(f"FLOP share {limit:.3f}")
    bench.at_most("time share", row.ratio, limit + 0.05)


def test_sdxl_ours_takes_its_share_of_the_flops(bench):
    sdxl_selection(bench, "Legacy-XL" if bench.tiny else "Ours-XL")


def test_sdxl_legacy_takes_its_share_of_the_flops(bench):
    sdxl_selection(bench, "Legacy-XL")
