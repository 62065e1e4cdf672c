"""Teacher, score network and generator: one frozen backbone and two adapters on it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..diffusion.denoiser import Denoiser
from ..errors import refuse
from ..families import call_of, family_of, layout_of
from ..families.weights import comfyui_name
from ..network.condition import Condition
from ..runtime.compat_peft import activate
from ..runtime.placement import refuse_offloaded

GENERATOR, SCORE = "generator", "score"


def part_of(backbone: nn.Module) -> str:
    """``unet`` or ``transformer``: the network's component name in a pipeline, and its prefix in files."""
    return family_of(backbone).component


def adapted_layers(backbone: nn.Module) -> list[str]:
    """Paths, or their suffixes, of the adapted layers: in transformers all linear layers of blocks.

    Layers whose halves are swapped in ComfyUI are left out (the last text modulation of SD3), since a
    LoRA's factors would differ, and so are layers shared by all blocks, such as Chroma's modulation network.
    """
    family = family_of(backbone)
    if family.adapted:
        return list(family.adapted)
    if not hasattr(backbone, "add_adapter"):
        shown = f"{type(backbone).__name__}, which diffusers has no adapters for"
        raise refuse("backbone", shown, "a diffusers UNet or transformer with add_adapter", "EMD trains through LoRAs")
    matches = (re.match(r".*?\.\d+(?=\.|$)", getattr(site, "path", "")) for site in layout_of(backbone))
    blocks = tuple({f"{match[0]}." for match in matches if match})
    layers = {  # peft keeps an adapted layer as base_layer, next to its factors
        path.removesuffix(".base_layer"): (layer.out_features, layer.in_features)
        for path, layer in backbone.named_modules()
        if isinstance(layer, nn.Linear) and path.startswith(blocks) and ".lora_" not in path
    }
    return [path for path, shape in layers.items() if not comfyui_name(family.weights, path).swapped(shape)]


class Roles:
    """Three denoisers on one network. Each call switches adapters first.

    Args:
        base: the teacher, a Denoiser over a network of a known family; its weights are frozen here.
        rank: LoRA rank of the generator; alpha is the same, so the scale is 1.
        seed: of the adapters' initial weights.
        dtype: of the frozen network's computation; a copy is used if it differs. Adapters stay float32.
        checkpointing: recompute activations in the backward pass.

    Attributes:
        teacher, score, generator: the roles as denoisers.
        part: ``unet`` or ``transformer``.
    """

    def __init__(
        self, base: Denoiser, rank: int, seed: int = 0, dtype: torch.dtype = torch.float32, checkpointing: bool = False
    ) -> None:
        layers = adapted_layers(base.backbone)
        refuse_offloaded(base.backbone)
        self.dtype, self.part = dtype, part_of(base.backbone)
        self.base = base if base.backbone.dtype == dtype else copy_of(base, dtype)
        self.net: Any = self.base.backbone
        self.net.requires_grad_(False).eval()  # eval: different dropout masks would add noise to Delta
        self._add_adapters(layers, rank, seed)
        self._active: str | None = ""
        self.teacher, self.generator, self.score = (self._role(name) for name in (None, GENERATOR, SCORE))
        self._checkpointing = checkpointing
        if checkpointing:
            self._enable_checkpointing()

    def _add_adapters(self, layers: list[str], rank: int, seed: int) -> None:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.tuners_utils import BaseTunerLayer

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for name in (GENERATOR, SCORE):
                config = LoraConfig(r=rank, lora_alpha=rank, target_modules=layers)
                inject_adapter_in_model(config, self.net, name)  # also where a class lacks diffusers' mixin
                for parameter in self.parameters(name).values():
                    parameter.data = parameter.data.float()  # peft gives them the backbone's dtype
        self._layers: list[Any] = [m for m in self.net.modules() if isinstance(m, BaseTunerLayer)]

    def _role(self, name: str | None) -> Denoiser:
        def call(x_t: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
            self.switch(name)
            return self.base.call(x_t, t, cond)

        return self.base.with_call(call)

    def _enable_checkpointing(self) -> None:
        def recomputed(module: Callable, *args: Any, **kwargs: Any) -> Any:
            role = self._active

            def forward(*args: Any, **kwargs: Any) -> Any:
                self.switch(role)  # the chain calls teacher and score between the generator's forward and its vjp
                return module(*args, **kwargs)

            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        self.net.enable_gradient_checkpointing(recomputed)

    def to(self, device: torch.device) -> Roles:
        """Moves the network."""
        self.net.to(device)
        return self

    def switch(self, name: str | None) -> None:
        """Activates one adapter, or none; :meth:`train_only` sets gradients."""
        if name == self._active:
            return
        for layer in self._layers:  # peft's own switch also sets gradients, and takes as long as a block
            activate(layer, name)
        self._active = name

    def parameters(self, name: str) -> dict[str, nn.Parameter]:
        """The parameters of a role's adapter by name."""
        return {k: p for k, p in self.net.named_parameters() if ".lora_" in k and f".{name}." in k}

    def set(self, name: str, weights: Mapping[str, torch.Tensor]) -> None:
        """Copies weights into a role, by the names of :meth:`parameters`."""
        for key, parameter in self.parameters(name).items():
            parameter.data.copy_(weights[key])

    def train_only(self, name: str | None) -> None:
        """Enables gradients for this role's weights only; None: for no weights."""
        for key, parameter in self.net.named_parameters():
            parameter.requires_grad_(name is not None and ".lora_" in key and f".{name}." in key)

    @contextmanager
    def with_weights(self, name: str, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Lets a role run with other weights (its average) while the block is open."""
        parameters = self.parameters(name)
        before = {key: parameter.data for key, parameter in parameters.items()}
        try:
            for key, parameter in parameters.items():
                parameter.data = weights[key]
            yield
        finally:
            for key, parameter in parameters.items():
                parameter.data = before[key]

    def remove(self) -> None:
        """Removes the adapters; the teacher is restored bit for bit."""
        if self._checkpointing:
            self.net.disable_gradient_checkpointing()
        wrapped = {path: layer for path, layer in self.net.named_modules() if layer in self._layers}
        for layer in self._layers:
            layer.enable_adapters(True)
            for name in (GENERATOR, SCORE):
                layer.delete_adapter(name)
        for name in (GENERATOR, SCORE):
            del self.net.peft_config[name]
        if not self.net.peft_config:  # no other adapters: remove the wrappers, too
            for path, layer in wrapped.items():
                self.net.set_submodule(path, layer.get_base_layer())
            del self.net.peft_config


def copy_of(base: Denoiser, dtype: torch.dtype) -> Denoiser:
    """A copy of the network in ``dtype``; ``base`` is unchanged."""
    net = copy.deepcopy(base.backbone)
    for tensor in (*net.parameters(), *net.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return replace(base, backbone=net, call=call_of(net))
