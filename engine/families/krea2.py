"""Krea 2: one sequence, text first; blocks gate the attention output and share key heads (GQA).

Site names as in ``z_image.py``. The text fusion before the blocks has no sites.

Facts (diffusers 0.42, ComfyUI 0.33):

- Time: s in both; both return eps - x0.
- Latents: those of Qwen-Image's VAE (16 channels, factor 8), packed (c, ph, pw) for diffusers; ComfyUI's samplers pass
  (B, 16, 1, h, w), the network takes 4 axes too.
- Text: Qwen3-VL-4B, 12 hidden states of 2560: (B, N, 12, 2560) in diffusers, (B, N, 30720) in ComfyUI.
- Shift: ComfyUI s' with e^mu, mu = 1.15; Krea2Pipeline's mu is linear in image tokens, 256 .. 6400 -> 0.5 .. 1.15,
  and 1.15 for distilled models.
- Positions: theta 1000, axes 32, 48, 48; text (0, 0, 0), image (0, y, x).
- Maps: a key head is shared by heads / key heads query heads; the sigmoid gate comes after the map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..network.attention import text_bias
from ..network.condition import Condition
from ..network.rotary_embedding import Rope, matrix_rope
from ..network.site import AdaLN, Site
from .family import Family, Inputs, Latent, Side, Tokens, per_channel, per_channel_unscaled, square
from .flux import rope
from .joint import JointBlock, joint_block
from .module_names import modules_of
from .packing import MASK, flow_time, grid_ids, masked, pack, text_of, unpack

WEIGHTS = {
    "transformer_blocks": "blocks",
    "attn.to_q": "attn.wq",
    "attn.to_k": "attn.wk",
    "attn.to_v": "attn.wv",
    "attn.to_gate": "attn.gate",
    "attn.to_out.0": "attn.wo",
    "attn.norm_q.weight": "attn.qknorm.qnorm.scale",
    "attn.norm_k.weight": "attn.qknorm.knorm.scale",
    "norm1.weight": "prenorm.scale",
    "norm2.weight": "postnorm.scale",
    "ff": "mlp",
    "scale_shift_table": "mod.lin",
    "img_in": "first",
    "text_fusion": "txtfusion",
    "txt_in.norm.weight": "txtmlp.0.scale",
    "txt_in.linear_1": "txtmlp.1",
    "txt_in.linear_2": "txtmlp.3",
    "time_embed.linear_1": "tmlp.0",
    "time_embed.linear_2": "tmlp.2",
    "time_mod_proj": "tproj.1",
    "final_layer.scale_shift_table": "last.modulation.lin",
    "final_layer.norm.weight": "last.norm.scale",
    "final_layer.linear": "last.linear",
}


def _rope(args: tuple, kwargs: dict[str, Any]) -> Rope:
    cos, sin = kwargs["image_rotary_emb"]
    return Rope(cos[:, ::2], sin[:, ::2])


def _adaln(path: str, table: str, weight: str) -> Callable[[str], AdaLN]:
    """One modulation for all blocks, to which each adds its table; scale comes before shift."""

    def of(block: str) -> AdaLN:
        added, norm = f"{block}.{table}", f"{block}.{weight}"
        return AdaLN(path, shift=1, scale=0, table=added, rms=True, weight=norm, above_one=True, eps=1e-5)

    return of


def diffusers_sites(net: Any) -> Iterator[Site]:
    """Krea2Transformer2DModel."""
    modules = JointBlock(
        [(f"attn.to_{x}", None) for x in "qkv"],
        ("attn.norm_q", "attn.norm_k"),
        "attn.to_out.0",
        "ff.down",
        "ff",
        int(net.config.num_attention_heads),
        "attn",
        _rope,
        norm="norm1",
        adaln=_adaln("time_mod_proj", "scale_shift_table", "norm1.weight"),
    )
    for b in range(len(net.transformer_blocks)):
        yield from joint_block(f"vit-block{b}", f"transformer_blocks.{b}", modules)


def comfyui_sites(net: Any) -> Iterator[Site]:
    """SingleStreamDiT."""
    modules = JointBlock(
        [(f"attn.w{x}", None) for x in "qkv"],
        ("attn.qknorm.qnorm", "attn.qknorm.knorm"),
        "attn.wo",
        "mlp.down",
        "mlp",
        int(net.heads),
        "attn",
        lambda a, k: matrix_rope(a[1]),
        norm="prenorm",
        adaln=_adaln("tproj.1", "mod.lin", "prenorm.scale"),
    )
    for b in range(len(net.blocks)):
        yield from joint_block(f"vit-block{b}", f"blocks.{b}", modules)


def diffusers_tokens(inputs: Inputs) -> Tokens:
    """Packed latents, with the position (_, row, column) of text tokens and then of image tokens."""
    x, text, ids = inputs(0, "hidden_states"), inputs(1, "encoder_hidden_states"), inputs(3, "position_ids")
    rows, columns = (0, 0) if inputs.known else inputs.sides(ids[text.shape[1] :, 1:])
    bias = text_bias(inputs(4, "encoder_attention_mask"))
    return Tokens(x.shape[0], inputs.known or (2 * rows, 2 * columns), 1, text.shape[1], bias=bias)


def call(net: Any, x: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
    """Krea2Transformer2DModel, with latents of 4 axes, or 5 with one frame."""
    text = text_of(cond)
    ids = grid_ids(x)
    ids = torch.cat([ids.new_zeros(text.shape[1], 3), ids])
    mask = cond.extra.get(MASK)
    return unpack(net(pack(x), text, flow_time(t), ids, None if mask is None else mask.bool()).sample, x)


def condition(pipe: Any, prompts: list[str], height: int, width: int) -> Condition:
    """Through Krea2Pipeline's own ``encode_prompt``."""
    return masked(*pipe.encode_prompt(prompts))


FAMILY = Family(
    "Krea 2",
    Side("Krea2Transformer2DModel", diffusers_sites, diffusers_tokens),
    Side("SingleStreamDiT", comfyui_sites),
    call,
    Latent(16, patch=2, frames=True, scaled=per_channel, unscaled=per_channel_unscaled),
    condition,
    WEIGHTS,
    trained=square(1024),
    guidance=("guidance_scale", 0.0),
    rope_readers={"Krea2RotaryPosEmbed": rope},
    modules=modules_of("krea2"),
)
