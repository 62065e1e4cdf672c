"""What streaming taps and a ranking really hold: the process's peak, beyond that of a bare forward."""

import pytest
import torch
from diffusers import DDIMScheduler
from PIL import Image
from vitrine.engine.activations import ActivationReader, TapConfig
from vitrine.engine.activations.ranked_pictures import read_masks
from vitrine.engine.activations.ranking import RankingConfig
from vitrine.engine.activations.streaming import footprint, stream_taps
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.network.condition import Condition
from vitrine.engine.pipelines import ActivationTapPipeline
from vitrine.engine.portraits import load_portraits, render, sample_scenes
from vitrine.engine.settings.ranking_options import FilterRule
from vitrine_tests import models
from vitrine_tests.killed import killed, killing
from vitrine_tests.peak import MiB, bounded, held, needs_peak

PLACES = ("*-out", "*-increment", "*-q", "*-k", "*-v", "*-inner")


def seeded(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@needs_peak
def test_all_places_of_sdxl_at_1024_within_a_budget(tmp_path):
    """SDXL's classes and grids at 1024 px, a twentieth as wide: 40 MiB a picture in one piece."""
    net = models.unet_xl(block_out_channels=(16, 32), sample_size=128).requires_grad_(False)
    denoiser, budget = Denoiser.from_diffusers(net, DDIMScheduler()), 12 * MiB
    extra = {"time_ids": torch.tensor([[1024.0, 1024.0, 0.0, 0.0, 1024.0, 1024.0]])}
    cond = Condition(seeded(1, 5, models.TEXT), seeded(1, models.POOLED), extra)
    latents, config, found = seeded(1, 4, 128, 128), TapConfig(PLACES, batch=1), []
    sizes = footprint(denoiser, latents, cond, config).sites
    assert sum(sizes.values()) > 3 * budget

    def bare():
        denoiser.forward(latents, 50.0, cond)

    own = held(bare)
    peak = held(lambda: found.append(stream_taps(denoiser, lambda n: (latents, cond), ["a"], config, tmp_path, budget)))
    assert len(found[0].parts) > 4 and set(found[0].reader[found[0].key("a", 0)]) <= set(sizes)
    bounded(f"all places of SDXL, beside {own / MiB:.1f} MiB of a bare forward", peak - own, budget)


@pytest.fixture(scope="module")
def pipe():
    return ActivationTapPipeline.from_pipe(load_portraits().pipeline())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """320 portraits and their masks, as files."""
    root = tmp_path_factory.mktemp("pictures")
    for name in ("pictures", "masks"):
        (root / name).mkdir()
    for first in range(7_900_000, 7_900_320, 64):
        drawn = render(sample_scenes(range(first, first + 64)))
        for i, (image, parts) in enumerate(zip(drawn.images, drawn.parts, strict=True)):
            pixels = (image * 255).round().byte().permute(1, 2, 0).numpy()
            Image.fromarray(pixels).save(root / "pictures" / f"{first + i}.png")
            Image.fromarray((parts > 0).byte().numpy()).save(root / "masks" / f"{first + i}.png")
    return read_masks(root / "pictures", root / "masks", 2)


TOLD = {"config": RankingConfig("up-level0-repeat0-*-q", rule=FilterRule(None, None, (None, None)), most=1)}


@needs_peak
def test_ranking_of_many_pictures_within_a_budget(pipe, folder, tmp_path):
    """In one piece: activations 15 MiB, their joined copy as much, pictures 15 MiB, masks 10 MiB."""
    budget, ranking = 26 * MiB, []
    pipe.rank(*folder.read(range(16), 64), memory=budget, **TOLD)
    peak = held(lambda: ranking.append(pipe.rank(folder, state=tmp_path, memory=budget, **TOLD)))
    written = sum(p.stat().st_size for p in (tmp_path / "taps").glob("shard-*"))
    pictures = 320 * 64 * 64 * (3 * 4 + 8)  # and their masks
    assert 2 * written + pictures > 2 * budget and ranking[0].search is not None
    bounded("a ranking of 320 pictures", peak, budget)


@pytest.mark.nightly
def test_a_ranking_goes_on_after_kill_9(pipe, folder, tmp_path):
    some = folder.read(range(48), 64)
    told = TOLD | {"state": tmp_path, "memory": "16MiB"}
    killed(lambda: pipe.rank(*some, **told, progress=killing(lambda step, total: total == 48 and step >= 40)))
    assert (tmp_path / "filter.safetensors").is_file() and not (tmp_path / "scores.safetensors").exists()
    done = len(ActivationReader(tmp_path / "taps"))
    resumed, whole = pipe.rank(*some, **told), pipe.rank(*some, **told | {"state": None})
    assert 0 < done < 48 and resumed.chosen == whole.chosen and resumed.search == whole.search
