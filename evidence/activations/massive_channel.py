"""Injects a massive channel into a Flux by rescaling, without changing the network's function."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from diffusers import FluxTransformer2DModel


class Unscaled(nn.LayerNorm):
    """A LayerNorm of a stream in other units."""

    scale: torch.Tensor

    def __init__(self, norm: nn.LayerNorm, scale: torch.Tensor) -> None:
        super().__init__(norm.normalized_shape, norm.eps, elementwise_affine=False)
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of the stream in its original units."""
        return super().forward(x / self.scale)


def with_massive_channel(net: FluxTransformer2DModel, channel: int, factor: float) -> FluxTransformer2DModel:
    """The same function, with one channel of the residual stream scaled by ``factor``.

    Writes to the stream are multiplied; the norms, its only readers, divide. Text and image share a stream
    in the single blocks, so both are rescaled.
    """
    net = copy.deepcopy(net)
    scale = torch.ones(net.inner_dim)
    scale[channel] = factor
    writers = [net.x_embedder, net.context_embedder]
    for double in net.transformer_blocks:
        writers += [double.attn.to_out[0], double.attn.to_add_out, double.ff.net[2], double.ff_context.net[2]]
        for ada in (double.norm1, double.norm1_context):
            ada.norm = Unscaled(ada.norm, scale)
        double.norm2, double.norm2_context = Unscaled(double.norm2, scale), Unscaled(double.norm2_context, scale)
    for single in net.single_transformer_blocks:
        writers.append(single.proj_out)
        single.norm.norm = Unscaled(single.norm.norm, scale)
    net.norm_out.norm = Unscaled(net.norm_out.norm, scale)
    with torch.no_grad():
        for writer in writers:
            writer.weight[channel] *= factor
            writer.bias[channel] *= factor
    return net.eval()
