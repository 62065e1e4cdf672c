"""Transformer features for matching: modulated block inputs without massive channels (DiTF, arXiv 2505.18584).

A few channels of a transformer's residual stream are larger than the rest by orders of magnitude, for all patches and
images. They dominate the cosine similarity, so raw features match badly. A block does not read the stream itself, but
its norm under the block's adaLN; that, with those channels set to zero before the norm, matches well.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import refuse
from ..network.site import AdaLN


def massive_channels(tensor: torch.Tensor, ratio: float = 30.0) -> tuple[int, ...]:
    """Channels whose mean magnitude over images and positions is at least ``ratio`` times the median channel's.

    The paper names 154 and 1446 for Flux.1-dev, without a rule; other channels are within a factor of about ten.

    Args:
        tensor: (B, C, h, w), or (B, C, T, h, w) of a video.

    Returns:
        Their indices, the largest first.
    """
    if tensor.ndim not in (4, 5):
        raise refuse("activation", tuple(tensor.shape), "(B, C, h, w)", "text tokens and attention maps have no grid")
    size = tensor.float().abs().transpose(0, 1).flatten(1).mean(1)
    channels = torch.nonzero(size >= ratio * size.median().clamp_min(1e-30)).flatten().tolist()
    return tuple(sorted(channels, key=lambda c: -float(size[c])))


def without_channels(tensor: torch.Tensor, channels: Sequence[int], address: str = "") -> torch.Tensor:
    """A copy of (B, C, ...) with channels set to zero."""
    width = tensor.shape[1]
    if any(c >= width for c in channels):
        raise refuse("discard", list(channels), f"channels 0 .. {width - 1} of {address}", "see massive_channels")
    result = tensor.clone()
    result[:, list(channels)] = 0
    return result


def modulated(tensor: torch.Tensor, modulation: torch.Tensor, adaln: AdaLN) -> torch.Tensor:
    """(B, C, ...) block inputs after norm and modulation, as the block's attention reads them, float32.

    A discarded channel is zero before norm and adaLN, not after them, as in the authors' code.

    Args:
        modulation: (B, 2, C) shift and factor.
    """
    x = tensor.float()
    # DiTF: f = (1 + scale) LN(x) + shift, over channels; RMS norms do not centre.
    if not adaln.rms:
        x = x - x.mean(1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + adaln.eps)
    shift, factor = (part.reshape(*part.shape, *[1] * (x.ndim - 2)) for part in modulation.to(x).unbind(1))
    return factor * x + shift
