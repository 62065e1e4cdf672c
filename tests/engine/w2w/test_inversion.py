"""Inversion (checks 15, 16, 17) against the published loop, written out plainly here."""

import os
import shutil
from dataclasses import replace

import pytest
import torch
from diffusers import DDIMScheduler
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.diffusion.schedule import NoiseSchedule
from vitrine.engine.errors import VitrineError
from vitrine.engine.jobs.run import sole_owner
from vitrine.engine.network.condition import Condition
from vitrine.engine.portraits.models import SCHEDULER_CONFIG
from vitrine.engine.runtime.progress import Interrupted
from vitrine.engine.settings.w2w_options import preset
from vitrine.engine.w2w import (
    BatchedLora,
    DeltaSpace,
    InvertConfig,
    LoraLayer,
    Manifest,
    Posterior,
    invert,
    invert_below,
    invert_in,
    latent_mask,
    partial_inversion,
)
from vitrine.engine.w2w.edit.inversion import KEPT_STATES
from vitrine.engine.w2w.edit.inversion_space import mask_for
from vitrine_tests.lanes import nightly_but

pytestmark = pytest.mark.rounding


def scheduler():
    return DDIMScheduler(**SCHEDULER_CONFIG)


def denoiser(unet):
    return Denoiser.from_diffusers(unet, scheduler())


def test_inversion_is_the_published_loop(space, unet):
    """Five Adam steps against a plain loop: beta = 0, uniform t, masked MSE over all elements, one level a step."""
    g = torch.Generator().manual_seed(1)
    latents, text = torch.randn(1, 4, 8, 8, generator=g), torch.randn(1, 5, 12, generator=g)
    mask = (torch.rand(1, 1, 8, 8, generator=g) > 0.4).float()
    config = InvertConfig(components=20, steps=5, lr=0.1, seed=3, check_every=5)
    found = invert(denoiser(unet), space, latents, Condition(text), config, mask)

    beta = torch.zeros(20, requires_grad=True)
    adam = torch.optim.Adam([beta], 0.1, weight_decay=1e-10)
    abar, draw = scheduler().alphas_cumprod, torch.Generator().manual_seed(3)
    for _ in range(5):
        noise = torch.randn(1, 4, 8, 8, generator=draw)
        t = torch.randint(0, 1000, (1,), generator=draw)
        theta = (beta @ space.components[:20]) * space.scale + space.mean
        with BatchedLora(unet, space.manifest, theta[None]):
            x = abar[t].sqrt() * latents + (1 - abar[t]).sqrt() * noise
            loss = torch.nn.functional.mse_loss(mask * unet(x, t, text).sample, mask * noise)
        adam.zero_grad()
        loss.backward()
        adam.step()
    torch.testing.assert_close(found.coefficients[0, :20], beta.detach(), atol=1e-4, rtol=0)
    assert torch.equal(found.coefficients[0, 20:], torch.zeros(space.dimension - 20))


def test_posterior_samples_are_the_published_codes(space, unet, tmp_path):
    """Each step encodes anew: mean + deviation x noise, against a plain loop; and a stopped run goes on with them."""
    g = torch.Generator().manual_seed(1)
    means, deviations = torch.randn(1, 4, 8, 8, generator=g), torch.rand(1, 4, 8, 8, generator=g)
    text, posterior = torch.randn(1, 5, 12, generator=g), Posterior(means, deviations)
    config = InvertConfig(components=20, steps=5, lr=0.1, seed=3, check_every=5, posterior="sample")
    args = (denoiser(unet), space, posterior, Condition(text), config)
    sampled = invert(*args)

    beta = torch.zeros(20, requires_grad=True)
    adam = torch.optim.Adam([beta], 0.1, weight_decay=1e-10)
    abar, draw = scheduler().alphas_cumprod, torch.Generator().manual_seed(3)
    for _ in range(5):
        noise = torch.randn(1, 4, 8, 8, generator=draw)
        t = torch.randint(0, 1000, (1,), generator=draw)
        latents = means + deviations * torch.randn(1, 4, 8, 8, generator=draw)
        theta = (beta @ space.components[:20]) * space.scale + space.mean
        with BatchedLora(unet, space.manifest, theta[None]):
            x = abar[t].sqrt() * latents + (1 - abar[t]).sqrt() * noise
            loss = torch.nn.functional.mse_loss(unet(x, t, text).sample, noise)
        adam.zero_grad()
        loss.backward()
        adam.step()
    torch.testing.assert_close(sampled.coefficients[0, :20], beta.detach(), atol=1e-4, rtol=0)
    mean = invert(*args[:4], replace(config, posterior="mean"))
    plain = invert(*args[:2], means, args[3], replace(config, posterior="mean"))
    assert torch.equal(mean.coefficients, plain.coefficients)
    assert not torch.equal(mean.coefficients, sampled.coefficients)

    def stop(step, total, preview=None):
        if step == 2:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        invert_in(tmp_path, *args, progress=stop)
    with pytest.raises(VitrineError, match="begun with"):
        invert_in(tmp_path, *args[:2], Posterior(means, 2 * deviations), *args[3:])
    assert torch.equal(invert_in(tmp_path, *args).coefficients, sampled.coefficients)
    with pytest.raises(VitrineError, match="Posterior"):
        invert(*args[:2], means, *args[3:])
    with pytest.raises(VitrineError, match="posterior"):
        InvertConfig(posterior="mode")


def test_pictures_of_a_batch_do_not_see_each_other(space, unet):
    latents, text = torch.randn(3, 4, 8, 8), torch.randn(1, 5, 12)
    config = InvertConfig(components=20, steps=6, batch=2)
    together = invert(denoiser(unet), space, latents, Condition(text), config).coefficients
    alone = invert(denoiser(unet), space, latents[1:2], Condition(text), config).coefficients
    torch.testing.assert_close(together[1:2], alone, atol=1e-4, rtol=1e-3)


class InterruptProcessingException(Exception):
    """Named as ComfyUI's own."""


def stopping(error, at):
    def progress(step, total, preview=None):
        if step == at:
            raise error

    return progress


@pytest.mark.parametrize(
    "kind",
    nightly_but(
        [KeyboardInterrupt, Interrupted, InterruptProcessingException, RuntimeError],
        [InterruptProcessingException, RuntimeError],
    ),
)
def test_whatever_stops_an_inversion_propagates_with_the_best_so_far(space, unet, kind, no_hooks_left):
    args = (denoiser(unet), space, torch.randn(1, 4, 8, 8), Condition(torch.randn(1, 5, 12)))
    for check_every in (3, 25):  # with and without a check before the end
        config = InvertConfig(steps=100, check_every=check_every)
        with pytest.raises(kind) as caught:
            invert(*args, config, progress=stopping(kind(), 4))
        partial = partial_inversion(caught.value)
        assert partial.interrupted and partial.steps == 4 and partial.coefficients.abs().max() > 0
        assert [step for step, _ in partial.losses] == [s for s in (3,) if check_every == 3]
        no_hooks_left(unet)
    whole = invert(*args, InvertConfig(steps=100, check_every=100), progress=stopping(kind(), 4), partial_on=(kind,))
    assert torch.equal(whole.coefficients, partial.coefficients) and whole.interrupted
    with pytest.raises(kind):
        invert(*args, config, progress=stopping(kind(), 4), partial_on=(ZeroDivisionError,))
    assert partial_inversion(KeyboardInterrupt()) is None


def test_masks(space, unet):
    eight_bit = torch.randint(0, 2, (1, 32, 32)).float() * 255
    small = latent_mask(eight_bit / 255, 8, 8)
    assert small.shape == (1, 1, 8, 8) and small.min() >= 0 and small.max() <= 1
    tall = torch.zeros(1, 48, 32)
    tall[:, :24] = 1
    # aligned with its picture, not squashed to a square
    assert torch.equal(latent_mask(tall, 12, 8)[0, 0, :, 0], torch.tensor([1.0] * 6 + [0.0] * 6))
    for frames in (torch.zeros(3, 16, 1, 12, 8), torch.zeros(3, 16, 12, 8)):  # as Krea 2's and Wan's, as Flux's
        assert (mask_for(latent_mask(tall, 12, 8)[:1], frames) * frames).shape == frames.shape
        assert (mask_for(None, frames) * frames).shape == frames.shape
    args = (denoiser(unet), space, torch.randn(1, 4, 8, 8), Condition(torch.randn(1, 5, 12)), InvertConfig(steps=1))
    for bad, told in (
        (eight_bit[None, :, :8, :8], "0 .. 1"),
        (torch.ones(1, 1, 4, 4), "mask"),
        (torch.zeros(1, 1, 8, 8), "empty"),
    ):
        with pytest.raises(VitrineError, match=told):
            invert(*args, bad)


def test_coefficients_pass_32_where_bfloat16_stalls():
    """Check 17: unit gradients, lr 0.1, 800 steps: 80 in float32, 32 in bfloat16 (state of the published code)."""
    ends = {}
    for dtype in (torch.float32, torch.bfloat16):
        beta = torch.zeros(1, dtype=dtype, requires_grad=True)
        adam = torch.optim.Adam([beta], 0.1)
        for _ in range(800):
            beta.grad = torch.full_like(beta, -1.0)
            adam.step()
        ends[dtype] = float(beta.detach())
    assert ends[torch.bfloat16] == 32 and abs(ends[torch.float32] - 80) < 0.1


def test_presets_are_the_papers():
    assert (preset("photo").components, preset("photo").lr, preset("photo").steps) == (10_000, 0.1, 400)
    odd = preset("out_of_distribution")
    assert (odd.components, odd.lr, odd.weight_decay, odd.steps) == (1_000, 1.0, 0.0, 800)
    with pytest.raises(VitrineError, match="preset"):
        preset("best")


@pytest.fixture
def delta(loras):
    """Mixed ranks: LoRA 1 has two factors a layer."""
    some = loras(6)
    wide = {
        p: LoraLayer(torch.cat([v.down, some[0][p].down]), torch.cat([v.up, 0.3 * some[2][p].up], 1), 54.0)
        for p, v in some[1].items()
    }
    return DeltaSpace.of([some[0], wide, *some[2:]], [f"m{i}" for i in range(6)])


def test_inversion_in_a_delta_space(delta, unet):
    """The loss falls, and the held-out loss it names is that of the model it returns, applied as a LoRA."""
    g = torch.Generator().manual_seed(1)
    latents, text = torch.randn(2, 4, 8, 8, generator=g), torch.randn(1, 5, 12, generator=g)
    config = InvertConfig(steps=30, lr=1.0, batch=4, check_every=10, antithetic=True)
    run = invert(denoiser(unet), delta, latents, Condition(text), config)
    first, best = run.losses[0][1], [min(losses) for losses in zip(*(row for _, row in run.losses), strict=True)]
    assert run.coefficients.shape == (2, delta.dimension) and run.coefficients.abs().max() > 0
    start = held_out(unet, delta, torch.zeros(2, delta.dimension), latents, text, config)
    mine = held_out(unet, delta, run.coefficients, latents, text, config)
    torch.testing.assert_close(mine, torch.tensor(best), atol=1e-4, rtol=1e-4)
    assert (mine < start).all() and all(a <= b + 1e-6 for a, b in zip(best, first, strict=True))


def held_out(unet, space, coefficients, latents, text, config):
    """(B,) losses on the noise that decides what is best, by one exact LoRA after another."""
    out = []
    for row, latent in zip(coefficients, latents, strict=True):
        draw = torch.Generator().manual_seed(config.seed + 77_777)
        noise = torch.randn(8, 4, 8, 8, generator=draw)
        t = ((torch.arange(8) + torch.rand(1, generator=draw)) * 1000 / 8).long()
        exact = space.stacked(row)
        manifest = Manifest.of(exact)
        abar = scheduler().alphas_cumprod[t].view(-1, 1, 1, 1)
        with torch.no_grad(), BatchedLora(unet, manifest, manifest.flatten(exact)[None]):
            eps = unet(abar.sqrt() * latent + (1 - abar).sqrt() * noise, t, text.expand(8, -1, -1)).sample
        out.append((eps - noise).square().mean())
    return torch.stack(out)


def test_the_loss_of_a_flow_is_of_its_velocity(space, unet):
    """In eps, an error counted (1 - s)^2 times: next to nothing at high noise."""
    seen = []

    def call(x, t, cond):
        seen.append((x, t))
        return 0 * unet(x, t, cond.text).sample

    model = Denoiser(unet, NoiseSchedule.flow(), "flow", call)
    latent = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    best = invert(model, space, latent, Condition(torch.randn(1, 5, 12)), InvertConfig(steps=1, check_every=1)).losses
    x, t = seen[-1]  # of the held-out loss
    s = (t / 1000).view(-1, 1, 1, 1)
    noise = (x - (1 - s) * latent) / s
    assert best[-1][1][0] == pytest.approx(float((noise - latent).square().mean()), rel=1e-3)


@pytest.mark.parametrize("kind", nightly_but(["factors", "delta"], ["factors"]))
def test_pictures_together_give_one_model(kind, space, delta, unet):
    """The same picture twice is that picture; of two the loss is their mean."""
    which = space if kind == "factors" else delta
    g = torch.Generator().manual_seed(1)
    latents, text = torch.randn(2, 4, 8, 8, generator=g), torch.randn(1, 5, 12, generator=g)
    config = InvertConfig(steps=4, lr=0.5, batch=2, check_every=4, together=True)
    alone = invert(denoiser(unet), which, latents[:1], Condition(text), config)
    twice = invert(denoiser(unet), which, latents[[0, 0]], Condition(text), config)
    torch.testing.assert_close(twice.coefficients, alone.coefficients, atol=1e-4, rtol=1e-3)
    both = invert(denoiser(unet), which, latents, Condition(text), config)
    assert both.coefficients.shape == alone.coefficients.shape == (1, which.dimension)
    assert len(both.losses[0][1]) == 1 and not torch.allclose(both.coefficients, alone.coefficients, atol=1e-3)
    mask = torch.ones(2, 1, 8, 8)
    mask[1] = 0.01  # the second picture hardly counts
    masked = invert(denoiser(unet), which, latents, Condition(text), config, mask)
    nearer = (masked.coefficients - alone.coefficients).norm() / (both.coefficients - alone.coefficients).norm()
    assert nearer < 0.1


@pytest.mark.parametrize("kind", nightly_but(["factors", "delta"], ["factors"]))
def test_a_stopped_inversion_goes_on_bit_for_bit(kind, space, delta, unet, tmp_path):
    """Stopped between two saves: the same as one that never stopped, losses and generators included."""
    which = space if kind == "factors" else delta
    args = (denoiser(unet), which, torch.randn(2, 4, 8, 8), Condition(torch.randn(1, 5, 12)))
    config = InvertConfig(components=4, steps=9, batch=2, check_every=3, lr=0.5, schedule="cosine", prior=1e-3)
    whole = invert(*args, config)
    counted = []

    def count(step, total, preview=None):
        counted.append(step)

    def stop(step, total, preview=None):
        if step == 5:  # the state on disk is that of step 3, as kill -9 would leave it
            shutil.copytree(tmp_path / "run", tmp_path / "killed", ignore=shutil.ignore_patterns(".owner*"))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        invert_in(tmp_path / "run", *args, config, progress=stop)
    killed = invert_in(tmp_path / "killed", *args, config, progress=count)
    assert counted == [4, 5, 6, 7, 8, 9]
    counted.clear()
    resumed = invert_in(tmp_path / "run", *args, config, progress=count)
    assert counted == [6, 7, 8, 9]
    for run in (killed, resumed):
        assert torch.equal(run.coefficients, whole.coefficients) and run.losses == whole.losses
    again = invert_in(tmp_path / "run", *args, config, progress=count)
    assert len(counted) == 4 and torch.equal(again.coefficients, whole.coefficients), "a finished run is not made again"
    with pytest.raises(VitrineError, match="begun with"):
        invert_in(tmp_path / "run", args[0], which, args[2] + 1, args[3], config)
    with pytest.raises(VitrineError, match="begun with"):
        invert_in(tmp_path / "run", *args, InvertConfig(steps=8))


def test_stopped_inversions_do_not_pile_up(space, unet, tmp_path):
    """Each other seed used to leave a folder for ever; now the last ones stay, and those that a process is at."""
    args = (denoiser(unet), space, torch.randn(1, 4, 8, 8), Condition(torch.randn(1, 5, 12)))

    def stop(step, total, preview=None):
        if step == 2:
            raise RuntimeError

    def states():
        return {p.parent.name for p in tmp_path.glob("inversion-*/state.safetensors")}

    seen = []
    for seed in range(KEPT_STATES + 3):
        with pytest.raises(RuntimeError):
            invert_below(tmp_path, *args, InvertConfig(components=3, steps=4, seed=seed), progress=stop)
        seen += sorted(states() - set(seen))
        for age, name in enumerate(reversed(seen)):
            if name in states():
                os.utime(tmp_path / name / "state.safetensors", (1e9 - age, 1e9 - age))
    assert states() == set(seen[-KEPT_STATES - 1 :])
    with sole_owner(tmp_path / seen[-KEPT_STATES - 1]):
        invert_below(tmp_path, *args, InvertConfig(components=3, steps=4, seed=99))
    assert states() == set(seen[-KEPT_STATES - 1 :]), "in use, so it stays"
    invert_below(tmp_path, *args, InvertConfig(components=3, steps=4, seed=99))
    assert states() == set(seen[-KEPT_STATES:])


def test_only_trained_components_are_placed(space, unet):
    config = InvertConfig(components=3, steps=2)
    run = invert(denoiser(unet), space, torch.randn(1, 4, 8, 8), Condition(torch.randn(1, 5, 12)), config)
    assert run.coefficients.shape == (1, space.dimension) and not run.coefficients[0, 3:].any()
    from vitrine.engine.w2w.edit.inversion import _State

    held = _State(denoiser(unet), space, torch.randn(1, 4, 8, 8), Condition(torch.randn(1, 5, 12)), config, None)
    assert len(held.space.components) == 3
