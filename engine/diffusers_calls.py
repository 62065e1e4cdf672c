"""How each diffusers backbone is called, as one function (x_t, t, Condition) -> output. Imports no diffusers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .denoiser import Condition
from .errors import refuse


def call_of(backbone: Any) -> Callable[[torch.Tensor, torch.Tensor, Condition], torch.Tensor]:
    """The bare call of a UNet2DConditionModel, PixArt, SD3 or Flux transformer.

    Raises:
        VitrineError: another class.
    """
    calls = {
        "UNet2DConditionModel": _unet,
        "PixArtTransformer2DModel": _pixart,
        "SD3Transformer2DModel": _sd3,
        "FluxTransformer2DModel": _flux,
    }
    make = calls.get(type(backbone).__name__)
    if make is None:
        raise refuse("backbone", type(backbone).__name__, sorted(calls), "pass a pipeline of one of these families")
    return lambda x, t, cond: make(backbone, x, t, cond)


def _unet(net: Any, x: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
    added = None
    if getattr(net.config, "addition_embed_type", None) == "text_time":
        added = {"text_embeds": cond.pooled, "time_ids": cond.extra["time_ids"]}
    return net(x, t, encoder_hidden_states=cond.text, added_cond_kwargs=added).sample


def _pixart(net: Any, x: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
    size = {k: cond.extra[k] for k in ("resolution", "aspect_ratio") if k in cond.extra}
    added: dict[str, Any] = {"resolution": None, "aspect_ratio": None} | size
    mask = cond.extra.get("encoder_attention_mask")
    told = {"encoder_hidden_states": cond.text, "encoder_attention_mask": mask, "added_cond_kwargs": added}
    return net(x, timestep=t, **told).sample[:, : x.shape[1]]  # the rest is a learned variance


def _sd3(net: Any, x: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
    return net(hidden_states=x, timestep=t, encoder_hidden_states=cond.text, pooled_projections=cond.pooled).sample


def _flux(net: Any, x: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
    """Flux works on 2 x 2 patches in row-major order and takes the time in [0, 1]."""
    if cond.text is None:
        raise refuse("condition", "no text", "Condition(text=(B, T, C), pooled=(B, D))", "encode the prompt first")
    b, c, h, w = x.shape
    packed = x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, 4 * c)
    ids = torch.zeros(h // 2, w // 2, 3, device=x.device)
    ids[..., 1], ids[..., 2] = torch.arange(h // 2)[:, None], torch.arange(w // 2)[None]
    out = net(
        hidden_states=packed,
        encoder_hidden_states=cond.text,
        pooled_projections=cond.pooled,
        timestep=t / 1000,
        img_ids=ids.view(-1, 3),
        txt_ids=torch.zeros(cond.text.shape[1], 3, device=x.device),
        guidance=cond.extra.get("guidance"),
    ).sample
    return out.view(b, h // 2, w // 2, c, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(b, c, h, w)
