"""The result of GDF's qualitative filter, as a rule (arXiv 2410.03558, section 5.1).

The authors judged PCA images by eye. This rule was derived from their result and reproduces it: 63 candidates of SDXL
(Tables 4 and 5) and 33 of SD 1.5 (Table 6). For other models :mod:`vitrine.engine.activations.qualitative_filter`
measures the same properties.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..errors import refuse

_INCREMENTS = ("-res-increment", "-ffn-inner")
_EXTENSIONS = ("-map", "-v", "-cross-k", "-self-out", "-cross-out", "-ffn-out")
_DEEP_BLOCKS = {0, 1, 3, 5, 7, 9}
"""The blocks, of ten, that the authors examined; adjacent blocks look alike."""


def published_candidates(addresses: Iterable[str], family: str) -> list[str]:
    """The site names of a UNet that the authors kept, in the order of ``addresses``.

    Args:
        addresses: all site names of the model, e.g. ``sites_of(unet)``.
        family: "SD 1.5" (also SD 2.x: same shape) or "SDXL" (also Playground v2).
    """
    rules = {"SD 1.5": _keep_sd15, "SDXL": _keep_sdxl}
    if family not in rules:
        raise refuse("family", family, sorted(rules), "GDF studied these; measure other models yourself")
    return [a for a in addresses if _common(a) and rules[family](a)]


def _common(address: str) -> bool:
    """Up stage only (asymmetric noise); no increments, maps or text tokens, no sites that only Vitrine names."""
    block = re.search(r"-block(\d+)-", address)
    examined = block is None or int(block[1]) in _DEEP_BLOCKS
    return address.startswith("up-") and not address.endswith(_INCREMENTS + _EXTENSIONS) and examined


def _keep_sdxl(address: str) -> bool:
    """Not the top resolution (noise returns); of self-attention only the keys of level 1's last transformer."""
    if address.startswith("up-level2") or address == "up-level1-upsampler-out":
        return False
    return "-self-" not in address or re.match(r"up-level1-repeat2-.*-self-k$", address) is not None


def _keep_sd15(address: str) -> bool:
    """Not the lowest resolution (8 x 8); at the top one only self-attention, whose locality suppresses the noise."""
    if address.startswith("up-level0") or address == "up-level1-upsampler-out":
        return False
    self_attention = "-self-" in address
    if address.startswith("up-level3"):
        return self_attention
    return not self_attention or address.startswith("up-level2-repeat2")
