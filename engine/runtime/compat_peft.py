"""Private names of PEFT's layers. The library is not imported."""

from __future__ import annotations

from typing import Any


def activate(layer: Any, name: str | None) -> None:
    """Activate one adapter of a layer, or none, without setting ``requires_grad`` as PEFT's own switch does."""
    layer._disable_adapters = name is None
    if name is not None:
        layer._active_adapter = [name]


def probe() -> list[str]:
    """Names that are missing from the installed PEFT; empty if it is not installed."""
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError as error:
        return [] if error.name == "peft" else [f"peft: {error}"]
    return [f"BaseTunerLayer.{n}" for n in ("_disable_adapters", "active_adapters") if not hasattr(BaseTunerLayer, n)]
