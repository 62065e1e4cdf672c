"""What streaming taps and a ranking really hold: the process's peak, beyond that of a bare forward."""

import gc
from pathlib import Path

import pytest
import torch
from diffusers import DDIMScheduler
from vitrine.engine.activations import TapConfig
from vitrine.engine.activations.filter import FilterRule
from vitrine.engine.activations.ranking import RankingConfig, rank_places
from vitrine.engine.activations.streaming import stream_taps
from vitrine.engine.condition import Condition
from vitrine.engine.denoiser import Denoiser
from vitrine_tests import models

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
pytestmark = pytest.mark.skipif(not RESET.exists(), reason="the system does not tell a process's peak")
MiB = 2**20


def kib(name):
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(name))


def held(run):
    """Bytes that the process held at most beyond what it had."""
    gc.collect()
    RESET.write_text("5")  # the peak begins anew
    before = kib("VmRSS")
    run()
    return 1024 * (kib("VmHWM") - before)


@pytest.fixture(scope="module")
def denoiser():
    net = models.unet(block_out_channels=(64, 128), sample_size=64).requires_grad_(False)
    return Denoiser.from_diffusers(net, DDIMScheduler())


def seeded(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def bare(denoiser, latents, cond):
    with torch.no_grad():
        denoiser.forward(latents, 50.0, cond.take(torch.zeros(len(latents), dtype=torch.long)))


def test_all_places_of_large_pictures_within_a_budget(denoiser, tmp_path):
    latents, cond = seeded(2, 4, 48, 48), Condition(seeded(1, 5, models.TEXT))
    places = TapConfig(("*-out", "*-increment", "*-q", "*-k", "*-v", "*-inner"), batch=1)
    bare(denoiser, latents[:1], cond)
    own = held(lambda: bare(denoiser, latents[:1], cond))
    found = []

    def run():
        found.append(stream_taps(denoiser, lambda n: (latents[list(n)], cond), ["a", "b"], places, tmp_path, budget))

    budget = 16 * MiB
    peak = held(run)
    written = sum(p.stat().st_size for p in tmp_path.glob("shard-*"))
    assert written > 4 * budget and len(found[0].parts) > 4
    assert peak - own <= 1.25 * budget, f"{peak / MiB:.0f} MiB, {own / MiB:.0f} of a bare forward"


def test_ranking_of_many_pictures_within_a_budget(tmp_path):
    net = models.unet(block_out_channels=(32, 64), sample_size=16).requires_grad_(False)
    small = Denoiser.from_diffusers(net, DDIMScheduler())
    latents, cond = seeded(96, 4, 32, 32), Condition(seeded(1, 5, models.TEXT))
    masks = (torch.arange(64)[None, :, None] + torch.arange(96)[:, None, None] % 64 > 63).long().expand(-1, -1, 64)
    config = RankingConfig("up-level1-repeat0-vit-block0-*out", rule=FilterRule(None, None, (None, None)), most=1)
    bare(small, latents[:16], cond)
    own, budget = held(lambda: bare(small, latents[:16], cond)), 24 * MiB
    ranking = []
    told = {"masks": masks, "state": tmp_path, "memory": budget}
    peak = held(lambda: ranking.append(rank_places(small, latents, cond, config, **told)))
    written = sum(p.stat().st_size for p in (tmp_path / "taps").glob("shard-*"))
    assert written > budget and ranking[0].search is not None
    assert peak - own <= 1.25 * budget, f"{peak / MiB:.0f} MiB, {own / MiB:.0f} of a bare forward"
