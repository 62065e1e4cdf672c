"""Identifies a model by sampled weights: equal for diffusers and ComfyUI copies of one checkpoint, in any precision."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..families import layout_of
from ..network.site import ModuleSite
from ..network.structure import once
from ..runtime.compat_torch import module_at
from ..runtime.placement import weight_of
from ..runtime.stored_weights import as_numbers, bits_of
from .reading import columns_of

SAMPLES = 64
DIGITS = 16
"""Length of the hash at the start of a fingerprint; older fingerprints have nothing else."""

_WITH_WEIGHTS = re.compile(r"[0-9a-f]{16}-(?P<layout>[0-9a-f]{8})(?P<weights>([0-9a-f]{4})*)(~(?P<bits>[48]))?")
_OF_EIGHT_BITS = 0.06, 6e-4
"""Relative rms error of 8-bit weights; half the finest step of e4m3 is added. Measured on the shipped models, plain fp8
and int8 by row: at most 0.03."""


def width_of(backbone: nn.Module, site: ModuleSite) -> int:
    """Number of neurons of a value site, from the size of its projection."""
    module: Any = module_at(backbone, site.path)
    out = int(module.out_features) if hasattr(module, "out_features") else int(module.weight.shape[0])
    return site.columns[1] if site.columns else out


def fingerprint_of(backbone: nn.Module, originals: Mapping[str, torch.Tensor] | None = None) -> str:
    """A text of 16 hexadecimal digits, a dash and further digits, compared by :func:`same_weights`.

    A few numbers of each value projection are read. The first digits are a hash of them, rounded to fp16. Then follow
    the numbers of sites and sizes, hashed, and 64 weights as bfloat16: bf16(w) and bf16(fp16(w)) may differ by one
    step, so no hash of rounded weights is equal in every precision, but the weights themselves can be compared.
    Weights of fewer than 16 bits are dequantised, and ``~8`` or ``~4`` at the end records it.

    Args:
        originals: module path -> unpatched weight, for modules whose weight is patched (a LoRA in ComfyUI).
    """
    names, samples, bits = list[str](), list[torch.Tensor](), 16
    for site in once(_values, backbone):
        module: Any = module_at(backbone, site.path)
        weight = (originals or {}).get(site.path)
        layer = getattr(module, "base_layer", module)
        weight = weight_of(layer) if weight is None else weight
        bits = min(bits, bits_of(weight))
        weight = as_numbers(weight, layer).detach()
        weight = columns_of(weight.movedim(0, -1), site.columns).movedim(-1, 0) if site.columns else weight
        names.append(f"{site.address} {tuple(weight.shape)}")
        samples.append(weight[:: max(1, weight.shape[0] // 4), :: max(1, weight.shape[1] // 4)].flatten().float())
    device = samples[0].device if samples else torch.device("cpu")  # offloaded groups may be on two devices
    values = torch.cat([torch.empty(0, device=device), *(v.to(device) for v in samples)]).cpu()
    return _text(tuple(names), tuple(map(len, samples)), values.numpy().tobytes(), bits)


@functools.lru_cache(maxsize=64)
def _text(names: tuple[str, ...], counts: tuple[int, ...], numbers: bytes, bits: int) -> str:
    """The fingerprint of sampled float32 numbers, cached by their bytes: sampling again is cheap, hashing is not."""
    digest, layout = hashlib.sha256(), hashlib.sha256()
    values = torch.frombuffer(bytearray(numbers), dtype=torch.float32) if numbers else torch.empty(0)
    rounded = values.to(torch.float16).float().split(list(counts))
    for name, some in zip(names, rounded, strict=True):
        digest.update(f"{name} {[f'{v:.4g}' for v in some.tolist()]}".encode())
        layout.update(name.encode())
    return f"{digest.hexdigest()[:DIGITS]}-{layout.hexdigest()[:8]}{_digits(values)}" + _STORED.get(bits, "")


_STORED = {8: "~8", 4: "~4"}


def active_fingerprint_of(backbone: nn.Module) -> str:
    """:func:`fingerprint_of` the checkpoint, a plus, and a hash of the active adapters of its text values.

    Activation statistics depend on both. Adapters of other layers, inactive, or at scale 0 do not count.
    """
    digest = ChangeDigest()
    for site in once(_values, backbone):
        module: Any = module_at(backbone, site.path)
        if not hasattr(module, "base_layer") or getattr(module, "disable_adapters", True):
            continue
        for name in module.active_adapters:
            scale = module.scaling.get(name, 0)
            if scale and name not in module.merged_adapters:
                weights = [v for k, v in module.named_parameters() if name in k.split(".")]
                digest.add(f"{site.address} {scale:.6g}", weights)
    return digest.joined(fingerprint_of(backbone))


def text_values(backbone: nn.Module) -> list[str]:
    """Paths of the projections whose outputs are text values."""
    return [site.path for site in once(_values, backbone)]


class ChangeDigest:
    """A hash of what is added to a checkpoint; empty if nothing is."""

    def __init__(self) -> None:
        self._digest, self._empty = hashlib.sha256(), True

    def add(self, what: str, tensors: Iterable[torch.Tensor]) -> None:
        """Add a change: its layer and strength, and a few values of each tensor, to three digits."""
        self._empty = False
        self._digest.update(what.encode())
        for tensor in tensors:
            flat = tensor.detach().flatten()
            sample = flat[:: max(1, len(flat) // 16)].float().cpu()
            self._digest.update(f"{tuple(tensor.shape)} {[f'{v:.2e}' for v in sample.tolist()]}".encode())

    def joined(self, fingerprint: str) -> str:
        """The fingerprint, followed by a plus and the hash if anything was added."""
        return fingerprint if self._empty else f"{fingerprint}+{self._digest.hexdigest()[:DIGITS]}"


def _values(backbone: nn.Module) -> list[ModuleSite]:
    """The projections of text values; those shared with image tokens only if there are no others."""
    sites = [s for s in layout_of(backbone) if isinstance(s, ModuleSite)]
    values = [s for s in sites if s.address.endswith(("-cross-v", "-ctx-v"))]
    return [s for s in values if not s.joint] or values


def _digits(values: torch.Tensor) -> str:
    """Four digits per weight, for at most 64 of the samples, evenly spaced."""
    chosen = values[:: -(-len(values) // SAMPLES) or 1].to(torch.bfloat16).view(torch.int16)
    return "".join(f"{v & 0xFFFF:04x}" for v in chosen.tolist())


def same_weights(first: str, second: str) -> bool:
    """Whether two fingerprints may be of one checkpoint, in any precision.

    Every sample must agree to one step of bfloat16. If one was stored in 8 bits, samples may differ by that
    quantisation error, 6 % in rms, so a closer fine-tune counts as the same checkpoint. Weights of 4 bits are off by
    10 % or more and match only themselves. A fingerprint in another form must be equal, as must the part after a plus,
    active adapters.
    """
    (first, _, added), (second, _, others) = first.partition("+"), second.partition("+")
    if added != others:
        return False
    a, b = (_WITH_WEIGHTS.fullmatch(text) for text in (first, second))
    if a is None or b is None:
        return first == second
    if a["layout"] != b["layout"] or len(a["weights"]) != len(b["weights"]):
        return False
    x, y = _weights(a["weights"]), _weights(b["weights"])
    if {a["bits"], b["bits"]} in ({None, "8"}, {"8"}):
        fraction, least = _OF_EIGHT_BITS
        sides = 1 if a["bits"] != b["bits"] else 2  # both are quantised
        away, size = (v.square().mean().sqrt() for v in (x[1] - y[1], y[1]))
        return bool(away <= sides * (fraction * size + least))
    finest = 2.0**-24  # fp16 has nothing smaller, so tiny weights differ by more than a step of bfloat16
    return bool(((x[0] - y[0]).abs() <= 1).logical_or((x[1] - y[1]).abs() <= finest).all())


def _weights(digits: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions on the line of all bfloat16 numbers, and the numbers."""
    bits = torch.tensor([int(digits[i : i + 4], 16) for i in range(0, len(digits), 4)], dtype=torch.int32)
    magnitude = bits & 0x7FFF
    numbers = torch.where(bits >= 0x8000, bits - 0x10000, bits).to(torch.int16).view(torch.bfloat16).float()
    return torch.where(bits >= 0x8000, -magnitude, magnitude), numbers


def short(fingerprint: str) -> str:
    """The form shown to users: the hash, how the weights are stored, and the hash of active adapters."""
    stem, plus, added = fingerprint.partition("+")
    known = _WITH_WEIGHTS.fullmatch(stem)
    return (stem[:DIGITS] + _SHOWN.get(known["bits"], "") if known else stem) + plus + added


_SHOWN = {"8": " in 8 bits", "4": " in 4 bits, which match no other precision of the same checkpoint"}
