"""What a model family has to say of itself. Each family is one file here; see docs/design.md for how to add one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..condition import Condition
from ..errors import refuse
from ..site import Site

Call = Callable[[torch.Tensor, torch.Tensor, Condition], torch.Tensor]
"""(x_t (B, C, H, W), t (B,), Condition) -> the network's own prediction, of x_t's shape."""


@dataclass(frozen=True)
class Family:
    """One model family in both libraries.

    Attributes:
        name: as people call it.
        diffusers, comfyui: names of each library's class; a subclass counts, and neither library is imported.
        diffusers_sites, comfyui_sites: every site of a backbone in execution order.
        call: (backbone, x_t, t, Condition) -> prediction, for diffusers' backbone.
        strangeness: what keeps a backbone of these classes from being of the family (``what is given``, ``what to
            do``), None where nothing does.
    """

    name: str
    diffusers: str
    comfyui: str
    diffusers_sites: Callable[[Any], Iterator[Site]]
    comfyui_sites: Callable[[Any], Iterator[Site]]
    call: Callable[[Any, torch.Tensor, torch.Tensor, Condition], torch.Tensor]
    strangeness: Callable[[Any], tuple[str, str] | None] = lambda net: None

    def sites(self, backbone: nn.Module) -> Iterator[Site] | None:
        """The sites of a backbone of this family, None for any other.

        Raises:
            VitrineError: If the class is the family's, but its modules are arranged or wired otherwise.
        """
        classes = {kind.__name__ for kind in type(backbone).__mro__}
        generate = (
            self.diffusers_sites if self.diffusers in classes
            else self.comfyui_sites if self.comfyui in classes else None
        )  # fmt: skip
        if generate is None:
            return None
        strange = self.strangeness(backbone)
        if strange is not None:
            raise refuse("backbone", strange[0], f"{self.name} as the libraries build it", strange[1])
        return generate(backbone)
