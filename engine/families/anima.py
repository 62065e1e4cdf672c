"""Anima, on the network of Cosmos-Predict2: self-attention, then cross-attention to 512 text tokens.

Site names as in ``wan.py``. The text conditioner (ComfyUI's ``llm_adapter``) has no sites.

Facts (diffusers 0.42, ComfyUI 0.33):

- Time: s in both; both return eps - x0. Latents: those of Qwen-Image's VAE, (B, 16, 1, h, w) in both; the network pads
  them with a mask channel of zeros, which diffusers resizes by torchvision.
- Text: Qwen3-0.6B and T5's token ids through a conditioner, 1024 wide, 512 tokens filled with zeros and not masked.
- Shift: ComfyUI s' = 3 s / (1 + 2 s); diffusers has modular blocks but no pipeline class.
- Positions: axes (t, h, w) = 44, 42, 42 of 128, theta 10000 stretched by the NTK rule (h, w 4, t 1), the halves of a
  head are rotated together, self-attention only.
- Numbers: qk-norm's epsilon is 1e-5 in diffusers and 1e-6 in ComfyUI; outputs differ by 3e-6 for that alone.
- LoRA: ComfyUI reads its own names only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..network.condition import Condition
from ..network.rotary_embedding import Rope, matrix_rope
from ..network.site import AdaLN, Site
from .cross import CrossBlock, cross_block
from .facts import Refusal, Turn
from .family import Family, Latent, Side, per_channel, per_channel_unscaled, square
from .module_names import modules_of
from .packing import flow_time, text_of, video_ids

WEIGHTS = {
    "transformer_blocks": "blocks",
    "attn1": "self_attn",
    "attn2": "cross_attn",
    "to_q": "q_proj",
    "to_k": "k_proj",
    "to_v": "v_proj",
    "to_out.0": "output_proj",
    "norm_q": "q_norm",
    "norm_k": "k_norm",
    "norm1.linear_1": "adaln_modulation_self_attn.1",
    "norm1.linear_2": "adaln_modulation_self_attn.2",
    "norm2.linear_1": "adaln_modulation_cross_attn.1",
    "norm2.linear_2": "adaln_modulation_cross_attn.2",
    "norm3.linear_1": "adaln_modulation_mlp.1",
    "norm3.linear_2": "adaln_modulation_mlp.2",
    "ff.net.0.proj": "mlp.layer1",
    "ff.net.2": "mlp.layer2",
    "time_embed.t_embedder": "t_embedder.1",
    "time_embed.norm": "t_embedding_norm",
    "patch_embed.proj": "x_embedder.proj.1",
    "norm_out.linear_1": "final_layer.adaln_modulation.1",
    "norm_out.linear_2": "final_layer.adaln_modulation.2",
    "proj_out": "final_layer.linear",
}


def _diffusers_rope(args: tuple, kwargs: dict[str, Any]) -> Rope:
    cos, sin = kwargs["image_rotary_emb"]
    half = cos.shape[-1] // 2
    return Rope(cos[:, :half], sin[:, :half], halves=True)


def _comfyui_rope(args: tuple, kwargs: dict[str, Any]) -> Rope:
    return matrix_rope(kwargs["rope_emb"])._replace(halves=True)


def diffusers_sites(net: Any) -> Iterator[Site]:
    """CosmosTransformer3DModel."""
    for b, block in enumerate(net.transformer_blocks):
        modules = CrossBlock(
            ("attn1", "attn2"),
            ("to_q", "to_k", "to_v"),
            ("norm_q", "norm_k"),
            "to_out.0",
            "ff",
            "ff.net.2",
            int(block.attn1.heads),
            _diffusers_rope,
            patch=net.config.patch_size[-1],
            norm="norm1.norm",
            adaln=lambda path: AdaLN(f"{path}.norm1.linear_2", parts=3, plus="time_embed.t_embedder"),
        )
        yield from cross_block(f"vit-block{b}", f"transformer_blocks.{b}", modules)


def comfyui_sites(net: Any) -> Iterator[Site]:
    """MiniTrainDIT, whose blocks never flatten their grid."""
    for b, block in enumerate(net.blocks):
        modules = CrossBlock(
            ("self_attn", "cross_attn"),
            ("q_proj", "k_proj", "v_proj"),
            ("q_norm", "k_norm"),
            "output_proj",
            "mlp",
            "mlp.layer2",
            int(block.self_attn.n_heads),
            _comfyui_rope,
            patch=int(net.patch_spatial),
            norm="layer_norm_self_attn",
            adaln=lambda path: AdaLN(f"{path}.adaln_modulation_self_attn.2", parts=3, plus="t_embedder.1"),
        )
        yield from cross_block(f"vit-block{b}", f"blocks.{b}", modules)


def call(net: Any, x: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
    """CosmosTransformer3DModel, with latents of 5 axes, or 4 for one frame."""
    video = x if x.ndim == 5 else x[:, :, None]
    nothing = torch.zeros(1, 1, *x.shape[-2:], device=x.device, dtype=x.dtype)
    return net(video, flow_time(t), text_of(cond), padding_mask=nothing).sample.reshape(x.shape)


def unsupported_reason(net: Any) -> tuple[str, str] | None:
    """The network's class is also used by models with other positions or inputs."""
    config = getattr(net, "config", {})
    if config.get("extra_pos_embed_type") or config.get("img_context_dim_in") or config.get("use_crossattn_projection"):
        return "another model of this network's class (Cosmos)", "it has no layout here yet"
    if getattr(net, "extra_per_block_abs_pos_emb", False):
        return "Cosmos-Predict2 for video", "it has no layout here yet"
    return None


def rope(part: Any, named: Mapping[str, Any], turn: Turn) -> Any:
    """CosmosRotaryPosEmbed: the bases are scaled by the NTK rule, and the halves of a head are rotated together."""
    ids, dims = video_ids(part, named["hidden_states"]), [part.dim_t, part.dim_h, part.dim_w]
    if named.get("fps") is not None:
        ids[:, 0] *= part.base_fps / named["fps"]
    thetas = [10000.0 * factor for factor in (part.t_ntk_factor, part.h_ntk_factor, part.w_ntk_factor)]
    angles, factor = turn(ids, dims, thetas)
    angles = torch.cat([angles, angles], -1)
    return (factor * angles.cos()).float(), (factor * angles.sin()).float()


_NO_GRADIENTS = Refusal(
    "whose positions core computes by a kernel that has no derivative",
    "a network that core can differentiate",
    "leave out what needs gradients (attack_steps 0), or do it in diffusers",
)

FAMILY = Family(
    "Anima",
    Side("CosmosTransformer3DModel", diffusers_sites),
    Side("MiniTrainDIT", comfyui_sites, refuses={"gradients": _NO_GRADIENTS}),
    call,
    Latent(16, patch=2, frames=True, scaled=per_channel, unscaled=per_channel_unscaled),
    weights=WEIGHTS,
    unsupported_reason=unsupported_reason,
    trained=square(1024),
    rope_readers={"CosmosRotaryPosEmbed": rope},
    modules=modules_of("anima"),
)
