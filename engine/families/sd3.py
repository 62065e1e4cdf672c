"""SD3 and SD3.5 (MMDiT): joint attention over text and image tokens in every block.

Site names are ``vit-block{b}-...``; q, k, v are read before qk-norm. Joint attention has one map per block,
``vit-block{b}-map``: image tokens as queries, text and then image tokens as keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..network.condition import Condition
from ..network.site import AdaLN, MapSite, ModuleSite, Site
from .facts import Published, TimeEmbedding
from .family import Family, Latent, Side, square
from .joint import QKV, block_input, fused_attention, fused_stream, part, split_attention, split_stream
from .module_names import modules_of
from .packing import text_length

WEIGHTS = {
    "transformer_blocks": "joint_blocks",
    "attn.to_q": "x_block.attn.qkv|0",
    "attn.to_k": "x_block.attn.qkv|1",
    "attn.to_v": "x_block.attn.qkv|2",
    "attn.norm_q": "x_block.attn.ln_q",
    "attn.norm_k": "x_block.attn.ln_k",
    "attn.to_out.0": "x_block.attn.proj",
    "attn.add_q_proj": "context_block.attn.qkv|0",
    "attn.add_k_proj": "context_block.attn.qkv|1",
    "attn.add_v_proj": "context_block.attn.qkv|2",
    "attn.norm_added_q": "context_block.attn.ln_q",
    "attn.norm_added_k": "context_block.attn.ln_k",
    "attn.to_add_out": "context_block.attn.proj",
    "attn2.to_q": "x_block.attn2.qkv|0",
    "attn2.to_k": "x_block.attn2.qkv|1",
    "attn2.to_v": "x_block.attn2.qkv|2",
    "attn2.norm_q": "x_block.attn2.ln_q",
    "attn2.norm_k": "x_block.attn2.ln_k",
    "attn2.to_out.0": "x_block.attn2.proj",
    "norm1.linear": "x_block.adaLN_modulation.1",
    "norm1_context.linear": "context_block.adaLN_modulation.1|swap pair",  # the last block has no gates
    "ff.net.0.proj": "x_block.mlp.fc1",
    "ff.net.2": "x_block.mlp.fc2",
    "ff_context.net.0.proj": "context_block.mlp.fc1",
    "ff_context.net.2": "context_block.mlp.fc2",
    "pos_embed.proj": "x_embedder.proj",
    "pos_embed.pos_embed": "pos_embed",
    "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
    "norm_out.linear": "final_layer.adaLN_modulation.1|swap",
    "proj_out": "final_layer.linear",
}


def diffusers_sites(net: Any) -> Iterator[Site]:
    """SD3Transformer2DModel, with SD3.5-medium's second self-attention in blocks that have it."""
    image: dict[str, Any] = {"kind": "tokens", "grid": "", "patch": net.config.patch_size}
    for b, block in enumerate(net.transformer_blocks):
        name, path = f"vit-block{b}", f"transformer_blocks.{b}"
        parts = 6 if getattr(block, "attn2", None) is None else 9
        yield block_input(name, f"{path}.norm1.norm", AdaLN(f"{path}.norm1.linear", parts=parts), **image)
        yield from split_attention(net, name, f"{path}.attn", image)
        if getattr(block, "attn2", None) is not None:
            for x in QKV:
                yield ModuleSite(f"{name}-attn2-{x}", f"{path}.attn2.to_{x}", **image)
            alone: dict[str, Any] = {
                "streams": (split_stream(net, f"{path}.attn2", False),),
                "heads": block.attn2.heads,
            }
            yield MapSite(f"{name}-attn2-map", f"{path}.attn2", key=f"{path}.attn2.to_k", **alone)
        yield ModuleSite(f"{name}-ffn-inner", f"{path}.ff.net.0", **image)
        yield ModuleSite(f"{name}-ffn-out", f"{path}.ff", **image)
        yield ModuleSite(f"{name}-out", path, element=1, **image)


def comfyui_sites(net: Any) -> Iterator[Site]:
    """MMDiT: hooks on ``x_block`` itself never fire, its children's do."""
    image: dict[str, Any] = {"kind": "tokens", "grid": "", "patch": int(net.patch_size)}
    for b, block in enumerate(net.joint_blocks):
        name, path = f"vit-block{b}", f"joint_blocks.{b}"
        parts = 6 if getattr(block.x_block, "attn2", None) is None else 9
        adaln = AdaLN(f"{path}.x_block.adaLN_modulation", parts=parts)
        yield block_input(name, f"{path}.x_block.norm1", adaln, **image)
        attentions, norms = (f"{path}.x_block.attn", f"{path}.context_block.attn"), ("ln_q", "ln_k")
        joint: dict[str, Any] = {"last": f"{attentions[0]}.qkv", "heads": int(block.x_block.attn.num_heads)}
        yield from fused_attention(net, name, path, attentions, norms, image, **joint)
        if getattr(block.x_block, "attn2", None) is not None:
            for i, x in enumerate(QKV):
                yield ModuleSite(
                    f"{name}-attn2-{x}",
                    f"{path}.x_block.attn2.qkv",
                    columns=part(net, f"{path}.x_block.attn2.qkv", i, 3),
                    **image,
                )
            alone: dict[str, Any] = {"streams": (fused_stream(net, f"{path}.x_block.attn2", norms),)}
            alone["heads"] = int(block.x_block.attn2.num_heads)
            yield MapSite(f"{name}-attn2-map", path, key=f"{path}.x_block.attn2.qkv", **alone)
        yield ModuleSite(f"{name}-ffn-inner", f"{path}.x_block.mlp.act", **image)
        yield ModuleSite(f"{name}-ffn-out", f"{path}.x_block.mlp", **image)
        yield ModuleSite(f"{name}-out", path, element=1, **image)


def call(net: Any, x: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
    """SD3Transformer2DModel: timesteps in [0, 1000], pooled text in addition to the states."""
    return net(hidden_states=x, timestep=t, encoder_hidden_states=cond.text, pooled_projections=cond.pooled).sample


def condition(pipe: Any, prompts: list[str], height: int, width: int) -> Condition:
    """Through StableDiffusion3Pipeline's own ``encode_prompt``."""
    how = {"do_classifier_free_guidance": False, "max_sequence_length": text_length(pipe.text_encoder_3, 256)}
    text, _, pooled, _ = pipe.encode_prompt(prompts, None, None, **how)
    return Condition(text, pooled)


FAMILY = Family(
    "SD3",
    Side(
        "SD3Transformer2DModel",
        diffusers_sites,
        time=TimeEmbedding(lambda net: net.inner_dim, lambda net: ["time_text_embed"]),
    ),
    Side(
        "OpenAISignatureMMDITWrapper",
        comfyui_sites,
        time=TimeEmbedding(lambda net: net.t_embedder.mlp[2].out_features, lambda net: ["t_embedder"]),
    ),
    call,
    Latent(16, patch=2),
    condition,
    WEIGHTS,
    trained=square(1024),
    time_input="1000 s",
    stacked=True,
    published=(
        Published("Stable Diffusion 3 / 3.5 medium", width=1536),
        Published("Stable Diffusion 3.5 large", width=2432),
    ),
    modules=modules_of("sd3"),
    blocks={"transformer_blocks": (24, 38), "joint_blocks": (24, 38)},
)
