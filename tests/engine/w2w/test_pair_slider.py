"""Sliders from pairs: the objective written out plainly, both modes, resumed bit for bit, and the command."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from vitrine.cli.main import main
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.network.condition import Condition
from vitrine.engine.portraits.models import SCHEDULER_CONFIG
from vitrine.engine.portraits.shipped import PEOPLE_SPACE
from vitrine.engine.w2w import (
    BatchedLora,
    DeltaSpace,
    PairConfig,
    Pairs,
    WeightSpace,
    blended,
    contents,
    edit,
    listed,
    sample,
    train_pair_slider,
    with_directions,
    with_pair_slider,
)
from vitrine.engine.w2w.train.lora_trainer import learning_rate

pytestmark = pytest.mark.rounding


def denoiser(unet):
    return Denoiser.from_diffusers(unet, DDIMScheduler(**SCHEDULER_CONFIG))


def pairs_for(space, n=3):
    g = torch.Generator().manual_seed(2)
    models = torch.randn(n, space.dimension, generator=g) * space.deviations
    return Pairs(torch.randn(n, 4, 4, 8, 8, generator=g), Condition(torch.randn(n, 5, 12, generator=g)), models)


def test_training_is_the_equation(space, unet):
    """Three Adam steps against theta_i + s a(c) written out, with the same draws."""
    pairs, start = pairs_for(space), 0.3 * space.deviations
    config = PairConfig(steps=3, batch=5, lr=0.1, start_timestep=600, seed=4)
    trained = train_pair_slider(denoiser(unet), space, pairs, config, start)

    change = start.clone().requires_grad_()
    rate = 0.1 * float(start.square().mean().sqrt())
    adam, draw = torch.optim.Adam([change], rate, betas=(0.9, 0.95)), torch.Generator().manual_seed(4)
    abar = DDIMScheduler(**SCHEDULER_CONFIG).alphas_cumprod
    for step in range(3):
        who = torch.randint(3, (5,), generator=draw)
        level = torch.randint(4, (5,), generator=draw)
        t = ((torch.arange(5) + torch.rand(1, generator=draw)) / 5 * 600).long()
        noise = torch.randn(5, 4, 8, 8, generator=draw)
        theta = pairs.models[who] @ space.components * space.scale + space.mean
        theta = theta + (level + 1)[:, None] / 4 * space.scale * (change @ space.components)
        a = abar[t][:, None, None, None]
        with BatchedLora(unet, space.manifest, theta):
            output = unet(a.sqrt() * pairs.targets[who, level] + (1 - a).sqrt() * noise, t, pairs.cond.text[who]).sample
        adam.zero_grad()
        torch.nn.functional.mse_loss(output, noise).backward()
        adam.param_groups[0]["lr"] = learning_rate(rate, "cosine", step, 3)
        adam.step()
    torch.testing.assert_close(trained, change.detach(), atol=1e-4, rtol=1e-4)
    assert (trained - start).abs().max() > 1e-3


def test_one_person_and_one_prompt_for_all_pairs(space, loras, unet):
    """In both modes; numbers come back in the space's own unit."""
    for which in (space, DeltaSpace.of(loras(6), [f"m{i}" for i in range(6)])):
        pairs = Pairs(torch.randn(2, 4, 4, 8, 8), Condition(torch.randn(1, 5, 12)), torch.zeros(1, which.dimension))
        still = train_pair_slider(denoiser(unet), which, pairs, PairConfig(steps=1, lr=1e-9), which.deviations)
        torch.testing.assert_close(still, which.deviations, rtol=1e-4, atol=1e-6)
        trained = train_pair_slider(denoiser(unet), which, pairs, PairConfig(steps=2, batch=2))
        assert trained.shape == (which.dimension,) and trained.isfinite().all() and trained.any()


def test_a_stopped_training_goes_on_bit_for_bit(space, unet, tmp_path):
    args, config = (denoiser(unet), space, pairs_for(space)), PairConfig(steps=6, batch=2, save_every=4)
    whole, counted = train_pair_slider(*args, config), []

    def stop(step, total, preview=None):
        counted.append(step)
        if step == 3:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        train_pair_slider(*args, config, folder=tmp_path, progress=stop)
    resumed = train_pair_slider(*args, config, folder=tmp_path, progress=lambda step, *_: counted.append(step))
    assert counted == [1, 2, 3, 4, 5, 6] and torch.equal(resumed, whole)
    with pytest.raises(VitrineError, match="begun with"):
        train_pair_slider(*args[:2], pairs_for(space, 2), config, folder=tmp_path)


def test_a_trained_slider_moves_as_trained_and_leaves_seeds_alone(space, tmp_path):
    named = with_directions(space, {"beard": space.deviations.clone(), "nose": space.deviations.flip(0)})
    named = WeightSpace.load(named.save(tmp_path / "named.safetensors"))  # files hold directions in another order
    change = 0.1 * torch.randn(space.dimension, generator=torch.Generator().manual_seed(0))
    more = with_pair_slider(named, "beard (pairs)", change)
    more = replace(more, info={**more.info, "retired": ["nose"]})
    more = WeightSpace.load(more.save(tmp_path / "space.safetensors"))
    strength = more.info["pair_sliders"]["beard (pairs)"]
    moved = edit(more, torch.zeros(space.dimension), {"beard (pairs)": strength})
    torch.testing.assert_close(moved, change, atol=1e-5, rtol=1e-4)
    assert torch.equal(sample(more, [0, 1]), sample(named, [0, 1])), "a new slider made other people of old seeds"
    assert set(more.directions) - set(listed(more)) == {"nose"} and "nose" not in contents(more)
    at_1 = {"nose": 1.0}
    assert torch.equal(edit(more, change, at_1), edit(named, change, at_1)), "a saved workflow may name it"


def test_what_does_not_pair_is_refused(space, unet):
    shown = blended(torch.zeros(2, 3, 8, 8), torch.ones(2, 3, 8, 8))
    assert shown[:, :, 0, 0, 0].tolist() == [[0.25, 0.5, 0.75, 1.0]] * 2
    with pytest.raises(VitrineError, match="pictures after"):
        blended(torch.zeros(2, 3, 8, 8), torch.zeros(3, 3, 8, 8))
    with pytest.raises(VitrineError, match="prompts"):
        Pairs(torch.zeros(3, 4, 4, 8, 8), Condition(torch.zeros(2, 5, 12)), torch.zeros(1, 4))
    with pytest.raises(VitrineError, match="start_timestep: given 0; accepted: above 0, 1000 or less"):
        PairConfig(start_timestep=0)
    wide = Pairs(torch.zeros(1, 4, 4, 8, 8), Condition(torch.zeros(1, 5, 12)), torch.zeros(1, space.dimension + 1))
    with pytest.raises(VitrineError, match="models"):
        train_pair_slider(denoiser(unet), space, wide)


def test_the_command_makes_a_slider_of_two_folders(tmp_path, capsys):
    """Pictures of one person, dark and bright, give the shipped space one more direction."""
    from PIL import Image

    random = np.random.RandomState(0)
    for folder, light in (("before", 90), ("after", 200)):
        (tmp_path / folder).mkdir()
        for name in "ab":
            pixels = random.randint(light - 50, light + 50, (64, 64, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / folder / f"{name}.png")
    out, command = tmp_path / "mine.w2w.safetensors", ["w2w", "pairs", str(PEOPLE_SPACE)]
    command += [str(tmp_path / "before"), str(tmp_path / "after"), "--out", str(out), "--steps", "2"]
    assert main([*command, "--label", "bright", "--shown", "person-0003"]) == 0
    assert "strength" in capsys.readouterr().out and not list(tmp_path.glob(".*work"))
    made, shipped = WeightSpace.load(out), WeightSpace.load(PEOPLE_SPACE)
    assert set(made.directions) == {*shipped.directions, "bright"} and made.identity == shipped.identity
    (tmp_path / "after" / "b.png").unlink()
    assert main([*command, "--label", "bright"]) == 2
