"""One-step generation costs one bare forward: ``VITRINE_BENCH=1 pytest -s tests/benchmarks/test_emd_cost.py``.

Seconds are CPU time, which other programs on the machine do not lengthen: with OMP_NUM_THREADS=1 they are the latency.
"""

import os
import sys
import time

import pytest
import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from vitrine.engine.denoiser import Condition, Denoiser
from vitrine.engine.emd import StudentContract, one_step, seeded
from vitrine.engine.portraits import build_models

pytestmark = pytest.mark.skipif(not os.environ.get("VITRINE_BENCH"), reason="set VITRINE_BENCH=1 to measure")


def seconds(run):
    start = time.process_time()
    run()
    return time.process_time() - start


@torch.no_grad()
def measure(unet, scheduler, z, text, repeats, ddim_steps):
    """Best seconds of a bare forward and of ours, taken in turn; and of 50 DDIM steps, from ``ddim_steps`` of them."""
    student, contract = Denoiser.from_diffusers(unet, scheduler), StudentContract()
    t, cond = torch.full((len(z),), 999.0), Condition(text)
    runs = {"bare": lambda: unet(z, t, text), "ours": lambda: one_step(student, z, cond, contract)}
    times = {name: [] for name in runs}
    for i in range(repeats + 1):  # in turn, so that a busy machine disturbs both alike; the first warms up
        for name, run in runs.items():
            took = seconds(run)
            times[name] += [took] if i else []
    scheduler.set_timesteps(50)
    latents, steps = z.clone(), []
    for now in scheduler.timesteps[:ddim_steps]:
        start = time.process_time()
        latents = scheduler.step(unet(latents, now, text).sample, now, latents).prev_sample
        steps.append(time.process_time() - start)
    return min(times["bare"]), min(times["ours"]), 50 * min(steps)


def held(name, found):
    bare, ours, ddim = found
    said = f"bare {bare:.4f} s, one step {ours:.4f} s ({ours / bare:.3f} x), 50 DDIM {ddim:.2f} s ({ddim / ours:.1f} x)"
    sys.stdout.write(f"\n{name}: {said}\n")
    assert ours / bare <= 1.05
    assert ddim / ours > 40


def test_one_step_costs_one_forward_on_portraits():
    model = build_models(0)
    scheduler = DDIMScheduler.from_config(model.scheduler.config)
    held("portraits, batch 16", measure(model.unet, scheduler, seeded(list(range(16)), (4, 16, 16)),
                                        torch.zeros(16, 24, 64), 20, 10))  # fmt: skip


def test_one_step_costs_one_forward_at_full_size():
    unet = UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8).eval()
    scheduler = DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False)
    assert 8.5e8 < sum(p.numel() for p in unet.parameters()) < 8.7e8, "Stable Diffusion 1.5's size"
    held("SD1.5 size, batch 1", measure(unet, scheduler, seeded([0], (4, 64, 64)), torch.randn(1, 77, 768), 2, 2))
