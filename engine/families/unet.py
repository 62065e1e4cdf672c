"""UNets of SD1.x, SD2.x, SDXL and their variants: any number of levels, resnets and transformer blocks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors import refuse
from ..network.condition import Condition
from ..network.site import MapSite, ModuleSite, Site
from ..runtime.compat_diffusers import is_fused
from ..runtime.compat_torch import modules_in
from .facts import Published, SizeInput, TimeEmbedding
from .family import Family, Side
from .module_names import modules_of


def diffusers_sites(net: Any) -> Iterator[Site]:
    """UNet2DConditionModel: {down,up}_blocks.l.resnets.r, .attentions.r, .downsamplers.0 / .upsamplers.0."""
    yield ModuleSite("unet-in", "conv_in", before=True)
    yield ModuleSite("unet-after-conv-in", "conv_in")
    for level, block in enumerate(net.down_blocks):
        yield from _diffusers_level("down", level, block, f"down_blocks.{level}")
    yield from _diffusers_middle(net.mid_block)
    for level, block in enumerate(net.up_blocks):
        yield from _diffusers_level("up", level, block, f"up_blocks.{level}")
    yield ModuleSite("unet-out", "conv_out")


def _diffusers_level(stage: str, level: int, block: Any, path: str) -> Iterator[Site]:
    attentions = getattr(block, "attentions", None)
    for repeat in range(len(block.resnets)):
        prefix = f"{stage}-level{level}-repeat{repeat}"
        yield from _resnet(prefix, f"{path}.resnets.{repeat}", "conv2")
        if attentions is not None and attentions[repeat] is not None:
            yield from _transformer(prefix, f"{path}.attentions.{repeat}", attentions[repeat])
    sampler = "downsampler" if stage == "down" else "upsampler"
    if getattr(block, f"{sampler}s", None):
        yield ModuleSite(f"{stage}-level{level}-{sampler}-out", f"{path}.{sampler}s.0")


def _diffusers_middle(block: Any) -> Iterator[Site]:
    if block is None:
        return
    attentions = getattr(block, "attentions", [])
    for repeat in range(len(block.resnets)):
        if repeat and attentions[repeat - 1] is not None:
            yield from _transformer("mid", f"mid_block.attentions.{repeat - 1}", attentions[repeat - 1])
        yield from _resnet(f"mid-repeat{repeat}", f"mid_block.resnets.{repeat}", "conv2")


def comfyui_sites(net: Any) -> Iterator[Site]:
    """UNetModel: input_blocks, middle_block, output_blocks are lists that are never called themselves."""
    yield ModuleSite("unet-in", "input_blocks.0.0", before=True)
    yield ModuleSite("unet-after-conv-in", "input_blocks.0.0")
    yield from _comfyui_stage("down", net.input_blocks, "input_blocks", first=1)
    yield from _comfyui_middle(net.middle_block)
    yield from _comfyui_stage("up", net.output_blocks, "output_blocks", first=0)
    yield ModuleSite("unet-out", "out.2")


def _comfyui_stage(stage: str, blocks: Any, path: str, first: int) -> Iterator[Site]:
    level = repeat = 0
    for i in range(first, len(blocks)):
        prefix, sampled = f"{stage}-level{level}-repeat{repeat}", False
        for j, child in enumerate(blocks[i]):
            where = f"{path}.{i}.{j}"
            if hasattr(child, "transformer_blocks"):
                yield from _transformer(prefix, where, child)
            elif hasattr(child, "out_layers"):
                yield from _resnet(prefix, where, "out_layers.3")
            else:
                sampled = True
                sampler = "downsampler" if stage == "down" else "upsampler"
                yield ModuleSite(f"{stage}-level{level}-{sampler}-out", where)
        level, repeat = (level + 1, 0) if sampled else (level, repeat + 1)


def _comfyui_middle(block: Any) -> Iterator[Site]:
    repeat = 0
    for j, child in enumerate(block):
        if hasattr(child, "transformer_blocks"):
            yield from _transformer("mid", f"middle_block.{j}", child)
        elif hasattr(child, "out_layers"):
            yield from _resnet(f"mid-repeat{repeat}", f"middle_block.{j}", "out_layers.3")
            repeat += 1


def _resnet(prefix: str, path: str, last_conv: str) -> Iterator[Site]:
    yield ModuleSite(f"{prefix}-res-increment", f"{path}.{last_conv}")
    yield ModuleSite(f"{prefix}-res-out", path)


def _transformer(prefix: str, path: str, module: Any) -> Iterator[Site]:
    for b, block in enumerate(module.transformer_blocks):
        yield from _basic_block(f"{prefix}-vit-block{b}", f"{path}.transformer_blocks.{b}", block, grid=path)
    # The tuple or output class that diffusers returns is read by ``element`` 0; a plain tensor is used directly.
    yield ModuleSite(f"{prefix}-vit-out", path, element=0)


def _basic_block(prefix: str, path: str, block: Any, grid: str) -> Iterator[Site]:
    """Self-attention, cross-attention, feed-forward: the same names in both libraries."""
    yield from _attention(f"{prefix}-self", f"{path}.attn1", block.attn1, grid, "tokens")
    if getattr(block, "attn2", None) is not None:
        yield from _attention(f"{prefix}-cross", f"{path}.attn2", block.attn2, grid, "text")
    yield ModuleSite(f"{prefix}-ffn-inner", f"{path}.ff.net.0", "tokens", grid=grid)
    yield ModuleSite(f"{prefix}-ffn-out", f"{path}.ff", "tokens", grid=grid)
    yield ModuleSite(f"{prefix}-out", path, "tokens", grid=grid)


def _attention(prefix: str, path: str, attention: Any, grid: str, source: str) -> Iterator[Site]:
    source_grid = grid if source == "tokens" else None
    query, key = f"{path}.to_q", f"{path}.to_k"
    yield ModuleSite(f"{prefix}-q", query, "tokens", grid=grid)
    yield ModuleSite(f"{prefix}-k", key, source, grid=source_grid)
    yield ModuleSite(f"{prefix}-v", f"{path}.to_v", source, grid=source_grid)
    text_keys = source == "text"
    yield MapSite(f"{prefix}-map", path, query=query, key=key, heads=int(attention.heads), text_keys=text_keys)
    yield ModuleSite(f"{prefix}-out", f"{path}.to_out.0", "tokens", grid=grid)


LCM_GUIDANCE = 8.5
"""LatentConsistencyModelPipeline's default for networks with a guidance embedding."""


def guidance_embedding(scale: torch.Tensor, width: int) -> torch.Tensor:
    """(B, width) of (B,) guidance scales, the guidance embedding of consistency models (Luo et al. 2023)."""
    rates = torch.exp(-math.log(10_000) * torch.arange(width // 2, device=scale.device) / (width // 2 - 1))
    angles = 1000 * (scale.float() - 1)[:, None] * rates
    return torch.nn.functional.pad(torch.cat([angles.sin(), angles.cos()], 1), (0, width % 2))


def call(net: Any, x: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
    """UNet2DConditionModel; SDXL takes image sizes as ``time_ids``, a consistency model its ``guidance`` (B,)."""
    if x.shape[1] != net.config.in_channels:
        shown, accepted = f"{x.shape[1]} channels", f"{net.config.in_channels} for this UNet"
        raise refuse("latents", shown, accepted, "inpainting and editing UNets take more than a latent: use the base")
    if getattr(net.config, "encoder_hid_dim_type", None) == "ip_image_proj":
        raise refuse("UNet", "one with an IP-Adapter loaded", "one without", "call unload_ip_adapter() first")
    added = None
    if getattr(net.config, "addition_embed_type", None) == "text_time":
        added = {"text_embeds": cond.pooled, "time_ids": cond.extra["time_ids"]}
    guidance, width = None, getattr(net.config, "time_cond_proj_dim", None)
    if width:
        scale = cond.extra.get("guidance", torch.full((len(x),), LCM_GUIDANCE, device=x.device))
        guidance = guidance_embedding(scale, width).to(x.dtype)
    return net(x, t, encoder_hidden_states=cond.text, timestep_cond=guidance, added_cond_kwargs=added).sample


_BLOCKS = {"DownBlock2D", "CrossAttnDownBlock2D", "UpBlock2D", "CrossAttnUpBlock2D", "UNetMidBlock2DCrossAttn", None}


def unsupported_reason(net: Any) -> tuple[str, str] | None:
    """Blocks with other modules (Kandinsky, DeepFloyd), and projections that are never called."""
    config = getattr(net, "config", {})
    kinds = {*config.get("down_block_types", ()), config.get("mid_block_type"), *config.get("up_block_types", ())}
    if not kinds <= _BLOCKS:
        return f"a UNet with {sorted(kinds - _BLOCKS, key=str)}", "it has no layout here yet"
    if any(map(is_fused, modules_in(net))):
        return "a UNet with fused query, key and value projections", "call unfuse_qkv_projections() first"
    return None


# --- names in files -------------------------------------------------------------------------------------------------
_RESNET = {"in_layers.2": "conv1", "out_layers.3": "conv2", "emb_layers.1": "time_emb_proj"}
_RESNET["skip_connection"] = "conv_shortcut"
_EDGES = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "label_emb.0.0": "add_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
    "out.2": "conv_out",
}


def renamed(path: str, layers: int) -> str:
    """ldm module path -> diffusers' path. A level has ``layers`` resnets in the encoder and one more in the decoder."""
    if path in _EDGES:
        return _EDGES[path]
    match = re.match(r"(input_blocks|output_blocks|middle_block)\.(\d+)(?:\.(\d+))?\.?(.*)$", path)
    if not match:
        return path
    stage, n = match[1], int(match[2])
    if stage == "middle_block":
        return _child("mid_block", n // 2, n % 2 == 1, ".".join(filter(None, match.group(3, 4))))
    child, tail = int(match[3] or 0), match[4]
    level, repeat = divmod(n - 1 if stage == "input_blocks" else n, layers + 1)
    block = f"{'down' if stage == 'input_blocks' else 'up'}_blocks.{level}"
    if tail == "op":
        return f"{block}.downsamplers.0.conv"
    if tail == "conv":
        return f"{block}.upsamplers.0.conv"
    return _child(block, repeat, child == 1, tail)


def _child(block: str, index: int, attention: bool, tail: str) -> str:
    return f"{block}.attentions.{index}.{tail}" if attention else f"{block}.resnets.{index}.{_RESNET.get(tail, tail)}"


# --- sizes ----------------------------------------------------------------------------------------------------------
def _with_sizes(path: str, embed: Any, channels: int, **more: Any) -> SizeInput:
    """SDXL's vector, the same in both libraries: pooled text, then six sinusoids of ``channels``.

    They are original height and width, crop top and left, target height and width.
    """
    return SizeInput(path, embed, slice(-6 * channels, -4 * channels), slice(-2 * channels, None), **more)


def _check_ids(arguments: Mapping[str, Any]) -> None:
    ids = (arguments.get("added_cond_kwargs") or {}).get("time_ids")
    if ids is None or ids.shape[-1] != 6:
        shape = None if ids is None else tuple(ids.shape)
        raise refuse("time_ids", shape, "(B, 6)", "the refiner has no target size; use the base model")


def sizes(net: Any) -> SizeInput:
    """SDXL's ``add_embedding``."""
    kind = net.config.addition_embed_type
    if kind != "text_time":
        raise refuse("addition_embed_type", kind, "text_time (SDXL)", "this UNet has no size conditioning")
    return _with_sizes("add_embedding", net.add_time_proj, net.config.addition_time_embed_dim, check=_check_ids)


def comfyui_sizes(model: Any) -> SizeInput | None:
    """SDXL's ``label_emb``; the refiner has no target size."""
    return _with_sizes("label_emb", model.embedder, 256) if comfyui_variant(model) == "SDXL" else None


def comfyui_variant(model: Any) -> str:
    """By the class of ComfyUI's model; subclasses of the plain class are neither (unCLIP, upscalers)."""
    kinds = [kind.__name__ for kind in type(model).__mro__]
    known = {"SDXL": "SDXL", "SDXLRefiner": "SDXL refiner"}
    return "SD" if kinds[0] == "BaseModel" else next((known[kind] for kind in kinds if kind in known), "")


FAMILY = Family(
    "UNet",
    Side(
        "UNet2DConditionModel", diffusers_sites, sizes=sizes,
        time=TimeEmbedding(lambda net: net.time_embedding.linear_2.out_features, lambda net: ["time_embedding"]),
    ),
    Side(
        "UNetModel", comfyui_sites, sizes=comfyui_sizes, variant=comfyui_variant,
        time=TimeEmbedding(lambda net: net.time_embed[2].out_features),
    ),
    call,
    unsupported_reason=unsupported_reason,
    component="unet",
    time_input="timestep",
    stacked=True,
    # DMD2's list for one-step LoRA students
    adapted=(
        "to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2", "conv1", "conv2",
        "conv_shortcut", "time_emb_proj",
    ),
    renamed=renamed,
    lora_paths=r"^(down_blocks|up_blocks|mid_block)\..*\.attn2\.to_[kv]$",
    published=(
        Published("Stable Diffusion 1.x", 768, presets=("SD1.5",), config="SD15", side=(512, 512)),
        Published("Stable Diffusion 2.x", 1024, presets=("SD2.1-base", "SD2.1"), config="SD20", side=(512, 768)),
        Published("SDXL", 2048, config="SDXL", side=(1024, 1024), sized=True),
        Published("SDXL refiner", 1280, sized=True),
    ),
    modules=modules_of("unet"),
)  # fmt: skip
