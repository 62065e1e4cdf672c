"""GDF's qualitative filter as an exact rule: which addresses deserve a measurement (arXiv 2410.03558, section 5.1).

The authors judged PCA pictures by eye; the rule below was derived from their result and reproduces it: 63 candidates of
SDXL (Tables 4 and 5) and 33 of SD 1.5 (Table 6).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..errors import refuse

_INCREMENTS = ("-res-increment", "-ffn-inner")
_EXTENSIONS = ("-map", "-v", "-cross-k", "-self-out", "-cross-out", "-ffn-out")
_DEEP_BLOCKS = {0, 1, 3, 5, 7, 9}
"""Of ten basic blocks the authors looked at these; neighbours look alike."""


def candidates(addresses: Iterable[str], family: str) -> list[str]:
    """The addresses of a UNet that survive the filter, in their given order.

    Args:
        addresses: all of the model's, e.g. ``sites_of(unet)``.
        family: "SD 1.5" (also SD 2.x: same shape) or "SDXL" (also Playground v2).

    Raises:
        VitrineError: another family; the paper gives no selection for it.
    """
    rules = {"SD 1.5": _keep_sd15, "SDXL": _keep_sdxl}
    if family not in rules:
        raise refuse("family", family, sorted(rules), "GDF studied these; measure other models yourself")
    return [a for a in addresses if _common(a) and rules[family](a)]


def _common(address: str) -> bool:
    """Up stage only (asymmetric noise), no increments, no maps, no text tokens, none of our own extra addresses."""
    block = re.search(r"-block(\d+)-", address)
    looked_at = block is None or int(block[1]) in _DEEP_BLOCKS
    return address.startswith("up-") and not address.endswith(_INCREMENTS + _EXTENSIONS) and looked_at


def _keep_sdxl(address: str) -> bool:
    """No top resolution (noise returns); of self-attention only the keys of level 1's last transformer."""
    if address.startswith("up-level2") or address == "up-level1-upsampler-out":
        return False
    return "-self-" not in address or re.match(r"up-level1-repeat2-.*-self-k$", address) is not None


def _keep_sd15(address: str) -> bool:
    """No lowest resolution (8 x 8); at the top one only self-attention, whose locality suppresses the noise."""
    if address.startswith("up-level0") or address == "up-level1-upsampler-out":
        return False
    inside = "-self-" in address
    if address.startswith("up-level3"):
        return inside
    return not inside or address.startswith("up-level2-repeat2")
