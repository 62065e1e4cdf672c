"""Taps larger than memory: parts, resumption, the ranking of many pictures, and what is really held."""

import multiprocessing
import os
import signal
import time

import pytest
import torch
from diffusers import DDIMScheduler
from vitrine.engine.activations import ActivationReader, TapConfig, tap_latents
from vitrine.engine.activations.ranked_pictures import MadeOf, Pictures
from vitrine.engine.activations.ranking import RankingConfig, rank_sites
from vitrine.engine.activations.streaming import footprint, split_sites, stream_taps
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.network.condition import Condition
from vitrine.engine.runtime.footprint import memory_bytes
from vitrine.engine.settings.ranking_options import FilterRule
from vitrine_tests import models
from vitrine_tests.hangs import HANGS
from vitrine_tests.killed import one_thread

pytestmark = pytest.mark.rounding
NAMES = [f"p{n}" for n in range(5)]
PLACES = ("up-level*-out", "up-level*-increment", "up-level*-cross-q")


def denoiser():
    return Denoiser.from_diffusers(models.shared(models.unet), DDIMScheduler())


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


LATENTS, COND = seeded(5, 4, 32, 32), Condition(seeded(5, 5, models.TEXT, seed=1))


def known(source):
    """Pictures that say what they are made of."""
    return Pictures(5, source, made_of=MadeOf({}, lambda n: [LATENTS[n], COND.take(torch.tensor([n]))]))


def source(numbers):
    rows = torch.tensor(numbers)
    return LATENTS[rows], COND.take(rows)


@pytest.mark.parametrize(("memory", "parts"), [("1GB", 1), ("2MiB", 4)])
def test_streamed_taps_are_the_taps(tmp_path, memory, parts):
    config = TapConfig(PLACES, seeds=(0, 1), variance=memory == "1GB")
    seen = []
    found = stream_taps(denoiser(), source, NAMES, config, tmp_path, memory, lambda n, total, _=None: seen.append(n))
    whole = tap_latents(denoiser(), LATENTS, COND, config)
    assert len(found.parts) >= parts and (parts == 1) == (len(found.parts) == 1) and seen[-1] == 5
    again = found.read(NAMES, list(whole))
    for address, value in whole.items():
        assert torch.allclose(again[address].tensor, value.tensor, rtol=1e-4, atol=1e-5), address
    some = found.read(["p3"], list(whole)[4:6])
    assert list(some) == list(whole)[4:6] and some.rows == 1
    keys = list(ActivationReader(tmp_path))
    assert len(keys) == 5 * len(found.parts) and found.key("p1", 0) in keys
    with pytest.raises(VitrineError, match="another folder"):
        found.read(NAMES, ["unet-in"])


def test_a_budget_is_read_and_too_small_a_one_refused(tmp_path):
    assert memory_bytes("2GB") == 2 * 10**9 and memory_bytes("1.5 MiB") == 3 * 2**19 and memory_bytes(2**20) == 2**20
    for wrong in ("much", "12 GBit", 1000, True):
        with pytest.raises(VitrineError, match="memory"):
            memory_bytes(wrong)
    sizes = footprint(denoiser(), LATENTS[:1], COND.take(torch.tensor([0])), TapConfig(PLACES)).sites
    assert set(sizes) == set(tap_latents(denoiser(), LATENTS[:1], COND.take(torch.tensor([0])), TapConfig(PLACES)))
    assert [a for part in split_sites(sizes, 2**23) for a in part] == list(sizes)
    with pytest.raises(VitrineError, match="MiB for up-level1-.*self-map"):
        stream_taps(denoiser(), source, NAMES, TapConfig("up-level1-*"), tmp_path, "1MiB")
    with pytest.raises(VitrineError, match="distinct names"):
        stream_taps(denoiser(), source, ["a", "a"], TapConfig(PLACES), tmp_path)


def stalls_at_the_third(folder, said):
    """Taps two pictures, says so, and waits to be killed."""

    def stalling(numbers):
        if 2 in numbers:
            said.send("two are done")
            time.sleep(HANGS)
        return source(numbers)

    with one_thread():
        stream_taps(denoiser(), known(stalling), NAMES, TapConfig(PLACES, batch=1), folder, "1MiB")


@pytest.mark.nightly
def test_goes_on_after_kill_9(tmp_path):
    denoiser()  # made here, so that the fork has it
    fork = multiprocessing.get_context("fork")
    heard, said = fork.Pipe(duplex=False)
    first = fork.Process(target=stalls_at_the_third, args=(tmp_path, said))
    first.start()
    try:
        assert heard.poll(HANGS) and heard.recv() == "two are done"
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.join()
    done = {key.split("#")[0] for key in ActivationReader(tmp_path)}
    assert done and done < set(NAMES)
    asked = []

    def asking(numbers):
        asked.extend(numbers)
        return source(numbers)

    with one_thread():
        found = stream_taps(denoiser(), known(asking), NAMES, TapConfig(PLACES, batch=1), tmp_path, "1MiB")
        whole = tap_latents(denoiser(), LATENTS, COND, TapConfig(PLACES, batch=1))
    assert 0 not in asked and 4 in asked, "finished pictures are not tapped again"
    again = found.read(NAMES, list(whole))
    assert all(torch.equal(again[a].tensor, whole[a].tensor) for a in whole)


def masks():
    return (seeded(8, 64, 64, seed=5) > 0).long()


def test_ranking_within_a_budget_is_the_ranking(tmp_path):
    latents, cond = seeded(8, 4, 16, 16), Condition(seeded(1, 5, models.TEXT))
    config = RankingConfig("up-level1-repeat0-vit-block0-*out", rule=FilterRule(None, None, (None, None)), most=2)
    told = {"config": config}
    pictures = Pictures.of(latents, cond, masks())
    whole = rank_sites(denoiser(), pictures, **told)
    small = rank_sites(denoiser(), pictures, **told, state=tmp_path, memory="16MiB")
    assert small.search is not None and whole.search is not None
    assert small.chosen == whole.chosen and small.search.singles == pytest.approx(whole.search.singles, abs=1e-2)
    assert {a: p.noise for a, p in small.properties.items()} == pytest.approx(
        {a: p.noise for a, p in whole.properties.items()}, abs=1e-5
    )
    again = rank_sites(denoiser(), pictures, **told, state=tmp_path, memory="16MiB")
    assert again.search == small.search
