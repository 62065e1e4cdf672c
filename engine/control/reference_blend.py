"""Time-weighted size conditioning on public models, without training.

Our extension of Eq. 1 (Berrada et al. 2024): a public model never saw an added vector of zero, so its size embedding is
not scaled but blended with that of a neutral size. With A the model's own added vector,
A_t = A(ref) + gamma(t) (A(size) - A(ref)): gamma 1 is the untouched model, gamma 0 the model at the neutral size. The
blend is at the *output* of the model's MLP, which mixes text and size; a blend at its input would be off by percents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import refuse
from ..forward_clock import Forward, ForwardClock, rows_for
from .embedder import sinusoid
from .gamma import GammaConfig

Reference = str | tuple[int, int]
"""``target``: the size asked for (neither enlarged nor reduced). ``zeros``: no size channels. Or (height, width)."""
Embed = Callable[[torch.Tensor], torch.Tensor]


# --- the rule -----------------------------------------------------------------------------------------------------
def added_delta(embed: Embed, full: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """A(size) - A(ref), (B, D), of a model's own MLP (``label_emb``, ``add_embedding``) at two inputs (B, C)."""
    return embed(full) - embed(reference)


def delta_share(delta: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(gamma - 1) delta: what to add beside the model's own vector. Exactly 0 in rows of weight 1."""
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


def reference_input(
    full: torch.Tensor, size: slice, target: slice | None, reference: Reference, embed: Embed = sinusoid
) -> torch.Tensor:
    """The MLP's input (B, C) with the channels of the size replaced by those of the neutral one.

    Args:
        size, target: channels of (height, width) of the original and of the wanted size.
        embed: (2,) sizes -> sinusoids, to be the model's own where equality to the bit matters.

    Raises:
        VitrineError: If the input has no channels for this policy.
    """
    changed = full.clone()
    if reference == "zeros":
        changed[:, size] = 0
    elif reference == "target" and target is not None:
        changed[:, size] = full[:, target]
    elif isinstance(reference, tuple):
        changed[:, size] = embed(torch.tensor(reference, device=full.device)).reshape(-1).to(full)
    else:
        raise refuse("reference", reference, "'target', 'zeros' or (height, width)", "give a size")
    return changed


def sdxl_reference(
    y: torch.Tensor, reference: Reference = "target", channels: int = 256, embed: Embed | None = None
) -> torch.Tensor:
    """SDXL's vector y (B, text + 6 * channels), the same in ComfyUI and diffusers, with the neutral original size.

    Its last six sinusoids are original height and width, crop top and left, target height and width.
    """
    first = y.shape[1] - 6 * channels
    embed = embed or partial(sinusoid, channels=channels)
    if first < 0:
        raise refuse("y", tuple(y.shape), f"(B, at least {6 * channels})", "this is not SDXL's vector")
    last = slice(y.shape[1] - 2 * channels, y.shape[1])
    return reference_input(y, slice(first, first + 2 * channels), last, reference, embed)


# --- diffusers models ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Input:
    """Where a model takes its size: the MLP's path, channels of the original and target size, its own sinusoid."""

    path: str
    size: slice
    target: slice | None
    embed: Embed


def _sdxl(model: Any) -> _Input:
    if model.config.addition_embed_type != "text_time":
        kind = model.config.addition_embed_type
        raise refuse("addition_embed_type", kind, "text_time (SDXL)", "this UNet has no size conditioning")
    width, c = model.add_embedding.linear_1.in_features, model.config.addition_time_embed_dim
    sizes = slice(width - 6 * c, width - 4 * c)
    return _Input("add_embedding", sizes, slice(width - 2 * c, width), model.add_time_proj)


def _pixart(model: Any) -> _Input:
    emb = model.adaln_single.emb
    if not emb.use_additional_conditions:
        raise refuse("use_additional_conditions", False, "True", "this PixArt was trained without size conditioning")
    # Height and width are rows here, not channels: one embedder serves both.
    return _Input("adaln_single.emb.resolution_embedder", slice(None), None, emb.additional_condition_proj)


def _cogview(model: Any) -> _Input:
    emb, c = model.time_condition_embed, model.config.condition_dim
    path = "time_condition_embed.condition_embedder"
    return _Input(path, slice(0, 2 * c), slice(4 * c, 6 * c), emb.condition_proj)


def _hunyuan(model: Any) -> _Input:
    emb, first = model.time_extra_emb, model.config.pooled_projection_dim
    if not emb.use_style_cond_and_image_meta_size:
        raise refuse("use_style_cond_and_image_meta_size", False, "True", "this model has no size conditioning")
    # Its order is original, target, crop.
    sizes, target = slice(first, first + 512), slice(first + 512, first + 1024)
    return _Input("time_extra_emb.extra_embedder", sizes, target, emb.size_proj)


INPUTS: dict[str, Callable[[Any], _Input]] = {
    "UNet2DConditionModel": _sdxl,
    "PixArtTransformer2DModel": _pixart,
    "CogView3PlusTransformer2DModel": _cogview,
    "HunyuanDiT2DModel": _hunyuan,
}


class ReferenceBlend(ForwardClock):
    """Size conditioning weighted by gamma of each row's timestep while the block is open.

    Low-level is the original size; crop, target size and aspect keep weight 1. LoRAs on the MLP count in both ends.

    Args:
        backbone: SDXL's UNet, PixArt with size conditions, CogView3-Plus or Hunyuan-DiT.
        gamma: the curve and clock.
        reference: the neutral size. PixArt has no target size; there it is the latent's size times ``pixels``.
        pixels: pixels of a latent cell.
        drop: (B,) bool, rows that have the neutral size at all times (the null control of a guidance batch).

    Example:
        >>> with ReferenceBlend(pipe.unet, GammaConfig(alpha=1.0)):
        ...     pipe(prompt, original_size=(256, 256)).images

    Raises:
        VitrineError: If the model has no size conditions; in a forward, if the call lacks them.
    """

    def __init__(
        self, backbone: nn.Module, gamma: GammaConfig, reference: Reference = "target", pixels: int = 8,
        drop: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(backbone)
        names = [k.__name__ for k in type(self.backbone).__mro__ if k.__name__ in INPUTS]
        if not names:
            kind = type(backbone).__name__
            raise refuse("model", kind, sorted(INPUTS), "models without size conditions have nothing to weight")
        if isinstance(reference, tuple) and (len(reference) != 2 or min(reference) < 1):
            raise refuse("reference", reference, "(height, width) in pixels", "give two sizes of 1 or more")
        if isinstance(reference, str) and reference not in ("target", "zeros"):
            raise refuse("reference", reference, "'target', 'zeros' or (height, width)", "target is the default")
        self.gamma, self.reference, self.pixels, self.drop = gamma, reference, pixels, drop
        self.family, self._input = names[0], INPUTS[names[0]](self.backbone)

    def _open(self) -> None:
        self._handles.append(self.backbone.get_submodule(self._input.path).register_forward_hook(self._blend))

    def _prepare(self, forward: Forward) -> tuple[torch.Tensor, tuple[int, int]]:
        if self.family == "UNet2DConditionModel":
            ids = (forward.arguments.get("added_cond_kwargs") or {}).get("time_ids")
            if ids is None or ids.shape[-1] != 6:
                shape = None if ids is None else tuple(ids.shape)
                raise refuse("time_ids", shape, "(B, 6)", "the refiner has no target size; use the base model")
        height, width = forward.sample.shape[-2:]
        weight = self.gamma.at(forward.t)
        if self.drop is not None:
            weight = weight.masked_fill(rows_for(self.drop, len(weight), "drop"), 0.0)
        return weight, (height * self.pixels, width * self.pixels)

    def _blend(self, module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        weight, asked = self._now
        if bool((weight == 1).all()):
            return output
        # forward, not a call: this hook must not run again
        reference = module.forward(self._changed(args[0], asked))
        return blend(output, reference, weight.repeat_interleave(len(output) // len(weight)))

    def _changed(self, full: torch.Tensor, asked: tuple[int, int]) -> torch.Tensor:
        if self.family != "PixArtTransformer2DModel":
            return reference_input(full, self._input.size, self._input.target, self.reference, self._input.embed)
        if self.reference == "zeros":
            return torch.zeros_like(full)
        sizes = torch.tensor(asked if self.reference == "target" else self.reference, device=full.device)
        return self._input.embed(sizes).to(full).repeat(len(full) // 2, 1)
