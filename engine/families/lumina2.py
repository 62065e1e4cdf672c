"""Lumina 2: Z-Image's layout with fewer key heads than query heads, no padding tokens, and text first.

Site names as in ``z_image.py``.

Facts (diffusers 0.42, ComfyUI 0.33):

- Order: text, then image, in both. diffusers removes padding, so the prompts of a batch must have one length.
- Time and sign: as Z-Image's.
- Text: Gemma-2-2B, the second-to-last state, 2304 wide.
- Shift: ComfyUI s' = 6 s / (1 + 5 s); Lumina2Pipeline's mu is linear in image tokens.
- Positions: theta 10000, axes 32, 32, 32; text (n, 0, 0), image (N, y, x); ComfyUI counts both from one more.
- Numbers: qk-norm's epsilon as in Z-Image; outputs differ by 9e-6 for that alone.
- LoRA: ComfyUI fuses q, k, v to one weight of 2304 + 768 + 768 rows; its own map of diffusers names cuts it in thirds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..errors import refuse
from ..network.condition import Condition
from ..network.rotary_embedding import complex_rope, matrix_rope
from ..network.site import Site
from .family import Family, Inputs, Latent, Side, Tokens, square
from .joint import JointBlock, joint_block, scale_alone
from .module_names import modules_of
from .packing import MASK, flow_time, masked, text_of

WEIGHTS = {
    "attn.to_q": "attention.qkv|0",
    "attn.to_k": "attention.qkv|-2",
    "attn.to_v": "attention.qkv|-1",
    "attn.norm_q": "attention.q_norm",
    "attn.norm_k": "attention.k_norm",
    "attn.to_out.0": "attention.out",
    "norm1.norm": "attention_norm1",
    "norm1.linear": "adaLN_modulation.1",
    "norm1": "attention_norm1",
    "norm2": "attention_norm2",
    "feed_forward.linear_1": "feed_forward.w1",
    "feed_forward.linear_2": "feed_forward.w2",
    "feed_forward.linear_3": "feed_forward.w3",
    "time_caption_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_caption_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_caption_embed.caption_embedder": "cap_embedder",
    "norm_out.linear_1": "final_layer.adaLN_modulation.1",
    "norm_out.linear_2": "final_layer.linear",
}


def diffusers_sites(net: Any) -> Iterator[Site]:
    """Lumina2Transformer2DModel."""
    modules = JointBlock(
        [(f"attn.to_{x}", None) for x in "qkv"],
        ("attn.norm_q", "attn.norm_k"),
        "attn.to_out.0",
        "feed_forward.linear_2",
        "feed_forward",
        int(net.config.num_attention_heads),
        "attn",
        lambda a, k: complex_rope(k["image_rotary_emb"]),
        norm="norm1.norm",
        adaln=scale_alone("norm1.norm", "norm1.linear"),
    )
    for b in range(len(net.layers)):
        yield from joint_block(f"vit-block{b}", f"layers.{b}", modules)


def comfyui_sites(net: Any) -> Iterator[Site]:
    """NextDiT."""
    for b, layer in enumerate(net.layers):
        heads, keys, size = (int(getattr(layer.attention, n)) for n in ("n_local_heads", "n_kv_heads", "head_dim"))
        query, key = heads * size, keys * size
        slices = (0, query), (query, key), (query + key, key)
        modules = JointBlock(
            [("attention.qkv", columns) for columns in slices],
            ("attention.q_norm", "attention.k_norm"),
            "attention.out",
            "feed_forward.w2",
            "feed_forward",
            heads,
            "attention",
            lambda a, k: matrix_rope(a[2]),
            norm="attention_norm1",
            adaln=scale_alone("attention_norm1", "adaLN_modulation.1"),
        )
        yield from joint_block(f"vit-block{b}", f"layers.{b}", modules)


def diffusers_tokens(inputs: Inputs) -> Tokens:
    """Latents (B, C, h, w) and a mask of the text; padding is removed inside."""
    x, mask = inputs(0, "hidden_states"), inputs(3, "encoder_attention_mask")
    lengths = set(mask.sum(1).tolist())
    if len(lengths) > 1:
        shown = f"prompts of {sorted(lengths)} tokens in one batch"
        raise refuse("condition", shown, "one length", "tap images with prompts of unequal length one by one")
    return Tokens(x.shape[0], (x.shape[-2], x.shape[-1]), 1, int(lengths.pop()))


def call(net: Any, x: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
    """Lumina2Transformer2DModel; its sign and its time are reversed."""
    text = text_of(cond)
    mask = cond.extra.get(MASK)
    mask = torch.ones(text.shape[:2], device=x.device, dtype=torch.long) if mask is None else mask
    return -net(x, 1 - flow_time(t), text, mask).sample


def condition(pipe: Any, prompts: list[str], height: int, width: int) -> Condition:
    """Through Lumina2Pipeline's own ``encode_prompt``."""
    text, mask = pipe.encode_prompt(prompts, do_classifier_free_guidance=False)[:2]
    return masked(text, mask)


FAMILY = Family(
    "Lumina 2",
    Side("Lumina2Transformer2DModel", diffusers_sites, diffusers_tokens),
    Side("NextDiT", comfyui_sites, fits=lambda net: net.pad_tokens_multiple is None),
    call,
    Latent(16, patch=2),
    condition,
    WEIGHTS,
    trained=square(1024),
    time_input="1 - s",
    rope_tables={"Lumina2RotaryPosEmbed": "axes_dim"},
    modules=modules_of("lumina2"),
)
