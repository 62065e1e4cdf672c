"""Teacher, score network and generator: adapters on one frozen backbone, or full copies of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ..diffusion.denoiser import Denoiser
from ..families import call_of
from ..network.condition import Condition
from ..runtime.compat_peft import activate
from ..runtime.placement import refuse_offloaded
from .targets import adapted_layers, part_of

GENERATOR, SCORE = "generator", "score"


class Roles:
    """Three denoisers on one network. Each call switches adapters first.

    Args:
        base: the teacher, a Denoiser over a diffusers UNet or transformer; its weights are frozen here.
        rank: LoRA rank of the generator; alpha is the same, so the scale is 1.
        seed: of the adapters' initial weights.
        full: roles that are a float32 copy of the network instead of an adapter: ``generator``, ``score`` or both.
        dtype: of the frozen network's computation; a copy is used if it differs. Adapters stay float32.
        checkpointing: recompute activations in the backward pass.
        score_rank: LoRA rank of the score network; the generator's by default.

    Attributes:
        teacher, score, generator: the roles as denoisers.
        full: full copies, by role.
        part: ``unet`` or ``transformer``.
    """

    def __init__(
        self, base: Denoiser, rank: int, seed: int = 0, full: Collection[str] = (),
        dtype: torch.dtype = torch.float32, checkpointing: bool = False, score_rank: int = 0,
    ) -> None:  # fmt: skip
        layers = adapted_layers(base.backbone)
        refuse_offloaded(base.backbone)
        self.dtype, self.part = dtype, part_of(base.backbone)
        self.full = {name: copy_of(base, torch.float32) for name in (GENERATOR, SCORE) if name in full}
        self.base = base if base.backbone.dtype == dtype else copy_of(base, dtype)
        self.net: Any = self.base.backbone
        self.net.requires_grad_(False).eval()  # eval: different dropout masks would add noise to Delta
        ranks = {GENERATOR: rank, SCORE: score_rank or rank}
        self._adapters = {name: r for name, r in ranks.items() if name not in full}
        self._add_adapters(layers, seed)
        self._active: str | None = ""
        self.teacher = self._role(None)
        self.generator, self.score = (
            self._full_role(self.full[name]) if name in full else self._role(name) for name in (GENERATOR, SCORE)
        )
        self._checkpointing = checkpointing
        if checkpointing:
            self._enable_checkpointing()

    def _add_adapters(self, layers: list[str], seed: int) -> None:
        from peft import LoraConfig
        from peft.tuners.tuners_utils import BaseTunerLayer

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for name, rank in self._adapters.items():
                config = LoraConfig(r=rank, lora_alpha=rank, target_modules=layers)
                self.net.add_adapter(config, adapter_name=name)
                for parameter in self.parameters(name).values():
                    parameter.data = parameter.data.float()  # peft gives them the backbone's dtype
        self._layers: list[Any] = [m for m in self.net.modules() if isinstance(m, BaseTunerLayer)]

    def _role(self, name: str | None) -> Denoiser:
        def call(x_t: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
            self.switch(name)
            return self.base.call(x_t, t, cond)

        return self.base.with_call(call)

    def _full_role(self, full: Denoiser) -> Denoiser:
        """A full role, with float32 weights, that computes in ``dtype`` (by autocast)."""
        full.backbone.requires_grad_(False).eval()

        def call(x_t: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
            narrow = self.dtype != torch.float32
            with torch.autocast(x_t.device.type, self.dtype) if narrow else nullcontext():
                return full.call(x_t, t, cond)

        return full.with_call(call)

    def _enable_checkpointing(self) -> None:
        def recomputed(module: Callable, *args: Any, **kwargs: Any) -> Any:
            role = self._active

            def forward(*args: Any, **kwargs: Any) -> Any:
                self.switch(role)  # the chain calls teacher and score between the generator's forward and its vjp
                return module(*args, **kwargs)

            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        self.net.enable_gradient_checkpointing(recomputed)
        for role in self.full.values():
            full: Any = role.backbone
            full.enable_gradient_checkpointing()

    def to(self, device: torch.device) -> Roles:
        """Moves every network."""
        for role in (self.base, *self.full.values()):
            role.backbone.to(device)
        return self

    def switch(self, name: str | None) -> None:
        """Activates one adapter, or none; :meth:`train_only` sets gradients."""
        if name == self._active or not self._adapters:
            return
        for layer in self._layers:  # peft's own switch also sets gradients, and takes as long as a block
            activate(layer, name)
        self._active = name

    def parameters(self, name: str) -> dict[str, torch.nn.Parameter]:
        """The trained parameters of a role by name: its adapter, or its whole network (with ``score.``)."""
        if name in self.full:
            ahead = f"{SCORE}." if name == SCORE else ""
            return {ahead + key: p for key, p in self.full[name].backbone.named_parameters()}
        return {k: p for k, p in self.net.named_parameters() if ".lora_" in k and f".{name}." in k}

    def set(self, name: str, weights: Mapping[str, torch.Tensor]) -> None:
        """Copies weights into a role, by the names of :meth:`parameters`."""
        for key, parameter in self.parameters(name).items():
            parameter.data.copy_(weights[key])

    def train_only(self, name: str | None) -> None:
        """Enables gradients for this role's weights only; None: for no weights."""
        for key, parameter in self.net.named_parameters():
            parameter.requires_grad_(name is not None and ".lora_" in key and f".{name}." in key)
        for role, full in self.full.items():
            full.backbone.requires_grad_(name == role)

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
        if self._adapters:
            self.net.enable_adapters()
            self.net.delete_adapters(list(self._adapters))
            if not getattr(self.net, "peft_config", None):  # no other adapters: remove the wrappers, too
                self.net.unload_lora()


def copy_of(base: Denoiser, dtype: torch.dtype) -> Denoiser:
    """A copy of the network in ``dtype``; ``base`` is unchanged."""
    net = copy.deepcopy(base.backbone)
    for tensor in (*net.parameters(), *net.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return replace(base, backbone=net, call=call_of(net))
