"""What control adds to a denoising step of a full-size UNet with random weights. Not part of the test run:

    VITRINE_BENCH=1 pytest tests/benchmarks/test_control_cost.py -s

Held: entering, hooking and leaving take less than 1 % of a step. Their own time is summed inside the step, since two
timed steps differ by more than that. Latents are 64 x 64, batch 2 as under guidance; VITRINE_BENCH_SIDE and _ROUNDS
change that, VITRINE_BENCH_DEVICE and _DTYPE the machine. SDXL takes 10 GB in float32.
"""

import os
import time

import pytest
import torch
from diffusers import UNet2DConditionModel
from vitrine.engine.control import (
    ControlEmbedder,
    ControlSpec,
    GammaConfig,
    GuidanceConfig,
    Injection,
    ReferenceBlend,
    control_width,
    guide,
    needed,
)

pytestmark = pytest.mark.skipif(os.environ.get("VITRINE_BENCH") != "1", reason="minutes of CPU: set VITRINE_BENCH=1")

ROUNDS = int(os.environ.get("VITRINE_BENCH_ROUNDS", "5"))
SIDE = int(os.environ.get("VITRINE_BENCH_SIDE", "64"))
DEVICE = os.environ.get("VITRINE_BENCH_DEVICE", "cpu")
DTYPE = getattr(torch, os.environ.get("VITRINE_BENCH_DTYPE", "float32"))
SD15 = {"cross_attention_dim": 768, "attention_head_dim": 8}
SDXL = {
    "block_out_channels": (320, 640, 1280), "cross_attention_dim": 2048, "attention_head_dim": (5, 10, 20),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), "use_linear_projection": True,
    "transformer_layers_per_block": (1, 2, 10), "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}  # fmt: skip


def now():
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(kind):
    """The block with a clock around each of its hooks."""

    class Timed(kind):
        spent = 0.0

    for name in ("__enter__", "__exit__", "_see", "_add", "_blend"):
        inner = getattr(kind, name, None)
        if inner is not None:
            setattr(Timed, name, _clocked(inner))
    return Timed


def _clocked(inner):
    def run(self, *args, **kwargs):
        start = now()
        try:
            return inner(self, *args, **kwargs)
        finally:
            self.spent += now() - start

    return run


def unet(config):
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return UNet2DConditionModel(**config).to(DTYPE).eval().requires_grad_(False)


def block_for(name, net):
    if name == "SDXL blend":
        return timed(ReferenceBlend)(net, GammaConfig(), drop=torch.tensor([True, False]))
    made = ControlEmbedder(ControlSpec(), control_width(net)).to(DEVICE, DTYPE)
    rows = ControlSpec().rows(ControlSpec().reference()).expand(2, -1)
    return timed(Injection)(net, made, rows, GammaConfig(), torch.tensor([True, False]))


@pytest.mark.parametrize(("name", "config"), [("SD1.5 checkpoint", SD15), ("SDXL blend", SDXL)])
def test_overhead_of_a_step(name, config, request):
    net = unet(config)
    x, text = (torch.randn(2, *s).to(DEVICE, DTYPE) for s in ((4, SIDE, SIDE), (77, config["cross_attention_dim"])))
    told = None
    if "addition_embed_type" in config:
        ids = torch.tensor([[1024.0] * 6, [512.0, 512, 0, 0, 1024, 1024]])
        told = {"text_embeds": torch.randn(2, 1280).to(DEVICE, DTYPE), "time_ids": ids.to(DEVICE)}
    t, block = torch.tensor([500.0, 500.0], device=DEVICE), block_for(name, net)
    guidance, best = GuidanceConfig(5.0), (1.0, 0.0, 0.0)
    with torch.no_grad():
        for _ in range(ROUNDS):
            block.spent, start = 0.0, now()
            needed(guidance, 0.5)
            planning = now() - start
            with block:
                out = net(x, t, text, added_cond_kwargs=told).sample
            none, full = out.chunk(2)
            guide(lambda c, s, none=none, full=full: full if s else none, guidance, 0.5)
            whole = now() - start
            spent = block.spent + planning
            best = min(best, (spent / (whole - spent), spent, whole))
    share, spent, whole = best
    request.config.get_terminal_writer().line(
        f"\n{name}: step {whole * 1e3:.0f} ms, of it control {spent * 1e3:.2f} ms = {share:.2%}"
    )
    assert share < 0.01
