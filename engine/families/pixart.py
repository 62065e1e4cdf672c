"""PixArt: self- and cross-attention over patches, the timestep through adaLN-single.

Site names are ``vit-block{b}-...``; q, k, v are read before any norm. Slices are on the last axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..errors import refuse
from ..network.condition import Condition
from ..network.site import AdaLN, MapSite, ModuleSite, Site
from .facts import Published, SizeInput, TimeEmbedding
from .family import Family, Latent, Side, square
from .joint import QKV, block_input, part
from .module_names import modules_of
from .packing import text_length


def _map(address: str, path: str, query: str, key: str, **more: Any) -> MapSite:
    return MapSite(address, path, query=f"{path}.{query}", key=f"{path}.{key}", **more)


def diffusers_sites(net: Any) -> Iterator[Site]:
    """PixArtTransformer2DModel."""
    image: dict[str, Any] = {"kind": "tokens", "grid": "", "patch": net.config.patch_size}
    for b, block in enumerate(net.transformer_blocks):
        name, path = f"vit-block{b}", f"transformer_blocks.{b}"
        adaln = AdaLN("adaln_single.linear", table=f"{path}.scale_shift_table")
        yield block_input(name, f"{path}.norm1", adaln, **image)
        for x in QKV:
            yield ModuleSite(f"{name}-self-{x}", f"{path}.attn1.to_{x}", **image)
        yield _map(f"{name}-self-map", f"{path}.attn1", "to_q", "to_k", heads=block.attn1.heads)
        yield ModuleSite(f"{name}-self-out", f"{path}.attn1.to_out.0", **image)
        yield ModuleSite(f"{name}-cross-q", f"{path}.attn2.to_q", **image)
        for x in ("k", "v"):
            yield ModuleSite(f"{name}-cross-{x}", f"{path}.attn2.to_{x}", "text")
        yield _map(f"{name}-cross-map", f"{path}.attn2", "to_q", "to_k", heads=block.attn2.heads, text_keys=True)
        yield ModuleSite(f"{name}-cross-out", f"{path}.attn2.to_out.0", **image)
        yield ModuleSite(f"{name}-ffn-inner", f"{path}.ff.net.0", **image)
        yield ModuleSite(f"{name}-ffn-out", f"{path}.ff", **image)
        yield ModuleSite(f"{name}-out", path, **image)


def comfyui_sites(net: Any) -> Iterator[Site]:
    """PixArt / PixArtMS: fused qkv and kv; the cross-attention folds the batch into one row."""
    image: dict[str, Any] = {"kind": "tokens", "grid": "", "patch": int(net.patch_size)}
    for b, block in enumerate(net.blocks):
        name, path, heads = f"vit-block{b}", f"blocks.{b}", int(block.attn.num_heads)
        yield block_input(name, f"{path}.norm1", AdaLN("t_block", table=f"{path}.scale_shift_table"), **image)
        for i, x in enumerate(QKV):
            yield ModuleSite(
                f"{name}-self-{x}", f"{path}.attn.qkv", columns=part(net, f"{path}.attn.qkv", i, 3), **image
            )
        query, key = (part(net, f"{path}.attn.qkv", i, 3) for i in (0, 1))
        fused: dict[str, Any] = {"columns": query, "key_columns": key}
        yield _map(f"{name}-self-map", f"{path}.attn", "qkv", "qkv", heads=heads, **fused)
        yield ModuleSite(f"{name}-self-out", f"{path}.attn.proj", **image)
        yield ModuleSite(f"{name}-cross-q", f"{path}.cross_attn.q_linear", flat_batch=True, **image)
        for i, x in enumerate(("k", "v")):
            columns = part(net, f"{path}.cross_attn.kv_linear", i, 2)
            yield ModuleSite(
                f"{name}-cross-{x}", f"{path}.cross_attn.kv_linear", "text", columns=columns, flat_batch=True
            )
        key = part(net, f"{path}.cross_attn.kv_linear", 0, 2)
        packed: dict[str, Any] = {"key_columns": key, "flat_batch": True, "text_keys": True}
        yield _map(f"{name}-cross-map", f"{path}.cross_attn", "q_linear", "kv_linear", heads=heads, **packed)
        yield ModuleSite(f"{name}-cross-out", f"{path}.cross_attn.proj", **image)
        yield ModuleSite(f"{name}-ffn-inner", f"{path}.mlp.act", **image)
        yield ModuleSite(f"{name}-ffn-out", f"{path}.mlp", **image)
        yield ModuleSite(f"{name}-out", path, **image)


def call(net: Any, x: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
    """PixArtTransformer2DModel; its learned variance is dropped."""
    size = {k: cond.extra[k] for k in ("resolution", "aspect_ratio") if k in cond.extra}
    added: dict[str, Any] = {"resolution": None, "aspect_ratio": None} | size
    mask = cond.extra.get("encoder_attention_mask")
    inputs = {"encoder_hidden_states": cond.text, "encoder_attention_mask": mask, "added_cond_kwargs": added}
    return net(x, timestep=t, **inputs).sample[:, : x.shape[1]]  # what follows is a learned variance


def condition(pipe: Any, prompts: list[str], height: int, width: int) -> Condition:
    """Through PixArt's own ``encode_prompt``; models with size conditioning get this size."""
    length = text_length(pipe.text_encoder, 120)
    text, mask, *_ = pipe.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=length)
    extra = {"encoder_attention_mask": mask}
    if pipe.transformer.use_additional_conditions:
        extra["resolution"] = torch.tensor([[float(height), float(width)]]).repeat(len(text), 1)
        extra["aspect_ratio"] = torch.tensor([[height / width]]).repeat(len(text), 1)
    return Condition(text, None, extra)


def sizes(net: Any) -> SizeInput:
    """One embedder takes height and width as batch rows."""
    emb = net.adaln_single.emb
    if not emb.use_additional_conditions:
        raise refuse("use_additional_conditions", False, "True", "this PixArt was trained without size conditioning")
    return SizeInput("adaln_single.emb.resolution_embedder", emb.additional_condition_proj)


def comfyui_sizes(model: Any) -> SizeInput | None:
    """The embedder of height and width, whose module also computes the sinusoids."""
    net = model.diffusion_model
    return SizeInput("csize_embedder", net.csize_embedder) if net.micro_conditioning else None


def grid_scale(net: Any, latents: int) -> float:
    """The value of its config, else derived from the network's sample size."""
    scale = net.config.get("interpolation_scale")
    return float(scale) if scale is not None else float(max(latents // 64, 1))


FAMILY = Family(
    "PixArt",
    Side(
        "PixArtTransformer2DModel",
        diffusers_sites,
        sizes=sizes,
        time=TimeEmbedding(lambda net: net.inner_dim, lambda net: ["adaln_single.emb"]),
    ),
    Side(
        "PixArtMS",
        comfyui_sites,
        sizes=comfyui_sizes,
        time=TimeEmbedding(lambda net: net.hidden_size, lambda net: ["t_embedder"]),
    ),
    call,
    Latent(patch=2),
    condition,
    trained=square(1024),
    time_input="timestep",
    grid_scale=grid_scale,
    lora_paths=r"^transformer_blocks\..*\.attn2\.",
    published=(Published("PixArt", width=1152, sized=True),),
    modules=modules_of("pixart"),
)
