"""Gradients with respect to the text, computed with little memory: the same numbers, fewer bytes kept."""

import torch
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.nemo.blocking_checks import AttackConfig, optimised_text
from vitrine.engine.network.condition import Condition
from vitrine.engine.network.light_gradients import SHARE, computed_again, copies_its_weights, parts_of
from vitrine.engine.portraits import load_portraits
from vitrine_tests import models


class Kept:
    """Bytes of distinct storages that autograd keeps for the backward pass."""

    def __enter__(self):
        self.storages = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error):
        self.hooks.__exit__(*error)

    def _pack(self, tensor):
        storage = tensor.untyped_storage()
        self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def total(self):
        return sum(self.storages.values())


def gradient(net, parts):
    g = torch.Generator().manual_seed(0)
    x, t = torch.randn(1, 4, 8, 8, generator=g), torch.tensor([300])
    text = torch.randn(1, 5, net.config.cross_attention_dim, generator=g, requires_grad=True)
    with computed_again(parts), Kept() as kept:
        out = net(x, t, text).sample
        (slope,) = torch.autograd.grad(out.square().sum(), text)
    return slope, kept.total


def test_the_gradient_is_the_same_and_hooks_inside_run_again():
    net, runs = models.unet().requires_grad_(False), []
    parts = parts_of(net, lambda: net(torch.zeros(1, 4, 8, 8), 1, torch.zeros(1, 5, net.config.cross_attention_dim)))
    names = {name for name, module in net.named_modules() if module in parts}
    assert names and not any(a != b and b.startswith(f"{a}.") for a in names for b in names), "parts lie in no part"
    inner = next(m for name, m in net.named_modules() if name.endswith("attn2.to_v"))
    hook = inner.register_forward_hook(lambda module, _, out: runs.append(1) or 2 * out)
    plain, much = gradient(net, [])
    light, little = gradient(net, parts)
    hook.remove()
    assert torch.equal(plain, light) and little < much and len(runs) == 3
    assert not any("forward" in vars(part) for part in parts)


def test_parts_are_shares_of_a_real_networks_weights():
    model = load_portraits()
    denoiser = Denoiser.from_diffusers(model.unet, model.scheduler)
    x, text = torch.zeros(1, *model.latent_shape), model.encode([""])
    parts = parts_of(model.unet, lambda: denoiser.predict(x, torch.zeros(1), Condition(text)))
    sizes = [sum(p.numel() for p in part.parameters()) for part in parts]
    total = sum(p.numel() for p in model.unet.parameters())
    assert sum(sizes) > 0.95 * total and sorted(sizes)[-1] <= 2 * total / SHARE


def test_the_attack_on_half_precision_is_computed_again_and_near():
    model = load_portraits()
    cond, reference = Condition(model.encode(["a hat"])), torch.randn(1, *model.latent_shape)
    config, texts = AttackConfig(steps=2, batch=2), []
    for dtype in (torch.float32, torch.bfloat16):
        net = model.unet.to(dtype)
        assert copies_its_weights(net, torch.device("cpu")) == (dtype != torch.float32)
        texts.append(optimised_text(Denoiser.from_diffusers(net, model.scheduler), cond, reference, config))
        assert not any("forward" in vars(m) for m in net.modules())
    assert float((texts[0] - texts[1]).abs().mean()) < 0.02 and not torch.equal(texts[0], cond.text)
