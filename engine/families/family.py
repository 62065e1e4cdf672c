"""What a model family has to say of itself. Each family is one file here; see docs/design.md for how to add one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..condition import Condition
from ..site import Site

Call = Callable[[torch.Tensor, torch.Tensor, Condition], torch.Tensor]
"""(x_t (B, C, H, W), t (B,), Condition) -> the network's own prediction, of x_t's shape."""


@dataclass(frozen=True)
class Family:
    """One model family in both libraries.

    Attributes:
        name: as people call it.
        class_name: of diffusers' backbone.
        diffusers, comfyui: modules by which each library's backbone is recognised; neither library is imported.
        diffusers_sites, comfyui_sites: every site of a backbone in execution order.
        call: (backbone, x_t, t, Condition) -> prediction, for diffusers' backbone.
    """

    name: str
    class_name: str
    diffusers: tuple[str, ...]
    comfyui: tuple[str, ...]
    diffusers_sites: Callable[[Any], Iterator[Site]]
    comfyui_sites: Callable[[Any], Iterator[Site]]
    call: Callable[[Any, torch.Tensor, torch.Tensor, Condition], torch.Tensor]

    def sites(self, backbone: nn.Module) -> Iterator[Site] | None:
        """The sites of a backbone of this family, None for any other."""
        for modules, generate in ((self.diffusers, self.diffusers_sites), (self.comfyui, self.comfyui_sites)):
            if all(hasattr(backbone, name) for name in modules):
                return generate(backbone)
        return None
