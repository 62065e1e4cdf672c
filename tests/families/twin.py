"""What the tiny twins of all families share: weights carried from diffusers' network to ComfyUI's, and their inputs.

A twin is a file here: ``diffusers()``, ``comfyui(ops)``, ``prompt(generator, rows)`` and ``run(net, x, t, cond)``,
ComfyUI's bare call with t in 0 .. 1000, whose result is eps - x0. ``SIZE`` is its latents' ([T,] h, w), ``CHANNELS``
their number if not 16, ``MODEL`` its class in ComfyUI's ``supported_models``, ``CONFIG_KEYS`` what that asks of a
config, ``TIME`` the timestep if not 300, ``EPS`` the qk-norm epsilon that ComfyUI's network has where diffusers' has
another one, ``ROUNDING`` by how much more its many blocks may round than others', ``EXPERTS`` whether tokens of all
rows are multiplied together by experts: what one row's tokens choose then changes how the other's are rounded.
"""

import functools
import importlib
from pathlib import Path

import torch
from vitrine.engine.families import family_of
from vitrine.engine.families.weights import comfyui_name
from vitrine.engine.network.condition import Condition

NAMES = sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem != "twin")


def twin(name):
    return importlib.import_module(f"vitrine_tests.families.{name}")


def text_states(g, *shape):
    return torch.randn(*shape, generator=g)


def condition(text, pooled=None, **extra):
    return Condition(text, pooled, extra)


def shaken(model):
    """Norms, biases, gates and tables away from the values they are built with, so that a swapped pair shows."""
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=g))
    return model.eval().requires_grad_(False)


def carried(weights, state):
    """ComfyUI's state dict from diffusers' by a family's own table."""
    found, parts = {}, {}
    for name, value in state.items():
        place = comfyui_name(weights, name)
        weight = state.get(name.replace(".bias", ".weight"))
        if weight is not None and weight.ndim == 2 and place.swapped(tuple(weight.shape)):
            value = torch.cat(value.chunk(2)[::-1])
        if place.part is None:
            assert place.name not in found, f"two weights for {place.name}"
            found[place.name] = value
        else:
            parts.setdefault(place.name, {})[place.part < 0, place.part] = value
    return found | {name: torch.cat([p[i] for i in sorted(p)]) for name, p in parts.items()}


def comfyui_twin(name, ours):
    """ComfyUI's network with the weights of diffusers'; every one of both must find its place."""
    import comfy.ops

    module = twin(name)
    theirs = module.comfyui({"operations": comfy.ops.disable_weight_init, "device": "cpu", "dtype": torch.float32})
    state = carried(family_of(ours).weights, ours.state_dict())
    shapes = {k: v.shape for k, v in theirs.state_dict().items()}
    state = {k: v.reshape(shapes[k]) if k in shapes and v.numel() == shapes[k].numel() else v for k, v in state.items()}
    theirs.load_state_dict(state, strict=True)
    return theirs.eval().requires_grad_(False)


def comfyui_model(name, net):
    """A MODEL around ComfyUI's network, of the class that ComfyUI's loader would choose."""
    import comfy.model_patcher
    import comfy.supported_models

    config = getattr(comfy.supported_models, twin(name).MODEL)(
        {"disable_unet_model_creation": True} | getattr(twin(name), "CONFIG_KEYS", {})
    )
    config.set_inference_dtype(torch.float32, None)
    base = config.get_model({}, "")
    base.diffusion_model = net
    return comfy.model_patcher.ModelPatcher(base, torch.device("cpu"), torch.device("cpu"))


def conditioning(name, cond):
    """The prompt as ComfyUI's text encoders would give it."""
    return getattr(twin(name), "conditioning", lambda c: [[c.text, {}]])(cond)


@functools.cache
def network(name):
    """diffusers' tiny network; the same one for all."""
    return shaken(twin(name).diffusers())


def inputs(name, rows=2):
    """(x (B, C, [T,] h, w), t, Condition)."""
    module, g = twin(name), torch.Generator().manual_seed(1)
    t = getattr(module, "TIME", 300.0)
    x = torch.randn(rows, getattr(module, "CHANNELS", 16), *module.SIZE, generator=g)
    return x, t, module.prompt(g, rows)


class EqualEpsilon:
    """While open, diffusers' qk-norms have ComfyUI's epsilon."""

    def __init__(self, name, net):
        self.eps = getattr(twin(name), "EPS", None)
        norms = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
        self.norms = [m for n, m in net.named_modules() if n.rpartition(".")[2] in norms and self.eps]

    def __enter__(self):
        self.old = [m.eps for m in self.norms]
        for module in self.norms:
            module.eps = self.eps

    def __exit__(self, *error):
        for module, eps in zip(self.norms, self.old, strict=True):
            module.eps = eps
