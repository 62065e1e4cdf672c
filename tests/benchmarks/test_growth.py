"""What is paid for each site, prompt, LoRA and picture, and whether four times as many cost four times as much.

Fixed costs are of a network of SDXL's depth (962 sites) whose layers are narrow, so that they can be seen; the forward
that they are compared with is one of SDXL's own width.
"""

import pytest
import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from vitrine.engine.activations import TapConfig, tap_latents
from vitrine.engine.diffusion.denoiser import Condition, Denoiser
from vitrine.engine.io.lora_layer import LoraLayer
from vitrine.engine.io.lora_writing import write_lora
from vitrine.engine.nemo.block import block
from vitrine.engine.nemo.neurons import NeuronSet
from vitrine.engine.nemo.sites import value_activations, value_sites
from vitrine.engine.tracing.addresses import sites_of
from vitrine.engine.tracing.hooks import capture
from vitrine.engine.w2w import BuildConfig, build_space
from vitrine_tests import models

TIMES = 4
FACTOR = 1.25
"""``TIMES`` as many may take that much more than ``TIMES`` as long."""


@pytest.fixture(scope="module")
def deep():
    """SDXL's depth, narrow, with the inputs of a forward."""
    torch.manual_seed(0)
    narrow = {
        "block_out_channels": (32, 64, 64),
        "attention_head_dim": 4,
        "cross_attention_dim": 64,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 80,
    }
    net = UNet2DConditionModel(**(models.SDXL | narrow)).eval().requires_grad_(False)
    added = {"text_embeds": torch.randn(1, 32), "time_ids": torch.full((1, 6), 256.0)}
    x, text = torch.randn(1, 4, 32, 32), torch.randn(1, 77, 64)
    net.forward_once = lambda: net(x, 51, encoder_hidden_states=text, added_cond_kwargs=added)
    return net


def opened(net, addresses):
    with capture(net, addresses):
        pass


def blocker(net):
    """A function that opens and leaves a block of all value sites."""
    neurons = NeuronSet({s.address: (0, 1, 2) for s in value_sites(net, "all")})

    def run():
        with block(net, neurons):
            pass

    return run


def grows(bench, method, model, few, many, rounds=5):
    """``many`` is ``TIMES`` as much work as ``few``."""
    row = bench.compare(method, model, many, {"a quarter, times four": (few, TIMES)}, rounds)
    bench.at_most("time", row["a quarter, times four"].ratio, FACTOR)


def test_opening_by_sites(bench, deep):
    every = list(sites_of(deep))[: 4 * 240]
    grows(
        bench,
        "open a capture of 960 sites",
        "SDXL's depth, narrow",
        lambda: opened(deep, every[::TIMES]),
        lambda: opened(deep, every),
    )


@pytest.mark.parametrize("what", ["capture", "block"])
def test_opening_is_little_of_an_sdxl_forward(bench, deep, what):
    full, every = bench.full("SDXL", side=32), list(sites_of(deep))
    run = blocker(deep) if what == "block" else lambda: opened(deep, every)
    row = bench.compare(f"open a {what} of all sites", full.label, run, {"bare forward": full}, 2)["bare forward"]
    bench.at_most("share of a forward", row.ratio, 0.02)


def test_tapping_all_sdxl_sites_is_copying_them(bench):
    """The seconds inside the hooks of a capture, those of plain hooks that clone, and of nothing else."""
    full = bench.full("SDXL")
    sites = [s for s in sites_of(full.net).values() if s.kind != "map"]
    inside = {"ours": [], "theirs": []}

    def timed(name, function):
        def run(*args):
            start = bench.now()
            function(*args)
            inside[name][-1] += bench.now() - start

        return run

    def tapped():
        inside["ours"].append(0.0)
        with capture(full.net, sites) as taps:
            taps._see = timed("ours", taps._see)
            full()

    def cloned(module, args, output):
        kept.append((output if isinstance(output, torch.Tensor) else output[0]).clone())

    def copied():
        kept.clear()
        inside["theirs"].append(0.0)
        hook = timed("theirs", cloned)
        handles = [full.net.get_submodule(s.path).register_forward_hook(hook) for s in sites]
        full()
        for handle in handles:
            handle.remove()

    kept = []
    with torch.no_grad():
        for _ in range(bench.rounds(2) + 1):
            copied()
            kept.clear()
            tapped()
    bench.benchmark.pedantic(lambda: None, rounds=1)
    row = bench.record(
        "tap all 682 sites, in hooks", "a clone in a plain hook", full.label, inside["ours"][1:], inside["theirs"][1:]
    )
    bench.at_most("time of copying", row.ratio, 1.5)


def test_prompts(bench, deep):
    denoiser, sites = Denoiser.from_diffusers(deep, DDIMScheduler()), value_sites(deep, "all")

    def read(prompts):
        for text in prompts:
            value_activations(denoiser, Condition(text), sites)

    texts = torch.randn(32, 1, 77, 64)
    grows(
        bench, "value activations of 32 prompts", "SDXL's depth, narrow", lambda: read(texts[:8]), lambda: read(texts)
    )


def test_pictures(bench, deep):
    unet = bench.portraits().unet
    denoiser, text = Denoiser.from_diffusers(unet, bench.portraits().scheduler), Condition(torch.zeros(1, 24, 64))
    config = TapConfig(tuple(a for a, s in sites_of(unet).items() if s.kind != "map"), batch=8)

    def tap(count):
        tap_latents(denoiser, torch.randn(count, 4, 16, 16), text, config)

    grows(bench, "tap all sites of 32 pictures", "portraits", lambda: tap(8), lambda: tap(32))


def loras(folder, count, layers=64, width=64):
    """A folder of LoRAs of rank 1 from one start, as kohya names them."""
    folder.mkdir()
    starts = [torch.randn(1, width) for _ in range(layers)]
    names = [f"down_blocks.{k % 3}.attentions.{k % 2}.transformer_blocks.{k // 6}.attn2.to_k" for k in range(layers)]
    for i in range(count):
        made = {
            name: LoraLayer(start + 0.01 * torch.randn(1, width), torch.randn(width, 1) / 10, 1.0)
            for name, start in zip(names, starts, strict=True)
        }
        write_lora(folder / f"m{i}.safetensors", made, "kohya")
    return folder


def test_loras(bench, tmp_path):
    few, many = loras(tmp_path / "few", 32), loras(tmp_path / "many", 32 * TIMES)
    grows(
        bench,
        "build a space of 128 LoRAs",
        "64 layers of 64 x 64, rank 1",
        lambda: build_space(few, BuildConfig(mode="factors")),
        lambda: build_space(many, BuildConfig(mode="factors")),
        3,
    )
