"""Size conditioning weighted by timestep on public models, without training.

Our extension of Eq. 1 (Berrada et al. 2024): a public model was never trained with a zero vector, so its size
embedding is not scaled but blended with that of a neutral size. With A the model's own added vector,
A_t = A(ref) + gamma(t) (A(size) - A(ref)): gamma 1 is the untouched model, gamma 0 the model at the neutral size. The
blend is at the *output* of the model's MLP, which mixes text and size; a blend at its input would differ by a few
percent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..diffusion.forward_clock import Forward, ForwardClock, rows_for
from ..errors import refuse
from ..families import FAMILIES, record_of
from ..families.facts import SizeInput
from .gamma import GammaConfig

Reference = str | tuple[int, int]
"""``target``: the target size (neither enlarged nor reduced). ``zeros``: no size channels. Or (height, width)."""


# --- the rule -----------------------------------------------------------------------------------------------------
def added_delta(
    embed: Callable[[torch.Tensor], torch.Tensor], full: torch.Tensor, reference: torch.Tensor
) -> torch.Tensor:
    """A(size) - A(ref), (B, D), of a model's MLP (``label_emb``, ``add_embedding``) at two inputs (B, C)."""
    return embed(full) - embed(reference)


def weighted_delta(delta: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(gamma - 1) delta: what to add to the model's vector. Exactly 0 in batch rows of weight 1."""
    w = _column(weight, delta)
    # A(ref) + gamma delta = A(size) + (gamma - 1) delta
    return ((w - 1) * delta.to(w.dtype)).to(delta.dtype)


def blend(full: torch.Tensor, reference: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A(ref) + gamma (A(size) - A(ref)), (B, D), for weight (B,); bit-equal to either end at weight 1 and 0."""
    w = _column(weight, full)
    mixed = (reference.to(w.dtype) + w * (full.to(w.dtype) - reference.to(w.dtype))).to(full.dtype)
    return torch.where(w == 1, full, torch.where(w == 0, reference, mixed))


def _column(weight: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return weight.to(like.device, torch.promote_types(like.dtype, torch.float32))[:, None]


def reference_input(full: torch.Tensor, sizes: SizeInput, reference: Reference) -> torch.Tensor:
    """The MLP's input (B, C) with the size channels replaced by those of the neutral size.

    Args:
        sizes: of a model whose sizes are input channels.
    """
    changed = full.clone()
    if reference == "zeros":
        changed[:, sizes.size] = 0
    elif reference == "target" and sizes.target is not None:
        changed[:, sizes.size] = full[:, sizes.target]
    elif isinstance(reference, tuple):
        changed[:, sizes.size] = sizes.embed(torch.tensor(reference, device=full.device)).reshape(-1).to(full)
    else:
        raise refuse("reference", reference, "'target', 'zeros' or (height, width)", "give a size")
    return changed


# --- diffusers models ---------------------------------------------------------------------------------------------
def _size_input(backbone: nn.Module) -> SizeInput:
    record = record_of(backbone)
    read = None if record is None or record[1] is not record[0].diffusers else record[1].sizes
    sizes = None if read is None else read(backbone)
    if sizes is None:
        accepted = [family.name for family in FAMILIES if family.diffusers.sizes is not None]
        remedy = "models without size conditions have nothing to weight"
        raise refuse("model", type(backbone).__name__, accepted, remedy)
    return sizes


class ReferenceBlend(ForwardClock):
    """Size conditioning weighted by gamma of each batch row's timestep while the block is open.

    Only the original size is low-level; crop, target size and aspect keep weight 1. LoRAs of the MLP apply to both.

    Args:
        backbone: SDXL's UNet, or PixArt with size conditions.
        gamma: the curve and clock.
        reference: the neutral size. PixArt has no target size; its latent size times ``pixels`` is used.
        pixels: image pixels per latent position, along one side.
        drop: (B,) bool, batch rows that always have the neutral size (the null control of a guidance batch).

    Example:
        >>> with ReferenceBlend(pipe.unet, GammaConfig(alpha=1.0)):
        ...     pipe(prompt, original_size=(256, 256)).images
    """

    def __init__(
        self,
        backbone: nn.Module,
        gamma: GammaConfig,
        reference: Reference = "target",
        pixels: int = 8,
        drop: torch.Tensor | None = None,
    ) -> None:
        super().__init__(backbone)
        self._input = _size_input(self.backbone)
        if isinstance(reference, tuple) and (len(reference) != 2 or min(reference) < 1):
            raise refuse("reference", reference, "(height, width) in pixels", "give two sizes of 1 or more")
        if isinstance(reference, str) and reference not in ("target", "zeros"):
            raise refuse("reference", reference, "'target', 'zeros' or (height, width)", "target is the default")
        self.gamma, self.reference, self.pixels, self.drop = gamma, reference, pixels, drop

    def _open(self) -> None:
        self._after(self._input.path, self._blend)

    def _prepare(self, forward: Forward) -> tuple[torch.Tensor, tuple[int, int]]:
        self._input.check(forward.arguments)
        height, width = forward.sample.shape[-2:]
        weight = self.gamma.at(forward.t)
        if self.drop is not None:
            weight = weight.masked_fill(rows_for(self.drop, len(weight), "drop"), 0.0)
        return weight, (height * self.pixels, width * self.pixels)

    def _blend(self, module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        weight, asked = self._now
        if bool((weight == 1).all()):
            return output
        # forward instead of a call, so that this hook does not run again
        reference = module.forward(self._changed(args[0], asked))
        return blend(output, reference, weight.repeat_interleave(len(output) // len(weight)))

    def _changed(self, full: torch.Tensor, asked: tuple[int, int]) -> torch.Tensor:
        if self._input.size is not None:
            return reference_input(full, self._input, self.reference)
        if self.reference == "zeros":
            return torch.zeros_like(full)
        sizes = torch.tensor(asked if self.reference == "target" else self.reference, device=full.device)
        return self._input.embed(sizes).to(full).repeat(len(full) // 2, 1)
