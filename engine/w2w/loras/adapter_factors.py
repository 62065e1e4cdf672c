"""The two factors of one layer of an adapter file, from its tensors; their shapes were checked in ``adapters.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from .adapters import ADAPTIVE, MIDDLE, Entry

Tensors = Mapping[str, torch.Tensor]
Factors = tuple[torch.Tensor, torch.Tensor]


def factors_of(entry: Entry, tensors: Tensors, weight: torch.Tensor | None = None) -> Factors:
    """(down, up) in float32, of the entry's shapes.

    Args:
        tensors: role -> tensor.
        weight: of the base model, for a DoRA.
    """
    if entry.kind == "LoRA" and not entry.decomposed:
        return tensors["down"].float().reshape(entry.down), tensors["up"].float().reshape(entry.up)
    double = {role: value.double() for role, value in tensors.items()}
    up, down = _PRODUCTS[entry.kind](double, min(entry.outer))
    if entry.decomposed:
        assert weight is not None
        change = _redirected(weight.double().flatten(1), entry.scale * (up @ down), double)
        up, down = times_identity(change)
    return down.float().reshape(entry.down), up.float().reshape(entry.up)


def times_identity(change: torch.Tensor) -> Factors:
    """(up, down) of a full (out, in) update, with the identity on its smaller side."""
    identity = torch.eye(min(change.shape), dtype=change.dtype)
    return (identity, change) if len(change) <= change.shape[1] else (change, identity)


def _redirected(weight: torch.Tensor, change: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    """DoRA's weight update (Liu et al. 2024, Eq. 5): W' = m (W + dW) / |W + dW|, less W.

    Norms are of rows in PEFT and usually in LyCORIS, where (1, in) means columns. Both divide by the changed
    weight's norm; ComfyUI 0.33 divides rows by the base weight's.
    """
    moved = weight + change
    rows = "magnitude" in tensors or tensors["dora_scale"].shape[0] == len(weight)
    lengths = (tensors["magnitude"] if "magnitude" in tensors else tensors["dora_scale"]).flatten()
    if rows:
        return moved * (lengths / moved.norm(dim=1))[:, None] - weight
    kernel = weight.shape[1] // len(lengths)
    columns = moved.unflatten(1, (-1, kernel))
    return (columns * (lengths / columns.norm(dim=(0, 2)))[:, None]).flatten(1) - weight


# Each takes the smaller side of the product: if the rank is higher, the product itself is formed. The order of
# contractions keeps every intermediate no larger than the product or the file.
def _lora(tensors: Tensors, smaller: int) -> Factors:
    return tensors["up"].flatten(1), tensors["down"].flatten(1)


def _with_singular_values(tensors: Tensors, smaller: int) -> Factors:
    # Zhang et al. 2023 (AdaLoRA), Eq. 3: P diag(lambda) Q
    return tensors["up"].flatten(1), tensors["down"].flatten(1) * tensors["singular"]


def _middle(tensors: Tensors, smaller: int) -> Factors:
    up, down, mid = tensors["up"].flatten(1), tensors["down"].flatten(1), tensors["mid"]
    if up.shape[1] <= smaller:
        return up, torch.einsum("pqkl, qi -> pikl", mid, down).flatten(1)
    first, second = ("op, pqkl -> oqkl", "oqkl, qi -> oikl")
    return times_identity(torch.einsum(second, torch.einsum(first, up, mid), down).flatten(1))


def _loha(tensors: Tensors, smaller: int) -> Factors:
    a1, b1, a2, b2 = (tensors[f"hada_w{n}_{side}"] for n in (1, 2) for side in "ab")
    if "hada_t1" in tensors:
        first, second = (_rebuilt(tensors[f"hada_t{n}"], a, b) for n, a, b in ((1, a1, b1), (2, a2, b2)))
        return times_identity((first * second).flatten(1))
    if a1.shape[1] * a2.shape[1] > smaller:
        return times_identity((a1 @ b1) * (a2 @ b2))
    # (sum_i a1_i b1_i) * (sum_j a2_j b2_j) = sum_ij (a1_i * a2_j)(b1_i * b2_j)
    return (a1[:, :, None] * a2[:, None]).flatten(1), (b1[:, None] * b2[None]).flatten(0, 1)


def _lokr(tensors: Tensors, smaller: int) -> Factors:
    (up1, down1), (up2, down2) = (_kronecker_half(tensors, f"lokr_w{n}", f"lokr_t{n}") for n in (1, 2))
    if up1.shape[1] * up2.shape[1] > smaller:
        return times_identity(torch.kron(up1 @ down1, up2 @ down2))
    # (A B) x (C D) = (A x C)(B x D)
    return torch.kron(up1.contiguous(), up2.contiguous()), torch.kron(down1.contiguous(), down2.contiguous())


def _kronecker_half(tensors: Tensors, whole: str, core: str) -> Factors:
    if whole in tensors:
        return times_identity(tensors[whole].flatten(1))
    left, right = tensors[f"{whole}_a"], tensors[f"{whole}_b"]
    return times_identity(_rebuilt(tensors[core], left, right).flatten(1)) if core in tensors else (left, right)


def _rebuilt(core: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """(out, in, k, k) of (r, r, k, k), (r, out), (r, in)."""
    if len(core) > left.shape[1]:
        return torch.einsum("pjkl, jr -> prkl", torch.einsum("ijkl, ip -> pjkl", core, left), right)
    return torch.einsum("ijkl, jr, ip -> prkl", core, right, left)


def _difference(tensors: Tensors, smaller: int) -> Factors:
    return times_identity(tensors["diff"].flatten(1))


_PRODUCTS: dict[str, Callable[[Tensors, int], Factors]] = {
    "LoRA": _lora,
    ADAPTIVE: _with_singular_values,
    MIDDLE: _middle,
    "LoHa": _loha,
    "LoKr": _lokr,
    "difference": _difference,
}
