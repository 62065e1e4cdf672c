"""Attacks and concept sliders measure errors as the network learned: v and flow networks not in eps."""

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from vitrine.engine.diffusion.denoiser import Denoiser, training_target
from vitrine.engine.nemo import AttackConfig
from vitrine.engine.nemo.blocking_checks import optimised_text
from vitrine.engine.network.condition import Condition
from vitrine.engine.w2w.train.batched_lora import BatchedLora, initial_lora
from vitrine.evidence.w2w.concept_sliders import SliderConfig, train_sliders
from vitrine_tests import models
from vitrine_tests.families import lumina2

V = DDIMScheduler(prediction_type="v_prediction")
FLOW = FlowMatchEulerDiscreteScheduler(shift=3.0)


def noise(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def of_v():
    """(denoiser, latents' shape, text's shape, the bias that shifts all its outputs)."""
    net = models.unet_v()
    return Denoiser.from_diffusers(net, V), (4, 16, 16), (5, models.TEXT), "conv_out.bias"


def of_flow():
    net = lumina2.diffusers()
    last = [k for k, p in net.named_parameters() if k.endswith("bias")][-1]
    return Denoiser.from_diffusers(net, FLOW), (16, 8, 12), (7, 20), last


@pytest.mark.parametrize("make", [of_v, of_flow])
def test_an_attack_follows_the_gradient_of_the_networks_own_error(make):
    """Adam's first step is the gradient's sign; in eps its rows would have other weights, and other signs here."""
    denoiser, size, text, _ = make()
    start, picture = noise(1, 1, *text), noise(2, 1, *size)
    moved = optimised_text(denoiser, Condition(start), picture, AttackConfig(steps=1, batch=4, lr=0.1))
    g = torch.Generator().manual_seed(0)
    eps = torch.randn(4, *size, generator=g)
    t = torch.randint(denoiser.schedule.steps, (4,), generator=g).float()
    x0 = picture.expand(4, *size)
    x_t = denoiser.network_input(x0, eps, t)
    signal, level = (s.view(-1, 1, 1, 1).float() for s in denoiser.schedule.scales(t))
    wanted = training_target(denoiser.prediction, x0, eps, signal, level)
    free = start.clone().requires_grad_()
    with torch.enable_grad():
        output = denoiser.forward(x_t, t, Condition(free.expand(4, *text)))
        (own,) = torch.autograd.grad((output - wanted).square().mean(), free, retain_graph=True)
        wrong = (denoiser.split(output, x_t, t).eps - eps).square().mean()
        (in_eps,) = torch.autograd.grad(wrong, free)
    clear = own.abs() > 1e-3 * own.abs().max()
    assert torch.equal((start - moved).sign()[clear], own.sign()[clear])
    assert not torch.equal(in_eps.sign()[clear], own.sign()[clear]), "the two differ, so that the test can fail"


def test_a_slider_follows_the_gradient_of_the_networks_own_error():
    """As the attack: the first step of AdamW is the gradient's sign."""
    net = models.unet_v().requires_grad_(False)
    denoiser = Denoiser.from_diffusers(net, V)
    plain, worded = Condition(noise(1, 3, 5, models.TEXT)), Condition(noise(2, 3, 5, models.TEXT))
    config, latents = SliderConfig(steps=1, batch=2, lr=1e-3, targets=("to_k", "to_v")), noise(3, 3, 4, 16, 16)
    weights, manifest = train_sliders(denoiser, latents, plain, [worded], config)
    g = torch.Generator().manual_seed(config.seed)
    picture, t = torch.randint(3, (2,), generator=g), torch.randint(1000, (2,), generator=g)
    x_t = denoiser.network_input(latents[picture], torch.randn(2, 4, 16, 16, generator=g), t)
    base, pulled = (denoiser.forward(x_t, t, c.take(picture)) for c in (plain, worded))
    start = initial_lora(net, config.targets, config.rank, config.alpha, config.seed)
    free = manifest.flatten(start)[None].requires_grad_()
    with BatchedLora(net, manifest, free):
        output = denoiser.forward(x_t, t, plain.take(picture))
    loss = (output - (base + config.eta * (pulled - base))).square().mean()
    (own,) = torch.autograd.grad(loss, free, retain_graph=True)
    signal = denoiser.schedule.scales(t)[0].view(-1, 1, 1, 1).float()
    in_eps = (signal * (output - (base + config.eta * (pulled - base)))).square().mean()
    (other,) = torch.autograd.grad(in_eps, free)
    clear = own.abs() > 1e-2 * own.abs().max()
    moved = (weights - free.detach()).sign()[clear]
    assert torch.equal(moved, -own.sign()[clear]) and not torch.equal(moved, -other.sign()[clear])
