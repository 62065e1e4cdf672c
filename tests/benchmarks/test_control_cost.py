"""What control adds to a denoising step. Latents are 64 x 64, batch 2 as under guidance.

Held: hooks on the portraits UNet and on full-size ones with random weights take less than 1 % of a step. Their own time
is summed inside the step, since two timed steps differ by more than that. A run opens the block once, as
``ControlledSampling`` does, so that opening and leaving count as one step's share of 20.
"""

import pytest
import torch
from vitrine.engine.control import (
    ControlEmbedder,
    ControlSpec,
    GammaConfig,
    GuidanceConfig,
    Injection,
    ReferenceBlend,
    SizeCondition,
    control_guidance,
    control_width,
    needed_evaluations,
)

STEPS = 20


def timed(kind, now):
    """The block with a clock around each of its hooks."""

    class Timed(kind):
        spent = 0.0

    def clocked(inner):
        def run(self, *args, **kwargs):
            start = now()
            try:
                return inner(self, *args, **kwargs)
            finally:
                self.spent += now() - start

        return run

    for name in ("__enter__", "__exit__", "_see", "_add", "_blend"):
        inner = getattr(kind, name, None)
        if inner is not None:
            setattr(Timed, name, clocked(inner))
    return Timed


def block_for(model, full, now):
    if model == "SDXL":
        return timed(ReferenceBlend, now)(full.net, GammaConfig(), drop=torch.tensor([True, False]))
    made = ControlEmbedder(ControlSpec(), control_width(full.net)).to(full.x)
    rows = ControlSpec().rows(ControlSpec().reference()).expand(2, -1)
    return timed(Injection, now)(full.net, made, rows, GammaConfig(), torch.tensor([True, False]))


@pytest.mark.parametrize("model", ["portraits", "SD1.5", "SDXL"])
def test_overhead_of_a_step(bench, model):
    full = bench.model(model, 2)
    full.t = torch.tensor([500.0, 500.0], device=full.x.device)
    block, guidance, wholes, rests = block_for(model, full, bench.now), GuidanceConfig(5.0), [], []

    def opened():
        block.spent = 0.0
        with block:
            pass
        return block.spent / STEPS

    @torch.no_grad()
    def step():
        block.spent, start = 0.0, bench.now()
        needed_evaluations(guidance, 0.5)
        planning = bench.now() - start
        out = full()
        none, whole = out.chunk(2)
        control_guidance(lambda c, s: whole if s else none, guidance, 0.5)
        wholes.append(bench.now() - start + share)
        rests.append(wholes[-1] - block.spent - planning - share)

    share = min(opened() for _ in range(5))
    with block:
        step()
        wholes.clear(), rests.clear()
        bench.benchmark.pedantic(step, rounds=bench.rounds({"portraits": 20, "SD1.5": 3, "SDXL": 2}[model]))
    kind = "training-free blend" if model == "SDXL" else "checkpoint"
    row = bench.record(f"control, step with a {kind}", "the same step without it", full.label, wholes, rests)
    bench.at_most("overhead", row.ratio - 1, 0.01)


def test_sampling_against_the_stock_pipeline(bench):
    """The shipped portraits transformer, eight guided steps, one network call each in both."""
    from diffusers import PixArtAlphaPipeline
    from vitrine.engine.pipelines import ControlConditionedPipeline
    from vitrine.engine.portraits.shipped import TRANSFORMERS, load_transformer

    base = bench.portraits()
    parts = {"transformer": load_transformer("power-cosine"), "vae": base.vae, "scheduler": base.scheduler}
    parts |= {"tokenizer": None, "text_encoder": None}
    stock = PixArtAlphaPipeline(**parts)
    ours = ControlConditionedPipeline.from_pipe(stock)
    checkpoint = ours.load_control(TRANSFORMERS / "power-cosine" / "control.safetensors")
    for pipe in (ours, stock):
        pipe.set_progress_bar_config(disable=True)
    text, empty = base.encode(["a face"] * 4), base.encode([""]).expand(4, -1, -1)
    masks = {f"{n}prompt_attention_mask": torch.ones(4, text.shape[1]) for n in ("", "negative_")}
    settings = {"prompt_embeds": text, "negative_prompt_embeds": empty, "num_inference_steps": 8} | masks
    settings |= {"height": 64, "width": 64, "output_type": "latent"}
    control = {
        "size_condition": SizeCondition(original=(64, 64)),
        "checkpoint": checkpoint,
        "guidance": GuidanceConfig(2.0),
    }

    def plainly():
        noise = torch.randn(4, 4, 16, 16)
        stock(negative_prompt=None, guidance_scale=2.0, use_resolution_binning=False, latents=noise, **settings)

    against = {"stock pipeline": plainly}
    run = lambda: ours(seeds=[0, 1, 2, 3], **control, **settings)  # noqa: E731
    bench.compare("control, sampling 8 steps", "portraits transformer, batch 4", run, against, 5)
