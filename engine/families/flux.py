"""Flux.1: double blocks with joint attention, then single blocks over the joined tokens; rotary positions.

Site names are ``vit-block{b}-...``; q, k, v are read before qk-norm and rotary embedding. Joint attention has one map
per block, ``vit-block{b}-map``: image tokens as queries, text and then image tokens as keys. Single blocks continue the
count of the double ones; their ``-ctx-`` sites are the text tokens of projections shared by both.

Facts (diffusers 0.42, ComfyUI 0.33):

- Time: s in both; both return eps - x0. Latents: 16 channels, factor 8, packed (c, ph, pw) for diffusers.
- Text: T5-XXL, 4096 wide, and CLIP-L pooled; guidance 3.5 is ComfyUI's and FluxPipeline's default.
- Shift: ComfyUI s' with e^mu, mu = 1.15; FluxPipeline's mu is linear in image tokens.
- Positions: theta 10000, axes 16, 56, 56; text (0, 0, 0), image (0, y, x).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..network.condition import Condition
from ..network.rotary_embedding import doubled
from ..network.site import AdaLN, Columns, ModuleSite, Site
from .facts import Published, Turn
from .family import Family, Inputs, Latent, Side, Tokens, square
from .joint import QKV, block_input, fused_attention, fused_stream, joint_map, norm_at, split_attention, split_stream
from .module_names import modules_of
from .packing import flow_time, grid_ids, pack, text_length, text_of, unpack

WEIGHTS = {
    "transformer_blocks": "double_blocks",
    "single_transformer_blocks": "single_blocks",
    "transformer_blocks.*.attn.to_q": "double_blocks.*.img_attn.qkv|0",
    "transformer_blocks.*.attn.to_k": "double_blocks.*.img_attn.qkv|1",
    "transformer_blocks.*.attn.to_v": "double_blocks.*.img_attn.qkv|2",
    "transformer_blocks.*.attn.norm_q": "double_blocks.*.img_attn.norm.query_norm",
    "transformer_blocks.*.attn.norm_k": "double_blocks.*.img_attn.norm.key_norm",
    "attn.add_q_proj": "txt_attn.qkv|0",
    "attn.add_k_proj": "txt_attn.qkv|1",
    "attn.add_v_proj": "txt_attn.qkv|2",
    "attn.norm_added_q": "txt_attn.norm.query_norm",
    "attn.norm_added_k": "txt_attn.norm.key_norm",
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
    "single_transformer_blocks.*.attn.to_q": "single_blocks.*.linear1|0",
    "single_transformer_blocks.*.attn.to_k": "single_blocks.*.linear1|1",
    "single_transformer_blocks.*.attn.to_v": "single_blocks.*.linear1|2",
    "single_transformer_blocks.*.proj_mlp": "single_blocks.*.linear1|-1",
    "single_transformer_blocks.*.proj_out": "single_blocks.*.linear2",
    "single_transformer_blocks.*.attn.norm_q": "single_blocks.*.norm.query_norm",
    "single_transformer_blocks.*.attn.norm_k": "single_blocks.*.norm.key_norm",
    "norm.linear": "modulation.lin",
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    "norm_out.linear": "final_layer.adaLN_modulation.1|swap",
    "proj_out": "final_layer.linear",
}


# --- sites ----------------------------------------------------------------------------------------------------------
# A block's norm and modulation, relative to the block; the modulation shared by all blocks of a kind.
_DOUBLE = ("norm1", "norm1.linear", "double_stream_modulation_img.linear")
SINGLE = ("norm", "norm.linear", "single_stream_modulation.linear")
_COMFYUI_DOUBLE = ("img_norm1", "img_mod.lin", "double_stream_modulation_img.lin")
_NORMS = ("norm.query_norm", "norm.key_norm")
_COMFYUI_SINGLE = ("pre_norm", "modulation.lin", "single_stream_modulation.lin")


def modulated_input(net: Any, name: str, path: str, modules: tuple[str, str, str], b: int, **image: Any) -> Site:
    """A block's input. Flux.1's blocks modulate it themselves, Flux.2's share one module, Chroma's take rows of one.

    Args:
        modules: the norm and the block's own modulation, relative to the block, and the shared one.
        b: index of the block among its kind.
    """
    norm, own, shared = f"{path}.{modules[0]}", f"{path}.{modules[1]}", modules[2]
    norm = norm_at(net, f"{norm}.norm") or norm
    single = bool(image.get("joint"))
    adaln = AdaLN(own, parts=3 if single else 6)
    if hasattr(net, "distilled_guidance_layer"):  # rows: 3 per single block, 6 per double (image), 6 (text)
        doubles, singles = (len(blocks) for blocks in _blocks(net))
        row = 3 * b if single else 3 * singles + 6 * b
        adaln = AdaLN("distilled_guidance_layer", row, row + 1, 3 * singles + 12 * doubles + 2, rows=True)
    elif hasattr(net, shared.split(".")[0]):
        adaln = replace(adaln, path=shared)
    return block_input(name, norm, adaln, **image)


def _blocks(net: Any) -> tuple[Any, Any]:
    """Double and single blocks in either library."""
    if hasattr(net, "transformer_blocks"):
        return net.transformer_blocks, net.single_transformer_blocks
    return net.double_blocks, net.single_blocks


def diffusers_double(net: Any, b: int, patch: int, inner: str) -> Iterator[Site]:
    """A double block, with an image and a text stream; ``inner`` is the MLP's activation."""
    image: dict[str, Any] = {"kind": "tokens", "grid": "", "patch": patch}
    name, path = f"vit-block{b}", f"transformer_blocks.{b}"
    yield modulated_input(net, name, path, _DOUBLE, b, **image)
    yield from split_attention(net, name, f"{path}.attn", image, rope=f"{path}.attn", patch=patch)
    yield ModuleSite(f"{name}-ffn-inner", f"{path}.{inner}", **image)
    yield ModuleSite(f"{name}-ffn-out", f"{path}.ff", **image)
    yield ModuleSite(f"{name}-out", path, element=1, **image)


def comfyui_double(net: Any, b: int) -> Iterator[Site]:
    """The same in ComfyUI, where the image stream comes first in the block's output."""
    patch = int(net.patch_size)
    image: dict[str, Any] = {"kind": "tokens", "grid": "", "patch": patch}
    name, path = f"vit-block{b}", f"double_blocks.{b}"
    yield modulated_input(net, name, path, _COMFYUI_DOUBLE, b, **image)
    attentions = (f"{path}.img_attn", f"{path}.txt_attn")
    joint: dict[str, Any] = {"last": f"{path}.txt_attn.qkv", "heads": int(net.num_heads), "rope": path, "patch": patch}
    yield from fused_attention(net, name, path, attentions, _NORMS, image, **joint)
    yield ModuleSite(f"{name}-ffn-inner", f"{path}.img_mlp.1", **image)
    yield ModuleSite(f"{name}-ffn-out", f"{path}.img_mlp", **image)
    yield ModuleSite(f"{name}-out", path, element=0, **image)


def joined_projections(name: str, paths: tuple[str, ...], slices: tuple[Columns | None, ...], patch: int) -> Any:
    """q, k and v of image tokens, then of text tokens, from projections shared by both."""
    for kind, prefix in (("tokens", ""), ("text", "ctx-")):
        where: dict[str, Any] = {"kind": kind, "joint": True, "patch": patch, "grid": "" if kind == "tokens" else None}
        for x, path, columns in zip(QKV, paths, slices, strict=True):
            yield ModuleSite(f"{name}-{prefix}{x}", path, columns=columns, **where)


def diffusers_single(net: Any, j: int) -> Iterator[Site]:
    """A block over the joint sequence, with separate projections for q, k and v."""
    image: dict[str, Any] = {"kind": "tokens", "grid": "", "patch": 2, "joint": True}
    name, path = f"vit-block{len(net.transformer_blocks) + j}", f"single_transformer_blocks.{j}"
    yield modulated_input(net, name, path, SINGLE, j, **image)
    heads = int(net.single_transformer_blocks[j].attn.heads)
    yield from joined_projections(name, tuple(f"{path}.attn.to_{x}" for x in QKV), (None,) * 3, 2)
    stream = (split_stream(net, f"{path}.attn", False),)
    yield joint_map(f"{name}-map", f"{path}.attn", stream, f"{path}.attn.to_k", heads, rope=f"{path}.attn")
    yield ModuleSite(f"{name}-ffn-inner", f"{path}.act_mlp", **image)
    # diffusers >= 0.35 returns (text, image), older ones the joint sequence: the reader accepts both.
    yield ModuleSite(f"{name}-out", path, element=1, **image)


def comfyui_single(net: Any, j: int) -> Iterator[Site]:
    """The same in ComfyUI, which fuses q, k and v with the MLP."""
    patch, width = int(net.patch_size), int(net.hidden_size)
    image: dict[str, Any] = {"kind": "tokens", "grid": "", "patch": patch, "joint": True}
    name, path = f"vit-block{len(net.double_blocks) + j}", f"single_blocks.{j}"
    yield modulated_input(net, name, path, _COMFYUI_SINGLE, j, **image)
    slices = tuple((i * width, width) for i in range(3))
    yield from joined_projections(name, (f"{path}.linear1",) * 3, slices, patch)
    stream = (fused_stream(net, path, _NORMS, "linear1", width),)
    yield joint_map(f"{name}-map", path, stream, f"{path}.linear1", int(net.num_heads), rope=path, patch=patch)
    yield ModuleSite(f"{name}-ffn-inner", f"{path}.mlp_act", **image)
    yield ModuleSite(f"{name}-out", path, **image)


def diffusers_sites(net: Any) -> Iterator[Site]:
    """FluxTransformer2DModel."""
    for b in range(len(net.transformer_blocks)):
        yield from diffusers_double(net, b, 2, "ff.net.0")
    for j in range(len(net.single_transformer_blocks)):
        yield from diffusers_single(net, j)


def comfyui_sites(net: Any) -> Iterator[Site]:
    """Flux."""
    for b in range(len(net.double_blocks)):
        yield from comfyui_double(net, b)
    for j in range(len(net.single_blocks)):
        yield from comfyui_single(net, j)


# --- the call -------------------------------------------------------------------------------------------------------
def packed_tokens(inputs: Inputs) -> Tokens:
    """diffusers' Flux takes packed latents (B, N, C) with the position (_, row, column) of each token."""
    x, text, ids = inputs(0, "hidden_states"), inputs(1, "encoder_hidden_states"), inputs(5, "img_ids")
    rows, columns = (0, 0) if inputs.known else inputs.sides(ids.reshape(-1, 3)[:, 1:])
    return Tokens(x.shape[0], inputs.known or (2 * rows, 2 * columns), text=text.shape[1])


def call(net: Any, x: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
    """Flux works on 2 x 2 patches in row-major order and takes the time in [0, 1]."""
    text = text_of(cond)
    out = net(
        hidden_states=pack(x),
        encoder_hidden_states=text,
        pooled_projections=cond.pooled,
        timestep=flow_time(t),
        img_ids=grid_ids(x),
        txt_ids=torch.zeros(text.shape[1], 3, device=x.device),
        guidance=cond.extra.get("guidance"),
    ).sample
    return unpack(out, x)


def condition(pipe: Any, prompts: list[str], height: int, width: int) -> Condition:
    """Through FluxPipeline's ``encode_prompt``, with its default guidance."""
    length = text_length(pipe.text_encoder_2, 512)
    text, pooled, _ = pipe.encode_prompt(prompts, None, max_sequence_length=length)
    guided = pipe.transformer.config.guidance_embeds
    return Condition(text, pooled, {"guidance": torch.full((len(text),), 3.5)} if guided else {})


def rope(part: Any, named: Mapping[str, Any], turn: Turn) -> Any:
    """FluxPosEmbed, and embeddings of other families with the same arguments."""
    return doubled(*turn(named["ids"], part.axes_dim, part.theta))


def _reads_guidance(net: Any) -> str:
    """Flux.1 dev in either library, which schnell's students do not fit."""
    settings = (getattr(net, "config", None), getattr(net, "params", None))
    flags = (getattr(s, name, False) for s in settings for name in ("guidance_embeds", "guidance_embed"))
    return "Flux.1 dev, which reads a guidance" if any(map(bool, flags)) else ""


def unsupported_reason(net: Any) -> tuple[str, str] | None:
    """ComfyUI builds other models from Flux.1's class."""
    params = getattr(net, "params", None)
    if params is not None and (params.patch_size != 2 or params.yak_mlp):
        return "a model built from the class of Flux.1 with other patches or MLPs", "it has no layout here yet"
    return None


BLOCKS = {
    "transformer_blocks": (19,),
    "single_transformer_blocks": (38,),
    "double_blocks": (19,),
    "single_blocks": (38,),
}
"""List of blocks -> its lengths."""

FAMILY = Family(
    "Flux",
    Side("FluxTransformer2DModel", diffusers_sites, packed_tokens),
    Side("Flux", comfyui_sites, fits=lambda net: not net.params.global_modulation),
    call,
    Latent(16, patch=2),
    condition,
    WEIGHTS,
    unsupported_reason,
    trained=square(1024),
    rope_readers={"FluxPosEmbed": rope},
    published=(
        Published("Flux or Chroma", width=3072),
        Published("Flux.1 schnell", other=_reads_guidance),
    ),
    modules=modules_of("flux"),
    blocks={
        "transformer_blocks": (19,),
        "single_transformer_blocks": (38,),
        "double_blocks": (19,),
        "single_blocks": (38,),
    },
)
