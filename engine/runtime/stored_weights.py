"""Dequantised weights in every storage format: 8-bit floats, torchao, GGUF, bitsandbytes, ComfyUI's own."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from ..errors import refuse

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
_BITSANDBYTES = {"Params4bit": 4, "Int8Params": 8}
_GGUF_BITS = {"F32": 16, "F16": 16, "BF16": 16, "Q8_0": 8}
"""8-bit dtypes; others have 6 bits or fewer."""


def is_packed(weight: torch.Tensor) -> bool:
    """Whether a weight consists of more than one tensor, so that values cannot be copied into it."""
    return type(weight) not in _PLAIN


def bits_of(weight: torch.Tensor) -> int:
    """16 for weights stored in 16 bits or more, else 8, or 4 for fewer than 8."""
    name = type(weight).__name__
    if name in _BITSANDBYTES:
        return _BITSANDBYTES[name]
    if hasattr(weight, "quant_type") or hasattr(weight, "tensor_type"):  # of diffusers, of ComfyUI-GGUF
        kind = getattr(weight, "quant_type", None) or getattr(weight, "tensor_type", None)
        return 16 if kind is None else _GGUF_BITS.get(getattr(kind, "name", ""), 4)
    parts = [weight] if not is_packed(weight) else _parts(weight)
    size = sum(part.numel() * part.itemsize for part in parts) / max(1, weight.numel())
    return 4 if size < 0.9 else 8 if size < 1.9 else 16


def as_numbers(weight: torch.Tensor, layer: Any = None) -> torch.Tensor:
    """A weight to compute with: itself if it has 16 bits or more, else dequantised to float32 in its true shape.

    Args:
        layer: the module of the weight; bitsandbytes' 8-bit layers have the scales after a first forward.
    """
    if not is_packed(weight):
        return weight if not weight.is_floating_point() or weight.element_size() > 1 else weight.to(torch.float32)
    name, weight = type(weight).__name__, weight.detach() if type(weight).__name__ not in _BITSANDBYTES else weight
    if name == "Params4bit":
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(weight.data, weight.quant_state).to(torch.float32)  # type: ignore[attr-defined]
    if name == "Int8Params":
        scale = getattr(weight, "SCB", None)
        scale = getattr(getattr(layer, "state", None), "SCB", None) if scale is None else scale
        if scale is not None:
            return weight.data.to(torch.float32) * scale.to(torch.float32)[:, None] / 127
    if hasattr(weight, "quant_type"):
        from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

        return dequantize_gguf_tensor(weight).as_subclass(torch.Tensor).to(torch.float32)
    if hasattr(weight, "tensor_type") and (read := _ggml_reader(weight)) is not None:
        return read(weight, torch.float32).as_subclass(torch.Tensor).to(torch.float32)
    if hasattr(weight, "__tensor_flatten__") and type(weight).dequantize is not torch.Tensor.dequantize:
        return weight.dequantize().to(torch.float32)
    accepted = "plain weights, and those of torchao, GGUF, bitsandbytes and ComfyUI"
    raise refuse("weights", f"stored as {name}", accepted, "load the model unquantised, in bfloat16 or fp8")


def shape_of(layer: Any) -> tuple[int, int] | None:
    """(outputs, inputs) of a linear layer, in any storage format; None for other layers."""
    sides = tuple(getattr(layer, name, None) for name in ("out_features", "in_features"))
    if all(isinstance(side, int) for side in sides):
        return sides  # type: ignore[return-value]
    weight = getattr(layer, "weight", None)
    return (weight.shape[0], weight.shape[1]) if isinstance(weight, torch.Tensor) and weight.ndim == 2 else None


def _ggml_reader(weight: torch.Tensor) -> Any:
    """ComfyUI-GGUF's own dequantisation, without the LoRAs that it keeps on a weight: next to the weight's class."""
    return getattr(sys.modules.get(type(weight).__module__), "dequantize_tensor", None)


def _parts(weight: Any) -> list[torch.Tensor]:
    """The tensors inside a quantised one, including its small tables of scales."""
    names = weight.__tensor_flatten__()[0] if hasattr(weight, "__tensor_flatten__") else ()
    parts = [getattr(weight, name) for name in names]
    return [part for part in parts if isinstance(part, torch.Tensor)] or [weight.as_subclass(torch.Tensor)]
