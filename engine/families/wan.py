"""Wan 2.1 and 2.2: video, with self-attention over all frames and cross-attention to the text.

Site names are ``vit-block{b}-...``; q, k, v are read before qk-norm and rotary embedding. Image sites are
(B, C, h, w) for one frame and (B, C, T, h, w) for T.

Facts (diffusers 0.42, ComfyUI 0.33):

- Time: 1000 s in both; both return eps - x0. Wan 2.2 14B has two networks, ``transformer`` for the noisier steps.
- Latents: (B, 16, T, h, w), factor 8, four frames in one; Wan 2.2 5B 48 channels, factor 16.
- Text: UMT5-XXL, 4096 wide, 512 tokens filled with zeros and not masked.
- Shift: ComfyUI s' = 8 s / (1 + 7 s); WanPipeline's scheduler has its own (3 for 480p, 5 for 720p).
- Positions: theta 10000, axes (t, h, w) = 44, 42, 42 of 128, self-attention only; qk-norm over all heads together.
- Numbers: the timestep's sinusoids are rounded differently: 4e-6 at t = 300, 5e-7 at 20.
- LoRA: ComfyUI reads its own names only. norm2 and norm3 exchange names between the libraries.
- Image conditioning (i2v) has separate keys and values, which are not sites.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..network.condition import Condition
from ..network.rotary_embedding import Rope, doubled, matrix_rope
from ..network.site import AdaLN, Site
from .cross import CrossBlock, cross_block
from .facts import Turn
from .family import Family, Latent, Side, per_channel, per_channel_unscaled
from .module_names import modules_of
from .packing import text_length, text_of, video_ids

WEIGHTS = {
    "attn1": "self_attn",
    "attn2": "cross_attn",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "o",
    "add_k_proj": "k_img",
    "add_v_proj": "v_img",
    "norm_added_k": "norm_k_img",
    "norm2": "norm3",
    "norm3": "norm2",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    "blocks.*.scale_shift_table": "blocks.*.modulation",
    "scale_shift_table": "head.modulation",
    "proj_out": "head.head",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
}


def _diffusers_rope(args: tuple, kwargs: dict[str, Any]) -> Rope:
    cos, sin = args[3]
    return Rope(cos[0, :, 0, ::2], sin[0, :, 0, 1::2])


def _comfyui_rope(args: tuple, kwargs: dict[str, Any]) -> Rope:
    return matrix_rope(args[1])


def diffusers_sites(net: Any) -> Iterator[Site]:
    """WanTransformer3DModel."""
    for b, block in enumerate(net.blocks):
        modules = CrossBlock(
            ("attn1", "attn2"), ("to_q", "to_k", "to_v"), ("norm_q", "norm_k"), "to_out.0", "ffn", "ffn.net.2",
            int(block.attn1.heads), _diffusers_rope, True, net.config.patch_size[-1], norm="norm1",
            adaln=lambda path: AdaLN("condition_embedder.time_proj", table=f"{path}.scale_shift_table"),
        )  # fmt: skip
        yield from cross_block(f"vit-block{b}", f"blocks.{b}", modules)


def comfyui_sites(net: Any) -> Iterator[Site]:
    """WanModel."""
    for b in range(len(net.blocks)):
        modules = CrossBlock(
            ("self_attn", "cross_attn"), ("q", "k", "v"), ("norm_q", "norm_k"), "o", "ffn", "ffn.2",
            int(net.num_heads), _comfyui_rope, True, int(net.patch_size[-1]), norm="norm1",
            adaln=lambda path: AdaLN("time_projection.1", table=f"{path}.modulation"),
        )  # fmt: skip
        yield from cross_block(f"vit-block{b}", f"blocks.{b}", modules)


def call(net: Any, x: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
    """WanTransformer3DModel, with latents of 5 axes, or 4 for one frame."""
    video = x if x.ndim == 5 else x[:, :, None]
    return net(video, t, text_of(cond), cond.extra.get("encoder_hidden_states_image")).sample.reshape(x.shape)


def condition(pipe: Any, prompts: list[str], height: int, width: int) -> Condition:
    """Through WanPipeline's own ``encode_prompt``."""
    length = text_length(pipe.text_encoder, 512)
    return Condition(pipe.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=length)[0])


def unsupported_reason(net: Any) -> tuple[str, str] | None:
    """ComfyUI's variants of Wan have further streams; its Wan class and subclasses elsewhere do not."""
    kind = type(net)
    if kind.__module__.startswith("comfy.") and kind.__name__ != "WanModel":
        return f"{kind.__name__}, a variant of Wan", "it has no layout here yet; use Wan itself"
    return None


def trained(net: Any) -> tuple[int, int]:
    """480p, which every size of Wan 2.1 and 2.2 supports; 704p for Wan 2.2 5B, whose latents have 48 channels."""
    return (1280, 704) if net.patch_embedding.in_channels == 48 else (832, 480)


def rope(part: Any, named: Mapping[str, Any], turn: Turn) -> Any:
    """WanRotaryPosEmbed, which does not store its base."""
    ids, dims = video_ids(part, named["hidden_states"]), [part.t_dim, part.h_dim, part.w_dim]
    cosines, sines = doubled(*turn(ids, dims, 10000.0))
    return cosines[None, :, None], sines[None, :, None]


FAMILY = Family(
    "Wan",
    Side("WanTransformer3DModel", diffusers_sites),
    Side("WanModel", comfyui_sites),
    call,
    Latent(16, patch=2, frames=True, scaled=per_channel, unscaled=per_channel_unscaled),
    condition,
    WEIGHTS,
    unsupported_reason,
    trained,
    time_input="1000 s",
    rope_readers={"WanRotaryPosEmbed": rope},
    modules=modules_of("wan"),
)
