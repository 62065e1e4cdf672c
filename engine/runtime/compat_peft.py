"""PEFT's layers: what is read from them that is no public API. The library is not imported."""

from __future__ import annotations

from typing import Any


def disable_adapters(layer: Any, disabled: bool) -> None:
    """Switch a layer's adapters, without what PEFT's own switch does to ``requires_grad``."""
    layer._disable_adapters = disabled


def probe() -> list[str]:
    """Names that the installed PEFT does not have; none where it is not installed."""
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError as error:
        return [] if error.name == "peft" else [f"peft: {error}"]
    return [f"BaseTunerLayer.{n}" for n in ("_disable_adapters", "active_adapters") if not hasattr(BaseTunerLayer, n)]
