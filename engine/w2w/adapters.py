"""One layer of an adapter file as two factors: LoRA, LoCon, LoHa, LoKr, full differences, and DoRA over a base weight.

LoHa multiplies two products of factors element by element, LoKr takes a Kronecker product (Yeh et al. 2024, LyCORIS).
Both are products of two factors again, of rank r^2 and r1 r2. Where that is no less than the smaller side, and for what
has no factors, one factor is the identity and the other the whole change. Nothing is approximated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ..errors import refuse
from .base_weights import BaseWeights
from .lora_settings import LoraRules

Shape = tuple[int, ...]
Tensors = Mapping[str, torch.Tensor]
Factors = tuple[torch.Tensor, torch.Tensor]

MIDDLE = "LoCon with a middle factor"
_MAGNITUDES = ("magnitude", "dora_scale")
"""Roles of a DoRA's lengths: PEFT's of the weight's rows, LyCORIS's of its rows or columns."""
_THREE = ("conv1", "conv2", "conv_in", "conv_out", "samplers.0.conv")
"""Ends of the names of a UNet's 3 x 3 convolutions: factors of LoHa and LoKr may be stored flat."""
_FULL = 1 << 40
"""A rank for what has no factors."""


@dataclass(frozen=True)
class Entry:
    """One layer of a file.

    Attributes:
        kind: ``LoRA``, ``LoCon with a middle factor``, ``LoHa``, ``LoKr`` or ``difference``.
        keys: (role, key in the file) of its tensors.
        down, up: shapes of the two factors that it becomes.
        alpha: of these factors; None if the file has none, and the scale is 1.
        scale: of the product as the file means it.
    """

    kind: str
    keys: tuple[tuple[str, str], ...]
    down: Shape
    up: Shape
    alpha: float | None
    scale: float = 1.0

    @property
    def outer(self) -> tuple[int, int]:
        """(out, in), whatever the rank."""
        return self.up[0], math.prod(self.down[1:])

    @property
    def decomposed(self) -> bool:
        """Whether it is a DoRA."""
        return any(role in _MAGNITUDES for role, _ in self.keys)


# --- from shapes ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Measured:
    """out, in or (in, k, k), the rank of the factors, and the trainer's rank, which divides alpha (None: unknown)."""

    out: int
    tail: Shape
    rank: int
    dim: int | None


def entry_of(
    name: str, path: str, keys: Mapping[str, str], shapes: Mapping[str, Shape], alpha: float | None,
    settings: LoraRules, base: BaseWeights | None = None,
) -> Entry:  # fmt: skip
    """What one layer of a file becomes, by the shapes of its tensors.

    Args:
        name: of the file, for messages.
        keys: role (see ``names.py``) -> key in the file.
        alpha: that stands beside the factors; PEFT's stands in ``settings``.
        base: weights of the base model, which a DoRA needs.

    Raises:
        VitrineError: If a factor is missing, shapes do not fit, alpha is no number, or a DoRA's weight is not at hand.
    """
    sides = {role: shapes[key] for role, key in keys.items()}
    kind, roles = _kind_of(name, path, sides), tuple(sorted(keys.items()))
    try:
        size = _MEASURES[kind](sides, path)
    except (KeyError, IndexError, ValueError):
        shown = f"{name}: {path} has factors {', '.join(f'{r} {s}' for r, s in sorted(sides.items()))}"
        raise refuse("LoRA file", shown, f"those of a {kind}", "export it again") from None
    decomposed = any(role in _MAGNITUDES for role in sides)
    if kind == "LoRA" and not decomposed:
        own = alpha if "alpha" in keys else settings.alpha(path, size.rank)
        return Entry(kind, roles, sides["down"], sides["up"], _finite(name, path, own))
    tail = _tail(name, path, size, base, decomposed)
    scale = _finite(name, path, _scale(kind, path, alpha, size.dim, settings))
    smaller = min(size.out, math.prod(tail))
    rank = smaller if decomposed else min(size.rank, smaller)
    own = float(rank) if decomposed or kind == "difference" else None if scale is None else scale * rank
    up = (size.out, rank, *(1,) * (len(tail) - 1))
    return Entry(kind, roles, (rank, *tail), up, own, 1.0 if scale is None else scale)


def _kind_of(name: str, path: str, sides: Mapping[str, Shape]) -> str:
    parts = sorted(sides)
    if "down" in sides and "up" in sides:
        if min(len(sides["down"]), len(sides["up"])) < 2 or sides["up"][1] != sides["down"][0] and "mid" not in sides:
            shown = f"{name}: {path} has factors {sides['down']} and {sides['up']}"
            raise refuse("LoRA file", shown, "(r, in), (out, r)", "export it again")
        if 0 in sides["down"] + sides["up"]:
            raise refuse("LoRA file", f"{name}: {path} is empty", "(r, in), (out, r)", "export it again")
        return MIDDLE if "mid" in sides else "LoRA"
    for kind, start in (("LoHa", "hada"), ("LoKr", "lokr"), ("difference", "diff")):
        if any(role.startswith(start) for role in parts):
            return kind
    raise refuse("LoRA file", f"{name}: {path} has only {parts}", "two factors a layer", "download it again")


def _of_lora(sides: Mapping[str, Shape], path: str) -> _Measured:
    return _Measured(sides["up"][0], sides["down"][1:], sides["down"][0], sides["down"][0])


def _of_middle(sides: Mapping[str, Shape], path: str) -> _Measured:
    (r, inner, *kernel), down, up = sides["mid"], sides["down"], sides["up"]
    if up[1] != r or inner != down[0] or math.prod(down[2:]) != 1 or math.prod(up[2:]) != 1:
        raise ValueError
    return _Measured(up[0], (down[1], *kernel), r, down[0])


def _of_loha(sides: Mapping[str, Shape], path: str) -> _Measured:
    pairs = [(sides[f"hada_w{n}_a"], sides[f"hada_w{n}_b"]) for n in (1, 2)]
    if "hada_t1" in sides:
        (r, out), (_, width) = pairs[0]
        return _Measured(out, (width, *sides["hada_t2"][2:]), _FULL, r)
    ((out, r), (inner, width)), (other, second) = pairs
    if r != inner or other != (out, second[0]) or second[1] != width:
        raise ValueError
    return _Measured(out, _unrolled(path, width), r * second[0], r)


def _of_lokr(sides: Mapping[str, Shape], path: str) -> _Measured:
    ((a, b), rank1, dim1), ((c, d, *kernel), rank2, dim2) = (_half(sides, f"lokr_w{n}", f"lokr_t{n}") for n in (1, 2))
    tail = (b * d, *kernel) if kernel else _unrolled(path, b * d)
    return _Measured(a * c, tail, rank1 * rank2, dim2 or dim1)


def _half(sides: Mapping[str, Shape], whole: str, core: str) -> tuple[Shape, int, int | None]:
    """Of one Kronecker factor the shape, its rank, and the trainer's if it has factors itself."""
    if whole in sides:
        shape, dim = sides[whole], None
    else:
        left, right = sides[f"{whole}_a"], sides[f"{whole}_b"]
        dim = right[0]
        if core not in sides:
            if left[1] != dim:
                raise ValueError
            return (left[0], right[1]), dim, dim
        shape = left[1], right[1], *sides[core][2:]  # (r, out), (r, in) beside (r, r, k, k)
    return shape, min(shape[0], math.prod(shape[1:])), dim


def _of_difference(sides: Mapping[str, Shape], path: str) -> _Measured:
    out, *tail = sides["diff"]
    if not tail or 0 in sides["diff"]:
        raise ValueError
    return _Measured(out, tuple(tail), _FULL, None)


_MEASURES: dict[str, Callable[[Mapping[str, Shape], str], _Measured]] = {
    "LoRA": _of_lora, MIDDLE: _of_middle, "LoHa": _of_loha, "LoKr": _of_lokr, "difference": _of_difference,
}  # fmt: skip


def _unrolled(path: str, width: int) -> Shape:
    return (width // 9, 3, 3) if path.endswith(_THREE) and width % 9 == 0 else (width,)


def _tail(name: str, path: str, size: _Measured, base: BaseWeights | None, decomposed: bool) -> Shape:
    """(in,) or (in, k, k), by the base weight where that is at hand."""
    if decomposed and (base is None or path not in base):
        shown = f"{name}, a DoRA: its change depends on the base model's weights"
        shown += "" if base is None else f", and those at hand lack {path}"
        raise refuse("LoRA file", shown, "one beside its base model", "vitrine w2w build has --base-weights FILE")
    if base is None or path not in base:
        return size.tail
    shape = base.shape(path)
    if shape[0] != size.out or math.prod(shape[1:]) != math.prod(size.tail):
        shown = f"{path} of {shape}, in {name} {(size.out, *size.tail)}"
        raise refuse("base weights", shown, "the model the LoRA was made for", "choose that model's file")
    return shape[1:]


def _scale(kind: str, path: str, alpha: float | None, dim: int | None, settings: LoraRules) -> float | None:
    if kind == "difference":
        return None
    if alpha is not None:
        return alpha / dim if dim else 1.0  # LyCORIS: both Kronecker factors whole, no rank
    rank = settings.rank(path) or dim or 1  # PEFT divides by its rank there too
    value = settings.alpha(path, rank)
    return None if value is None else value / rank


def _finite(name: str, path: str, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise refuse("LoRA file", f"{name}: alpha {value} of {path}", "a finite alpha", "export it again")
    return value


# --- from tensors ---------------------------------------------------------------------------------------------------
def factors_of(entry: Entry, tensors: Tensors, weight: torch.Tensor | None = None) -> Factors:
    """(down, up) in float32, of the shapes that the entry says.

    Args:
        tensors: role -> tensor.
        weight: of the base model, for a DoRA.
    """
    if entry.kind == "LoRA" and not entry.decomposed:
        return tensors["down"].float().reshape(entry.down), tensors["up"].float().reshape(entry.up)
    double = {role: value.double() for role, value in tensors.items()}
    up, down = _PRODUCTS[entry.kind](double)
    if entry.decomposed:
        assert weight is not None
        change = _redirected(weight.double().flatten(1), entry.scale * (up @ down), double)
        up, down = beside_identity(change)
    elif up.shape[1] > entry.down[0]:
        up, down = beside_identity(up @ down)
    return down.float().reshape(entry.down), up.float().reshape(entry.up)


def beside_identity(change: torch.Tensor) -> Factors:
    """(up, down) of a whole (out, in) change: the identity on its smaller side."""
    identity = torch.eye(min(change.shape), dtype=change.dtype)
    return (identity, change) if len(change) <= change.shape[1] else (change, identity)


def _redirected(weight: torch.Tensor, change: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    """DoRA's change of the weight (Liu et al. 2024, Eq. 5): W' = m (W + dW) / |W + dW|, less W.

    Lengths are those of rows in PEFT and usually in LyCORIS, whose (1, in) means columns. Both divide by the changed
    weight's; ComfyUI 0.33 divides rows by the base weight's.
    """
    moved = weight + change
    rows = "magnitude" in tensors or tensors["dora_scale"].shape[0] == len(weight)
    lengths = (tensors["magnitude"] if "magnitude" in tensors else tensors["dora_scale"]).flatten()
    if rows:
        return moved * (lengths / moved.norm(dim=1))[:, None] - weight
    kernel = weight.shape[1] // len(lengths)
    columns = moved.unflatten(1, (-1, kernel))
    return (columns * (lengths / columns.norm(dim=(0, 2)))[:, None]).flatten(1) - weight


def _lora(tensors: Tensors) -> Factors:
    return tensors["up"].flatten(1), tensors["down"].flatten(1)


def _middle(tensors: Tensors) -> Factors:
    down = torch.einsum("pqkl, qi -> pikl", tensors["mid"], tensors["down"].flatten(1))
    return tensors["up"].flatten(1), down.flatten(1)


def _loha(tensors: Tensors) -> Factors:
    a1, b1, a2, b2 = (tensors[f"hada_w{n}_{side}"] for n in (1, 2) for side in "ab")
    if "hada_t1" in tensors:
        first, second = (_rebuilt(tensors[f"hada_t{n}"], a, b) for n, a, b in ((1, a1, b1), (2, a2, b2)))
        return beside_identity((first * second).flatten(1))
    # (sum_i a1_i b1_i) * (sum_j a2_j b2_j) = sum_ij (a1_i * a2_j)(b1_i * b2_j)
    return (a1[:, :, None] * a2[:, None]).flatten(1), (b1[:, None] * b2[None]).flatten(0, 1)


def _lokr(tensors: Tensors) -> Factors:
    (up1, down1), (up2, down2) = (_kronecker_half(tensors, f"lokr_w{n}", f"lokr_t{n}") for n in (1, 2))
    # (A B) x (C D) = (A x C)(B x D)
    return torch.kron(up1.contiguous(), up2.contiguous()), torch.kron(down1.contiguous(), down2.contiguous())


def _kronecker_half(tensors: Tensors, whole: str, core: str) -> Factors:
    if whole in tensors:
        return beside_identity(tensors[whole].flatten(1))
    left, right = tensors[f"{whole}_a"], tensors[f"{whole}_b"]
    return beside_identity(_rebuilt(tensors[core], left, right).flatten(1)) if core in tensors else (left, right)


def _rebuilt(core: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """(out, in, k, k) of (r, r, k, k), (r, out), (r, in)."""
    return torch.einsum("ijkl, jr, ip -> prkl", core, right, left)


def _difference(tensors: Tensors) -> Factors:
    return beside_identity(tensors["diff"].flatten(1))


_PRODUCTS: dict[str, Callable[[Tensors], Factors]] = {
    "LoRA": _lora, MIDDLE: _middle, "LoHa": _loha, "LoKr": _lokr, "difference": _difference,
}  # fmt: skip
