"""PEFT's layers: what is read from them that is no public API. The library is not imported."""

from __future__ import annotations

from typing import Any


def activate(layer: Any, name: str | None) -> None:
    """Make one adapter of a layer the active one, or none; PEFT's own switch sets ``requires_grad`` as well."""
    layer._disable_adapters = name is None
    if name is not None:
        layer._active_adapter = [name]


def probe() -> list[str]:
    """Names that the installed PEFT does not have; none where it is not installed."""
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError as error:
        return [] if error.name == "peft" else [f"peft: {error}"]
    return [f"BaseTunerLayer.{n}" for n in ("_disable_adapters", "active_adapters") if not hasattr(BaseTunerLayer, n)]
