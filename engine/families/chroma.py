"""Chroma: Flux.1's blocks, with all modulations from one small network.

Site names as in ``flux.py``.

Facts (diffusers 0.42, ComfyUI 0.33):

- Time: s in both; both return eps - x0. ComfyUI's network takes a guidance, which is 0.
- Latents: 16 channels, factor 8, packed (c, ph, pw) for diffusers.
- Text: T5-XXL, 4096 wide. ChromaPipeline means to mask padding except the first token, over text and image, but adds
  its 0/1 mask to the scores, which masks nothing. Here padding is masked; ComfyUI removes it.
- Shift: ComfyUI s' with e^mu, mu = 1.15. Positions: as Flux.1's.
"""

from __future__ import annotations

from typing import Any

import torch

from ..network.attention import text_bias
from ..network.condition import Condition
from . import flux
from .family import Family, Inputs, Latent, Side, Tokens, square
from .module_names import modules_of
from .packing import MASK, flow_time, grid_ids, masked, pack, text_length, text_of, unpack

WEIGHTS = flux.WEIGHTS | {
    "distilled_guidance_layer.layers.*.linear_1": "distilled_guidance_layer.layers.*.in_layer",
    "distilled_guidance_layer.layers.*.linear_2": "distilled_guidance_layer.layers.*.out_layer",
}


def diffusers_tokens(inputs: Inputs) -> Tokens:
    """Packed latents with the position (_, row, column) of each token, and a mask over text and image."""
    x, text, ids = inputs(0, "hidden_states"), inputs(1, "encoder_hidden_states"), inputs(3, "img_ids")
    rows, columns = (0, 0) if inputs.known else inputs.sides(ids.reshape(-1, 3)[:, 1:])
    mask, count = inputs(5, "attention_mask"), text.shape[1]
    bias = None if mask is None else text_bias(mask[:, :count])
    return Tokens(x.shape[0], inputs.known or (2 * rows, 2 * columns), 1, count, bias=bias)


def comfyui_tokens(inputs: Inputs) -> Tokens:
    """Latents (B, C, h, w) and text (B, N, C); core gives no mask."""
    x, text = inputs(0, "x"), inputs(2, "context")
    return Tokens(x.shape[0], (x.shape[-2], x.shape[-1]), 1, text.shape[1])


def call(net: Any, x: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
    """ChromaTransformer2DModel."""
    text, mask = text_of(cond), cond.extra.get(MASK)
    if mask is not None:
        mask = torch.nn.functional.pad(mask.bool(), (0, x.shape[-2] * x.shape[-1] // 4), value=True)
    text_ids = torch.zeros(text.shape[1], 3, device=x.device)
    return unpack(net(pack(x), text, flow_time(t), grid_ids(x), text_ids, mask).sample, x)


def condition(pipe: Any, prompts: list[str], height: int, width: int) -> Condition:
    """Through ChromaPipeline's own ``encode_prompt``."""
    length = text_length(pipe.text_encoder, 512)
    text, _, mask, *_ = pipe.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=length)
    return masked(text, mask)


def unsupported_reason(net: Any) -> tuple[str, str] | None:
    """Chroma Radiance has Chroma's class but works on pixels."""
    if any(kind.__name__ == "ChromaRadiance" for kind in type(net).__mro__):
        return "Chroma Radiance", "it works on pixels and has no layout here yet"
    return None


FAMILY = Family(
    "Chroma",
    Side("ChromaTransformer2DModel", flux.diffusers_sites, diffusers_tokens),
    Side("Chroma", flux.comfyui_sites, comfyui_tokens),
    call,
    Latent(16, patch=2),
    condition,
    WEIGHTS,
    unsupported_reason,
    trained=square(1024),
    modules=modules_of("chroma"),
    blocks={
        "transformer_blocks": (19,),
        "single_transformer_blocks": (38,),
        "double_blocks": (19,),
        "single_blocks": (38,),
    },
)
