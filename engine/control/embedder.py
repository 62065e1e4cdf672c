"""The control embedding, Eq. 1 of Berrada et al. 2024: a vector that is added to the timestep embedding."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..errors import refuse
from .gamma import GammaConfig
from .spec import ControlSpec

CHANNELS = 256


def sinusoid(values: torch.Tensor, channels: int = CHANNELS) -> torch.Tensor:
    """(..., F) -> (..., F * channels): cosines then sines of each value, as DDPM, SDXL and DiT embed timesteps."""
    half = channels // 2
    waves = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32, device=values.device) / half)
    angles = values.to(torch.float32)[..., None] * waves
    return torch.cat([angles.cos(), angles.sin()], -1).flatten(-2)


def embedder_shapes(spec: ControlSpec, dim: int) -> dict[str, tuple[int, ...]]:
    """Parameter name -> shape in :class:`ControlEmbedder`, without creating one."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, group in (("h", "high"), ("l", "low")):
        if count := len(spec.columns(group)):
            shapes |= {f"{name}.0.weight": (dim, CHANNELS * count), f"{name}.0.bias": (dim,)}
            shapes |= {f"{name}.2.weight": (dim, dim), f"{name}.2.bias": (dim,)}
    return shapes


class ControlEmbedder(nn.Module):
    """E_h and E_l of Eq. 1: a sinusoid of 256 channels for each control, one Linear-SiLU-Linear per group.

    The paper does not say how the scalars of a group are joined; here their sinusoids are concatenated, as in SDXL.

    Args:
        spec: the controls; a group without fields adds nothing.
        dim: D, the width of the timestep embedding it is added to.
        zero_init: initialise both last layers to zero, so that a frozen base model starts unchanged.
    """

    def __init__(self, spec: ControlSpec, dim: int, zero_init: bool = False) -> None:
        super().__init__()
        if dim < 1:
            raise refuse("dim", dim, "1 or more", "take control_width(backbone)")
        self.spec, self.dim = spec, dim
        self.h = _mlp(len(spec.columns("high")), dim)
        self.l = _mlp(len(spec.columns("low")), dim)
        if zero_init:
            self.zero_()

    def zero_(self) -> ControlEmbedder:
        """Set both last layers to zero."""
        for mlp in (self.h, self.l):
            if mlp is not None:
                for parameter in mlp[2].parameters():
                    nn.init.zeros_(parameter)
        return self

    def terms(self, values: torch.Tensor, drop: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """E_h(phi_h) and E_l(phi_l), each (B, D), from (B, F) values in their units (not checked here).

        Args:
            drop: as in :meth:`forward`; dropped terms are exactly 0.
        """
        waves = self.spec.encode(values)
        high, low = self._term(self.h, "high", waves), self._term(self.l, "low", waves)
        if drop is None:
            return high, low
        drop = _masks(drop, len(values)).to(high.device)
        return high.masked_fill(drop[:, :1], 0.0), low.masked_fill(drop[:, 1:], 0.0)

    def _term(self, mlp: nn.Sequential | None, group: str, waves: torch.Tensor) -> torch.Tensor:
        like = next(self.parameters())
        if mlp is None:
            return like.new_zeros(len(waves), self.dim)
        return mlp(sinusoid(waves[:, self.spec.columns(group)]).to(like.device, like.dtype))

    def forward(
        self, values: torch.Tensor, u: torch.Tensor, gamma: GammaConfig, drop: torch.Tensor | None = None
    ) -> torch.Tensor:
        """c_emb, (B, D).

        Args:
            values: (B, F), as :meth:`ControlSpec.rows` gives.
            u: (B,) in [0, 1], as :meth:`GammaConfig.u` gives.
            drop: (B,) bool, batch rows without control: c_emb is exactly 0. Or (B, 2): without the high, the low group.
        """
        values = self.spec.checked(values)
        if u.shape != (len(values),):
            raise refuse("u", tuple(u.shape), (len(values),), "one for each picture")
        high, low = self.terms(values, drop)
        return self.joined(high, low, gamma.weight(u).to(low.device, low.dtype)[:, None])

    @staticmethod
    def joined(high: torch.Tensor, low: torch.Tensor, weight: torch.Tensor | float) -> torch.Tensor:
        """c_emb, (B, D), from :meth:`terms`, which are constant over steps, and gamma: (B, 1) or one number."""
        # Berrada et al. 2024, Eq. 1: c_emb = E_h(phi_h) + gamma_c(t) E_l(phi_l)
        return high + weight * low


def _mlp(fields: int, dim: int) -> nn.Sequential | None:
    if not fields:
        return None
    return nn.Sequential(nn.Linear(fields * CHANNELS, dim), nn.SiLU(), nn.Linear(dim, dim))


def _masks(drop: torch.Tensor, count: int) -> torch.Tensor:
    if drop.dtype != torch.bool or drop.shape not in ((count,), (count, 2)):
        raise refuse(
            "drop", (drop.dtype, tuple(drop.shape)), f"bool ({count},) or ({count}, 2)", "one for each picture"
        )
    return drop[:, None].expand(count, 2) if drop.ndim == 1 else drop
