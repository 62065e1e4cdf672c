"""One layer of an adapter file as two factors: LoRA, AdaLoRA, LoCon, LoHa, LoKr, full differences; DoRA over a weight.

LoHa multiplies two products of factors element by element, LoKr takes a Kronecker product (Yeh et al. 2024, LyCORIS).
Both equal a product of two factors, of rank r^2 and r1 r2. If that is not below the smaller side, or there are no
factors, one factor is the identity and the other the full update. Nothing is approximated.

Small files may expand to large products: a product's size is compared with the layer's before it is formed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from ...errors import refuse
from .base_weights import BaseWeights
from .layer_names import layer_fits, most_numbers
from .lora_settings import LARGEST_ALPHA, LoraRules

Shape = tuple[int, ...]

MIDDLE, ADAPTIVE = "LoCon with a middle factor", "AdaLoRA"
_MAGNITUDES = ("magnitude", "dora_scale")
"""Roles of a DoRA's norms: PEFT's of the weight's rows, LyCORIS's of its rows or columns."""
_THREE = ("conv1", "conv2", "conv_in", "conv_out", "samplers.0.conv")
"""Suffixes of the names of a UNet's 3 x 3 convolutions, whose LoHa and LoKr factors may be stored flat."""
_FULL = 1 << 40
"""The rank of updates without factors."""
LARGEST_PRODUCT = 1e12
"""Bound on the numbers of an update, from those of its factors: a larger one means a damaged or malicious file."""


@dataclass(frozen=True)
class Entry:
    """One layer of a file.

    Attributes:
        kind: ``LoRA``, ``AdaLoRA``, ``LoCon with a middle factor``, ``LoHa``, ``LoKr`` or ``difference``.
        keys: (role, key in the file) per tensor.
        down, up: shapes of the two resulting factors.
        alpha: of these factors; None if the file has none, and the scale is 1.
        scale: scale of the product in the file.
    """

    kind: str
    keys: tuple[tuple[str, str], ...]
    down: Shape
    up: Shape
    alpha: float | None
    scale: float = 1.0

    @property
    def outer(self) -> tuple[int, int]:
        """(out, in), independent of the rank."""
        return self.up[0], math.prod(self.down[1:])

    @cached_property
    def decomposed(self) -> bool:
        """Whether it is a DoRA."""
        return any(role in _MAGNITUDES for role, _ in self.keys)


@dataclass(frozen=True)
class _Measured:
    """out, in or (in, k, k), the rank of the factors, and the trainer's rank, which divides alpha (None: unknown)."""

    out: int
    tail: Shape
    rank: int
    dim: int | None


def entry_of(
    name: str,
    path: str,
    keys: Mapping[str, str],
    shapes: Mapping[str, Shape],
    alpha: float | None,
    settings: LoraRules,
    base: BaseWeights | None = None,
) -> Entry:
    """The entry of one layer, by the shapes of its tensors.

    Args:
        name: of the file, for messages.
        keys: role (see ``names.py``) -> key in the file.
        alpha: stored with the factors; PEFT's is in ``settings``.
        base: weights of the base model, which a DoRA needs.
    """
    sides = {role: shapes[key] for role, key in keys.items()}
    kind, roles = _kind_of(name, path, sides), tuple(sorted(keys.items()))
    strange = [keys[role] for role in sides if role not in _MADE_OF[kind]]
    if strange or (kind == "LoRA" and settings.adaptive is not None):
        shown = f"{name}: {path}, a {kind}" + (f" with {strange[0]}" if strange else " with the settings of an AdaLoRA")
        raise refuse("LoRA file", shown, f"the factors of one {kind}", "export it again")
    try:
        size = _MEASURES[kind](sides, path)
    except (KeyError, IndexError, ValueError):
        shown = f"{name}: {path} has factors {', '.join(f'{r} {s}' for r, s in sorted(sides.items()))}"
        raise refuse("LoRA file", shown, f"those of a {kind}", "export it again") from None
    _check_size(name, path, size)
    decomposed = any(role in _MAGNITUDES for role in sides)
    if kind in ("LoRA", ADAPTIVE) and not decomposed:
        own = alpha if "alpha" in keys else settings.alpha(path, size.rank)
        if kind == ADAPTIVE:
            own = _adaptive(name, settings) * size.rank
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
        return MIDDLE if "mid" in sides else ADAPTIVE if "singular" in sides else "LoRA"
    for kind, start in (("LoHa", "hada"), ("LoKr", "lokr"), ("difference", "diff")):
        if any(role.startswith(start) for role in parts):
            return kind
    raise refuse("LoRA file", f"{name}: {path} has only {parts}", "two factors per layer", "download it again")


def _of_lora(sides: Mapping[str, Shape], path: str) -> _Measured:
    if math.prod(sides["up"][2:]) != 1:
        raise ValueError
    return _Measured(sides["up"][0], sides["down"][1:], sides["down"][0], sides["down"][0])


def _of_adaptive(sides: Mapping[str, Shape], path: str) -> _Measured:
    if sides["singular"] != (sides["down"][0], 1):
        raise ValueError
    return _of_lora(sides, path)


def _of_middle(sides: Mapping[str, Shape], path: str) -> _Measured:
    (r, inner, *kernel), down, up = sides["mid"], sides["down"], sides["up"]
    if up[1] != r or inner != down[0] or math.prod(down[2:]) != 1 or math.prod(up[2:]) != 1:
        raise ValueError
    return _Measured(up[0], (down[1], *kernel), r, down[0])


def _of_loha(sides: Mapping[str, Shape], path: str) -> _Measured:
    pairs = [(sides[f"hada_w{n}_a"], sides[f"hada_w{n}_b"]) for n in (1, 2)]
    if "hada_t1" in sides:
        (r, out), (_, width) = pairs[0]
        cores, wide = [sides["hada_t1"], sides["hada_t2"]], [pairs[0][1][0], pairs[1][1][0]]
        kernels = {core[2:] for core in cores}
        fits = all(core[:2] == (left[0], inner) for core, (left, _), inner in zip(cores, pairs, wide, strict=True))
        if len(kernels) > 1 or not fits or pairs[1] != ((pairs[1][0][0], out), (wide[1], width)):
            raise ValueError
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
    """(shape, rank, trainer's rank if it has factors itself) of one Kronecker factor."""
    if whole in sides:
        shape, dim = sides[whole], None
    else:
        left, right = sides[f"{whole}_a"], sides[f"{whole}_b"]
        dim = right[0]
        if core not in sides:
            if left[1] != dim:
                raise ValueError
            return (left[0], right[1]), dim, dim
        if sides[core][:2] != (left[0], dim):
            raise ValueError
        shape = left[1], right[1], *sides[core][2:]  # (r, out), (r, in) with (r, r, k, k)
    return shape, min(shape[0], math.prod(shape[1:])), dim


def _of_difference(sides: Mapping[str, Shape], path: str) -> _Measured:
    out, *tail = sides["diff"]
    if not tail or 0 in sides["diff"]:
        raise ValueError
    return _Measured(out, tuple(tail), _FULL, None)


_MEASURES: dict[str, Callable[[Mapping[str, Shape], str], _Measured]] = {
    "LoRA": _of_lora,
    ADAPTIVE: _of_adaptive,
    MIDDLE: _of_middle,
    "LoHa": _of_loha,
    "LoKr": _of_lokr,
    "difference": _of_difference,
}
_EXTRA = ("alpha", *_MAGNITUDES)
_MADE_OF = {
    "LoRA": {"down", "up", *_EXTRA},
    ADAPTIVE: {"down", "up", "singular"},
    MIDDLE: {"down", "up", "mid", *_EXTRA},
    "LoHa": {*(f"hada_w{n}_{side}" for n in (1, 2) for side in "ab"), "hada_t1", "hada_t2", *_EXTRA},
    "LoKr": {*(f"lokr_w{n}{side}" for n in (1, 2) for side in ("", "_a", "_b")), "lokr_t1", "lokr_t2", *_EXTRA},
    "difference": {"diff", *_EXTRA},
}
"""Roles of a kind's tensors; with any other role the layer's meaning is unknown."""


def _check_size(name: str, path: str, size: _Measured) -> None:
    if not layer_fits(path, size.out * math.prod(size.tail)):
        shown = f"{name}: {path} of {size.out} x {' x '.join(map(str, size.tail))}"
        raise refuse(
            "LoRA file",
            shown,
            f"a layer's size, at most {most_numbers(path)} numbers",
            "it is damaged: download it again",
        )


def _adaptive(name: str, settings: LoraRules) -> float:
    if settings.adaptive is None:
        shown = f"{name}, an AdaLoRA without its settings"
        raise refuse("LoRA file", shown, "one with PEFT's adapter_config.json next to it", "copy the whole folder")
    return settings.adaptive


def _unrolled(path: str, width: int) -> Shape:
    return (width // 9, 3, 3) if path.endswith(_THREE) and width % 9 == 0 else (width,)


def _tail(name: str, path: str, size: _Measured, base: BaseWeights | None, decomposed: bool) -> Shape:
    """(in,) or (in, k, k), from the base weight if it is given."""
    if decomposed and (base is None or path not in base):
        shown = f"{name}, a DoRA: its change depends on the base model's weights"
        shown += "" if base is None else f", and those at hand lack {path}"
        raise refuse(
            "LoRA file", shown, "one together with its base model", "vitrine w2w build has --base-weights FILE"
        )
    if base is None or path not in base:
        return size.tail
    shape = base.shape(path)
    if shape[0] != size.out or math.prod(shape[1:]) != math.prod(size.tail):
        shown = f"{path} of {shape}, in {name} {(size.out, *size.tail)}"
        raise refuse("base weights", shown, "those of the LoRA's base model", "choose that model's file")
    return shape[1:]


def _scale(kind: str, path: str, alpha: float | None, dim: int | None, settings: LoraRules) -> float | None:
    if kind == "difference":
        return None
    if alpha is not None:
        return alpha / dim if dim else 1.0  # LyCORIS: both Kronecker factors are full, without a rank
    rank = settings.rank(path) or dim or 1  # PEFT divides by its rank there, too
    value = settings.alpha(path, rank)
    return None if value is None else value / rank


def _finite(name: str, path: str, value: float | None) -> float | None:
    if value is not None and not (math.isfinite(value) and abs(value) <= LARGEST_ALPHA * LARGEST_ALPHA):
        raise refuse("LoRA file", f"{name}: alpha {value:g} of {path}", "a finite alpha", "export it again")
    return value
