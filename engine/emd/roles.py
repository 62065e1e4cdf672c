"""One frozen backbone, three roles: the teacher (adapters off), the score network and the generator (adapters)."""

from __future__ import annotations

from typing import Any

import torch

from ..denoiser import Condition, Denoiser
from ..errors import refuse

GENERATOR, SCORE = "generator", "score"
TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2",
           "conv1", "conv2", "conv_shortcut", "time_emb_proj")  # fmt: skip
"""Layers that get an adapter: DMD2's list for one-step LoRA students."""


class Roles:
    """Three denoisers over one UNet. Each call switches the adapters first.

    Args:
        base: the teacher, a Denoiser over a diffusers UNet; its weights are frozen here and never change.
        rank: LoRA rank; alpha is the same, so the scale is 1.
    """

    def __init__(self, base: Denoiser, rank: int, seed: int = 0) -> None:
        from peft import LoraConfig

        self.base = base
        self.unet: Any = base.backbone
        add: Any = getattr(self.unet, "add_adapter", None)
        if add is None:
            raise refuse("backbone", type(self.unet).__name__, "a diffusers UNet", "pass pipe.unet")
        self.unet.requires_grad_(False).eval()  # eval: a dropout mask that differs would be noise in Delta
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for name in (GENERATOR, SCORE):
                made = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(TARGETS))
                add(made, adapter_name=name)
        self._on: str | None = ""
        self.teacher, self.generator, self.score = (self._role(n) for n in (None, GENERATOR, SCORE))

    def _role(self, name: str | None) -> Denoiser:
        def call(x_t: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
            self.switch(name)
            return self.base.call(x_t, t, cond)

        return self.base.with_call(call)

    def switch(self, name: str | None) -> None:
        """Make one adapter the active one, or none; gradients are decided by :meth:`learn`, not by this."""
        if name == self._on:
            return
        wanted = {n: p.requires_grad for n, p in self.unet.named_parameters() if ".lora_" in n}
        if name is None:
            self.unet.disable_adapters()
        else:
            self.unet.enable_adapters()
            self.unet.set_adapter(name)
        for key, parameter in self.unet.named_parameters():
            if key in wanted:
                parameter.requires_grad_(wanted[key])
        self._on = name

    def parameters(self, name: str) -> dict[str, torch.nn.Parameter]:
        """An adapter's weights by name."""
        return {k: p for k, p in self.unet.named_parameters() if ".lora_" in k and f".{name}." in k}

    def learn(self, name: str | None) -> None:
        """Only this adapter's weights take gradients; None: no weight does."""
        for key, parameter in self.unet.named_parameters():
            parameter.requires_grad_(name is not None and ".lora_" in key and f".{name}." in key)

    def remove(self) -> None:
        """Take both adapters out; the teacher is what it was, bit for bit."""
        self.unet.enable_adapters()
        self.unet.delete_adapters([GENERATOR, SCORE])
