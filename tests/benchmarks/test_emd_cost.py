"""One-step generation costs one bare forward: ``VITRINE_BENCH=1 pytest tests/benchmarks/test_emd_cost.py``."""

import os
import statistics
import time

import pytest
import torch
from vitrine.engine.denoiser import Condition, Denoiser
from vitrine.engine.emd import StudentContract, one_step, seeded
from vitrine.engine.portraits import build_models

pytestmark = pytest.mark.skipif(not os.environ.get("VITRINE_BENCH"), reason="set VITRINE_BENCH=1 to measure")


def test_one_step_costs_one_forward():
    model = build_models(0)
    student, z = Denoiser.from_diffusers(model.unet, model.scheduler), seeded(list(range(16)), (4, 16, 16))
    text, t = torch.zeros(16, 24, 64), torch.full((16,), 999.0)
    runs = {"bare": lambda: model.unet(z, t, text), "ours": lambda: one_step(student, z, Condition(text), contract)}
    contract, times = StudentContract(), {"bare": [], "ours": []}
    with torch.no_grad():
        for i in range(22):  # in turn, so that a busy machine disturbs both alike
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                if i >= 2:
                    times[name].append(time.perf_counter() - start)
    ratio = statistics.median(a / b for a, b in zip(times["ours"], times["bare"], strict=True))
    assert ratio < 1.05, ratio
