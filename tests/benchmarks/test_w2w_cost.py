"""Cost of building a space and training its LoRAs: ``VITRINE_BENCH=1 pytest -s tests/benchmarks/test_w2w_cost.py``."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig
from vitrine.engine.w2w import LoraTrainConfig, PCAConfig, principal_components
from vitrine.engine.w2w.pca import Matrix
from vitrine.engine.w2w.train import BatchedTrainer

pytestmark = pytest.mark.skipif(not os.environ.get("VITRINE_BENCH"), reason="set VITRINE_BENCH=1 to measure")


def say(text):
    sys.stdout.write(f"\n{text}\n")


def cpu(run):
    """CPU seconds and the result; other programs do not lengthen them."""
    start = time.process_time()
    found = run()
    return time.process_time() - start, found


def lowrank(n, d, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 60, generator=g) @ torch.randn(60, d, generator=g) + 0.3 * torch.randn(n, d, generator=g)


def test_gram_route_equals_scikit_learn_and_is_faster():
    from sklearn.decomposition import PCA

    rows, k = lowrank(500, 100_000), 100
    ours, found = cpu(lambda: principal_components(Matrix(rows), PCAConfig(k)))
    z = ((rows - found.mean) / found.scale).double().numpy()
    theirs, plain = cpu(lambda: PCA(k, svd_solver="full").fit(z))
    cosines = np.linalg.svd(found.basis.double().numpy()[:60] @ plain.components_[:60].T, compute_uv=False)
    angle = float(np.arccos(np.clip(cosines.min(), -1, 1)))
    say(f"500 x 100k, {k} components: ours {ours:.1f} s, scikit-learn {theirs:.1f} s ({theirs / ours:.1f} x), "
        f"angle of the leading 60 {angle:.1e}")  # fmt: skip
    np.testing.assert_allclose(found.singular_values.numpy(), plain.singular_values_, rtol=1e-4)
    assert angle < 1e-4
    assert theirs / ours >= 5


STREAM = """
    import sys, time
    import numpy as np, torch
    from vitrine.engine.w2w import PCAConfig, principal_components
    from vitrine.engine.w2w.pca import Matrix

    path, n, d = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rows = torch.from_numpy(np.memmap(path, np.float32, "r+", shape=(n, d)))
    start = time.process_time()
    found = principal_components(Matrix(rows), PCAConfig(200, "gram", int(1.2 * 2**30)))
    print(time.process_time() - start, len(found.basis))
"""


def test_streaming_keeps_its_memory(tmp_path):
    """5,000 x 100k (2 GB on disk) within 2 GB of memory that no file backs; mapped pages may be dropped."""
    n, d = 5_000, 100_000
    path = tmp_path / "rows.f32"
    data = np.memmap(path, np.float32, "w+", shape=(n, d))
    g = np.random.default_rng(0)
    for start in range(0, d, 10_000):
        data[:, start : start + 10_000] = g.standard_normal((n, 10_000), dtype=np.float32)
    data.flush()
    watch = textwrap.dedent(STREAM)
    process = subprocess.Popen(
        [sys.executable, "-c", watch, str(path), str(n), str(d)], stdout=subprocess.PIPE, text=True
    )
    peak = 0.0
    while process.poll() is None:
        peak = max(peak, anonymous(process.pid))
        time.sleep(0.05)
    seconds = float(process.stdout.read().split()[0])
    say(f"{n} x {d}: {seconds:.0f} s of CPU, peak of anonymous memory {peak:.2f} GiB")
    assert peak <= 2.0
    model = cost_model(n, d, seconds)
    say(model)


def anonymous(pid):
    """GiB of memory of a process that no file backs."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(x.split()[1]) / 2**20 for x in lines if x.startswith("RssAnon")), 0.0)


def cost_model(n, d, seconds):
    """2 N^2 D for the Gram matrix, 9 N^3 for its eigenvectors, 2 N K D for the components."""
    rate = (2 * n * n * d + 9 * n**3 + 2 * n * 200 * d) / seconds
    big, k = 65_000, 10_000
    work = 2 * big * big * d + 9 * big**3 + 2 * big * k * d
    gram, basis = 8 * big**2 / 2**30, 4 * k * d / 2**30
    return (
        f"{rate / 1e9:.0f} GFLOP/s here; 65,000 x 100k with 10,000 components: {work:.1e} operations, "
        f"{work / rate / 3600:.0f} h on this machine; Gram matrix {gram:.0f} GiB in float64, components {basis:.1f} "
        f"GiB: a machine of 128 GiB, {work / 2e12 / 3600:.1f} h at 2 TFLOP/s (a server of 64 cores)"
    )


def test_batched_training_against_peft_one_at_a_time():
    """The paper's batch of one picture a step: 16 models together, against PEFT adapters one after another."""
    from vitrine.engine.w2w.world import frozen, subject

    portraits, denoiser = frozen()
    who, steps = [20_000_000 + i for i in range(16)], 10
    config = LoraTrainConfig(alpha=4.0, steps=steps, batch=1, lr=1e-2)
    subjects = [subject(portraits, i, 4) for i in who]
    trainer = BatchedTrainer(denoiser, subjects, config)
    trainer.step()
    batched, _ = clock(lambda: [trainer.step() for _ in range(steps)])
    unet = portraits.unet
    unet.add_adapter(LoraConfig(r=1, lora_alpha=4, target_modules=list(config.targets)))
    learnt = [p for n, p in unet.named_parameters() if ".lora_" in n]
    adam, random = torch.optim.AdamW(learnt, config.lr), torch.Generator().manual_seed(0)

    def plain():
        x0, t, noise, cond = subjects[0].draw(1, random)
        found = denoiser.predict(denoiser.network_input(x0, noise, t), t, cond).eps
        (found - noise).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        adam.step()
        adam.zero_grad()

    plain()
    single, _ = clock(lambda: [plain() for _ in range(steps * 2)])
    one, many = single / (steps * 2), batched / (steps * len(who))
    say(f"one model, one step: PEFT {1000 * one:.1f} ms, batched {1000 * many:.1f} ms ({one / many:.1f} x)")
    assert one / many >= 4


def clock(run):
    start = time.perf_counter()
    found = run()
    return time.perf_counter() - start, found
