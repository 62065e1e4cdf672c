"""Teacher, score network and generator: adapters on one frozen backbone, or a generator with weights of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ..condition import Condition
from ..denoiser import Denoiser
from ..errors import refuse
from ..families import call_of, family_of
from ..placement import refuse_offloaded

GENERATOR, SCORE = "generator", "score"
TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2",
           "conv1", "conv2", "conv_shortcut", "time_emb_proj")  # fmt: skip
"""Layers that get an adapter: DMD2's list for one-step LoRA students."""


class Roles:
    """Three denoisers over one UNet. Each call switches the adapters first.

    Args:
        base: the teacher, a Denoiser over a diffusers UNet; its weights are frozen here and never change.
        rank: LoRA rank; alpha is the same, so the scale is 1.
        seed: of the adapters' first weights.
        full: the generator is a float32 copy of the UNet instead of an adapter.
        dtype: what the frozen UNet computes in; where that is not its own, a copy does. Adapters stay float32.
        checkpointing: recompute activations in the backward pass.

    Attributes:
        teacher, score, generator: the roles as denoisers.
        full: the generator with all weights of its own, or None.

    Raises:
        VitrineError: The backbone is no diffusers UNet, or is offloaded.
    """

    def __init__(
        self, base: Denoiser, rank: int, seed: int = 0, full: bool = False, dtype: torch.dtype = torch.float32,
        checkpointing: bool = False,
    ) -> None:  # fmt: skip
        if getattr(base.backbone, "add_adapter", None) is None or family_of(base.backbone).name != "UNet":
            remedy = "pass pipe.unet; students of transformers have no file format yet that others read"
            raise refuse("backbone", type(base.backbone).__name__, "a diffusers UNet", remedy)
        refuse_offloaded(base.backbone)
        self.dtype = dtype
        self.full = copy_of(base, torch.float32) if full else None
        self.base = base if base.backbone.dtype == dtype else copy_of(base, dtype)
        self.unet: Any = self.base.backbone
        self.unet.requires_grad_(False).eval()  # eval: a dropout mask that differs would be noise in Delta
        self._add_adapters((SCORE,) if full else (GENERATOR, SCORE), rank, seed)
        self._active: str | None = ""
        self.teacher, self.score = self._role(None), self._role(SCORE)
        self.generator = self._role(GENERATOR) if self.full is None else self._full_generator(self.full)
        self._checkpointing = checkpointing
        if checkpointing:
            self._enable_checkpointing()

    def _add_adapters(self, names: tuple[str, ...], rank: int, seed: int) -> None:
        from peft import LoraConfig

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for name in names:
                config = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(TARGETS))
                self.unet.add_adapter(config, adapter_name=name)
                for parameter in self.parameters(name).values():
                    parameter.data = parameter.data.float()  # peft gives them the backbone's dtype

    def _role(self, name: str | None) -> Denoiser:
        def call(x_t: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
            self.switch(name)
            return self.base.call(x_t, t, cond)

        return self.base.with_call(call)

    def _full_generator(self, full: Denoiser) -> Denoiser:
        """Its weights are float32; it computes in ``dtype`` (autocast keeps the weights wide)."""
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
                self.switch(role)  # the chain calls teacher and score between a generator's forward and its vjp
                return module(*args, **kwargs)

            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        self.unet.enable_gradient_checkpointing(recomputed)
        if self.full is not None:
            full: Any = self.full.backbone
            full.enable_gradient_checkpointing()

    def to(self, device: torch.device) -> Roles:
        """Move every network."""
        for role in (self.base, self.full):
            if role is not None:
                role.backbone.to(device)
        return self

    def switch(self, name: str | None) -> None:
        """Make one adapter the active one, or none; :meth:`train_only` decides on gradients, not this."""
        if name == self._active:
            return
        gradients = {n: p.requires_grad for n, p in self.unet.named_parameters() if ".lora_" in n}
        if name is None:
            self.unet.disable_adapters()
        else:
            self.unet.enable_adapters()
            self.unet.set_adapter(name)
        for key, parameter in self.unet.named_parameters():
            if key in gradients:  # peft turns them on for the active adapter and off for the others
                parameter.requires_grad_(gradients[key])
        self._active = name

    def parameters(self, name: str) -> dict[str, torch.nn.Parameter]:
        """What a role trains, by name: its adapter, or the whole network of a full generator."""
        if name == GENERATOR and self.full is not None:
            return dict(self.full.backbone.named_parameters())
        return {k: p for k, p in self.unet.named_parameters() if ".lora_" in k and f".{name}." in k}

    def train_only(self, name: str | None) -> None:
        """Let only this role's weights take gradients; None: no weight does."""
        for key, parameter in self.unet.named_parameters():
            parameter.requires_grad_(name is not None and ".lora_" in key and f".{name}." in key)
        if self.full is not None:
            self.full.backbone.requires_grad_(name == GENERATOR)

    @contextmanager
    def with_weights(self, name: str, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Let a role run with other weights (its average) while the block is open."""
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
        """Take the adapters out; the teacher is again what it was, bit for bit."""
        if self._checkpointing:
            self.unet.disable_gradient_checkpointing()
        self.unet.enable_adapters()
        self.unet.delete_adapters([SCORE] if self.full is not None else [GENERATOR, SCORE])


def copy_of(base: Denoiser, dtype: torch.dtype) -> Denoiser:
    """A copy of the network in ``dtype``; ``base`` is left as it is."""
    unet = copy.deepcopy(base.backbone)
    for tensor in (*unet.parameters(), *unet.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return replace(base, backbone=unet, call=call_of(unet))
