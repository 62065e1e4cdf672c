"""Cross-attention maps as features: GDF's 154 channels of Stable Diffusion, one map a word (GDF, Appendix B.3)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import interpolate

from ..errors import refuse
from ..hooks import Activation


def token_maps(activation: Activation, grid: tuple[int, int] | None = None) -> torch.Tensor:
    """Where each token is looked at: (B, heads or 1, Q, K) -> (B, K, h, w), averaged over heads.

    Args:
        grid: (h, w) of the queries; None takes a square.

    Raises:
        VitrineError: no attention map, or a number of queries that is not h x w.
    """
    tensor = activation.tensor
    if tensor.ndim != 4 or activation.grid is not None:
        raise refuse(activation.address, tuple(tensor.shape), "an attention map (B, heads, Q, K)", "tap a -map place")
    count = tensor.shape[2]
    h, w = grid or (round(count**0.5), round(count**0.5))
    if h * w != count:
        raise refuse("grid", (h, w), f"h x w = {count}", "pass grid=(h, w) for pictures that are not square")
    return tensor.float().mean(1).transpose(1, 2).unflatten(2, (h, w))


def aggregate_attention(
    taps: Mapping[str, Activation], image_size: int, *, transformer: bool = False
) -> tuple[torch.Tensor, dict[int, int]]:
    """GDF's attention feature: layers of one size averaged, brought to ``image_size / 8``, sizes concatenated.

    Maps count whose side s is at least image_size / 32 and at most image_size / 16 (UNet) or / 8 (transformers). For
    SD 1.5 at 512 px these are six of the nine layers of the up stage, and 2 x 77 channels.

    Args:
        taps: attention maps of square pictures, e.g. of ``"up-*-cross-map"`` with ``map_heads="mean"``.
        image_size: side of the picture in pixels.

    Returns:
        (B, sizes x K, s, s) float32 with s = image_size // 8, and how many layers each size had.

    Raises:
        VitrineError: no map of a size that counts.
    """
    most = image_size // (8 if transformer else 16)
    by_size: dict[int, list[torch.Tensor]] = {}
    for address, activation in taps.items():
        if address.endswith("-map"):
            maps = token_maps(activation)
            if image_size // 32 <= maps.shape[-1] <= most:
                by_size.setdefault(maps.shape[-1], []).append(maps)
    if not by_size:
        given = {a: tuple(v.tensor.shape) for a, v in taps.items()}
        raise refuse("attention maps", given, f"sides from {image_size // 32} to {most}", "tap up-*-cross-map")
    side = image_size // 8
    means = [torch.stack(found).mean(0) for found in by_size.values()]
    return torch.cat([interpolate(m, (side, side)) for m in means], 1), {s: len(v) for s, v in by_size.items()}
