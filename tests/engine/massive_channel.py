"""A massive channel injected into a PixArt by rescaling: what the network computes stays as it is."""

import copy

import torch
from torch import nn


class Unscaled(nn.LayerNorm):
    """A LayerNorm of a stream in other units: it divides by ``scale`` first."""

    def __init__(self, norm, scale):
        super().__init__(norm.normalized_shape, norm.eps, elementwise_affine=False)
        self.register_buffer("scale", scale)

    def forward(self, x):
        return super().forward(x / self.scale)


def with_massive_channel(net, channel, factor):
    """The same function, with one channel of the stream ``factor`` times as large: what is written to it is multiplied,
    what reads it divides."""
    net = copy.deepcopy(net)
    scale = torch.ones(net.inner_dim)
    scale[channel] = factor
    writers = [net.pos_embed.proj]
    for block in net.transformer_blocks:
        writers += [block.attn1.to_out[0], block.attn2.to_out[0], block.ff.net[2]]
        block.norm1, block.norm2 = Unscaled(block.norm1, scale), Unscaled(block.norm2, scale)
        block.attn2.to_q.weight.data /= scale
    for writer in writers:
        writer.weight.data[channel] *= factor
        writer.bias.data[channel] *= factor
    net.pos_embed.pos_embed = net.pos_embed.pos_embed * scale
    net.norm_out = Unscaled(net.norm_out, scale)
    return net.eval()
