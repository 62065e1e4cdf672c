"""Run by test_family_facts.py without the pack's modules: every method on a family that one more file makes known.

``python walk.py FOLDER``: the files of FOLDER stand beside those of ``engine/families`` before these are imported.
"""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.modeling_utils import ModelMixin
from torch import nn

spec = importlib.util.find_spec("vitrine.engine.families")
spec.submodule_search_locations.append(sys.argv[1])
families = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = families
spec.loader.exec_module(families)

from vitrine.engine import control, emd, nemo  # noqa: E402
from vitrine.engine.activations import TapConfig, tap_latents  # noqa: E402
from vitrine.engine.diffusion.denoiser import Denoiser  # noqa: E402
from vitrine.engine.emd.networks import adapted_layers, part_of  # noqa: E402
from vitrine.engine.errors import VitrineError  # noqa: E402
from vitrine.engine.network.condition import Condition  # noqa: E402
from vitrine.engine.resolution.transfer import facts_of  # noqa: E402
from vitrine.engine.tracing.addresses import sites_of  # noqa: E402
from vitrine.engine.w2w.loras.base_models import shaped_base  # noqa: E402
from vitrine.engine.w2w.loras.layer_names import parse  # noqa: E402


class Attention(nn.Module):
    def __init__(self, text):
        super().__init__()
        self.to_q, self.to_k, self.to_v = nn.Linear(16, 16), nn.Linear(text, 16), nn.Linear(text, 16)
        self.norm_q, self.norm_k, self.to_out = nn.RMSNorm(8), nn.RMSNorm(8), nn.Linear(16, 16)

    def forward(self, x, text):
        heads = [y.unflatten(-1, (2, 8)).transpose(1, 2) for y in (self.to_q(x), self.to_k(text), self.to_v(text))]
        mixed = nn.functional.scaled_dot_product_attention(self.norm_q(heads[0]), self.norm_k(heads[1]), heads[2])
        return self.to_out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.shift = nn.LayerNorm(16, elementwise_affine=False), nn.Linear(16, 96)
        self.self_attention, self.cross_attention = Attention(16), Attention(24)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x, text, time):
        y = self.norm(x) + self.shift(time)[:, None, :16]
        x = x + self.self_attention(y, y)
        return x + self.mlp(x + self.cross_attention(x, text))


class GlimmerTransformer2DModel(ModelMixin, ConfigMixin, PeftAdapterMixin):
    @register_to_config
    def __init__(self, layers=2):
        super().__init__()
        self.patch, self.time, self.unpatch = nn.Conv2d(4, 16, 2, 2), nn.Linear(1, 16), nn.Linear(16, 16)
        self.layer_stack = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, hidden_states, timestep, encoder_hidden_states):
        tokens, time = self.patch(hidden_states), self.time(timestep[:, None])
        x = tokens.flatten(2).transpose(1, 2)
        for block in self.layer_stack:
            x = block(x, encoder_hidden_states, time)
        return nn.functional.pixel_shuffle(self.unpatch(x).transpose(1, 2).unflatten(2, tokens.shape[2:]), 2)


def tapped(net, cond, latents):
    denoiser = Denoiser.from_diffusers(net, FlowMatchEulerDiscreteScheduler())
    return tap_latents(denoiser, latents, cond, TapConfig(("vit-block1-cross-v", "vit-block0-self-map"), 300.0))


def methods(net):
    """Tap, block neurons, LoRA names, student targets: all that the record says is enough."""
    torch.manual_seed(1)
    latents, cond = torch.randn(2, 4, 8, 8), Condition(torch.randn(2, 5, 24))
    before = tapped(net, cond, latents)["vit-block1-cross-v"].tensor
    assert before.shape == (2, 5, 16)
    with nemo.block(net, nemo.NeuronSet({"vit-block1-cross-v": (3,)})):
        blocked = tapped(net, cond, latents)["vit-block1-cross-v"].tensor
    assert not blocked[..., 3].any() and torch.equal(blocked[..., :3], before[..., :3])
    name = "layer_stack.0.cross_attention.to_v"
    assert parse(f"lora_unet_{name.replace('.', '_')}.lora_down.weight").path == name
    assert shaped_base({name: (16, 24)}) == "Glimmer 1" and adapted_layers(net) == ["to_q", "to_v"]
    assert part_of(net) == "transformer" and families.trained_size(net) == (64, 64)


def refusals(net):
    """What the record leaves out or refuses is refused, before any work."""
    with pytest.raises(VitrineError, match="model: given GlimmerTransformer2DModel"):
        control.control_width(net)
    with pytest.raises(VitrineError, match="nothing to weight"):
        control.ReferenceBlend(net, control.GammaConfig())
    pipe = SimpleNamespace(transformer=net, scheduler=FlowMatchEulerDiscreteScheduler(), vae_scale_factor=8)
    with pytest.raises(VitrineError, match=r"\(Glimmer\), which has one size"):
        facts_of(pipe)
    with pytest.raises(VitrineError, match="a UNet of SD1.5"):
        emd.check_network(emd.StudentPreset("SD1.5"), net)
    emd.check_network(emd.StudentPreset("Glimmer 1"), net)
    with pytest.raises(VitrineError, match="given Glimmer 2"):
        emd.check_network(emd.StudentPreset("Glimmer 1"), GlimmerTransformer2DModel(layers=3))


torch.manual_seed(0)
network = GlimmerTransformer2DModel().eval()
assert families.family_of(network).name == "Glimmer" and len(sites_of(network)) == 28
methods(network)
refusals(network)
