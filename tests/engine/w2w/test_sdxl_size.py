"""A delta space of LoRAs with SDXL's attention layers, by the commands: written, built, opened, sampled.

Small as it stands. ``VITRINE_LARGE=FOLDER pytest -s FILE -k COUNT`` takes rank 64 and the widths of the real UNet, and
prints time, on the clock and of the processor, and the process's peak: 100 LoRAs on every 11th of the 560 layers (2 GB
of files), 1,000 on every 93rd (2 GB); ``VITRINE_EVERY=1`` on all of them. What is in the folder already is not written
anew, and a stopped build goes on.
"""

import os
import re
import time
from pathlib import Path

import pytest
import torch
from vitrine.cli.main import main
from vitrine.engine.w2w import LoraLayer, load_space, read_lora, write_lora
from vitrine_tests.models import SDXL, outline, unet_xl
from vitrine_tests.peak import RESET, STATUS

FULL = os.environ.get("VITRINE_LARGE", "")
PROJECTION = re.compile(r"attn[12]\.to_(q|k|v|out\.0)$")


def attention(every=1):
    """Layer path -> (out, in) of the attention's projections, each ``every``-th of them."""
    modules = (outline(**SDXL) if FULL else unet_xl()).named_modules()
    found = [(path, module) for path, module in modules if PROJECTION.search(path)]
    return {path: (module.out_features, module.in_features) for path, module in found[::every]}


def folder_of(folder, count, shapes, rank):
    """Random LoRAs that differ along three common directions and, half as far, each in a way of its own."""

    def factors(seed):
        random = torch.Generator().manual_seed(seed)
        for path, (out, width) in shapes.items():
            down = torch.randn(rank, width, generator=random) / width**0.5
            yield path, down, torch.randn(out, rank, generator=random) * 0.01

    common = [list(factors(10**6 + k)) for k in range(3)]
    for i in range(count):
        path = folder / f"{i:04}.safetensors"
        if path.is_file():
            continue
        along, layers = torch.randn(3, generator=torch.Generator().manual_seed(i)).tolist(), {}
        for number, (layer, down, up) in enumerate(factors(i + 2 * 10**6)):
            down, up = down * 0.5, up * 0.5
            for share, shared in zip(along, common, strict=True):
                down, up = down.add_(shared[number][1], alpha=share), up.add_(shared[number][2], alpha=share)
            layers[layer] = LoraLayer(down, up, float(rank))
        write_lora(path, layers, dtype=torch.float16)


def command(*words):
    """Runs a command; prints its time and the most that this process, torch included, held meanwhile."""
    if RESET.exists():
        RESET.write_text("5")  # the peak begins anew
    begun, used = time.monotonic(), time.process_time()
    assert main([str(word) for word in words]) == 0
    spent = f"{time.monotonic() - begun:.0f} s, {time.process_time() - used:.0f} s of the processor"
    peak = [int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith("VmHWM")]
    shown = f"{peak[0] / 2**20:.2f} GiB" if peak else "not told"
    print(f"\n{' '.join(map(str, words[:2]))}: {spent}, peak {shown}")  # noqa: T201


@pytest.mark.parametrize(("count", "every"), [(100, 11), (1000, 93)])
def test_built_and_sampled(tmp_path, count, every):
    count, every, rank = (count, int(os.environ.get("VITRINE_EVERY", every)), 64) if FULL else (6, 3, 2)
    here = Path(FULL) / f"sdxl-{count}-{every}" if FULL else tmp_path
    shapes = attention(every)
    begun = time.monotonic()
    folder_of(here / "loras", count, shapes, rank)
    print(f"\n{count} files of {len(shapes)} layers written: {time.monotonic() - begun:.0f} s")  # noqa: T201
    space = here / "space.w2w.safetensors"
    command("w2w", "build", here / "loras", "--out", space, "--mode", "delta", "--linked")
    command("w2w", "sample", space, "--seeds", 0, "--rank", rank, "--save-dtype", "float16", "--out", here / "new")
    assert space.stat().st_size < 30 * count**2 + 10**6, "the factors stay in the LoRA files"
    sampled = read_lora(next((here / "new").glob("*.safetensors")))
    assert set(sampled) == set(shapes) and {layer.rank for layer in sampled.values()} == {rank}
    opened = load_space(space)
    shares = opened.explained.double().cumsum(0)
    assert opened.count == count and shares[4] > 0.5, "products of three common factors lead"
