"""HiDream-I1: double blocks, then single ones, with image tokens first and a different Llama layer for each block.

Site names as in ``flux.py``; modules have one name in both libraries. The text tokens of a block are those of T5, of
Llama's last layer, and of the block's own layer. The experts inside an MLP see only the tokens that their gate selects,
so only the MLP's output is a site.

Facts (diffusers 0.42, ComfyUI 0.33):

- Time: 1000 s in both; diffusers returns x0 - eps, ComfyUI eps - x0. Latents: 16 channels, factor 8.
- Text: T5-XXL and 32 layers of Llama-3.1-8B, 4096 wide, CLIP-L and CLIP-G pooled, 2048 wide. diffusers takes Llama's
  states as (L, B, N, C), ComfyUI as (B, L, N, C).
- Shift: ComfyUI none (1.0); HiDreamImagePipeline's mu is linear in image tokens.
- Positions: theta 10000, axes 64, 32, 32; text (0, 0, 0), image (0, y, x); qk-norm over all heads together.
- Sizes: diffusers pads an image that is not square to its largest size, with unmasked tokens; ComfyUI does
  not. Such images are refused in diffusers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors import refuse
from ..network.condition import Condition
from ..network.rotary_embedding import Rope, matrix_rope, turns
from ..network.site import AdaLN, ModuleSite, Site, Stream
from .facts import Refusal, Turn
from .family import Family, Inputs, Latent, Side, Tokens, square
from .flux import joined_projections
from .joint import QKV, block_input, joint_map
from .module_names import modules_of
from .packing import text_of

_NAMES = ("double_stream_blocks", "single_stream_blocks", "ff_i", "ff_t", "to_q_t", "to_k_t", "to_v_t", "to_out_t")
WEIGHTS = {name: name for name in (*_NAMES, "shared_experts", "adaLN_modulation")}
"""Modules have one name in both libraries; these contain underscores, which are ambiguous in kohya names."""

LLAMA = "encoder_hidden_states_llama3"
"""The part of a Condition with Llama's states, (B, L, N, C)."""


def _rope(args: tuple, kwargs: dict[str, Any]) -> Rope:
    rotary = kwargs.get("image_rotary_emb")
    return matrix_rope(kwargs["rope"] if rotary is None else rotary)


def _stream(path: str, text: str = "") -> Stream:
    names = f"{path}.to_q{text}", f"{path}.to_k{text}"
    return Stream(*names, None, None, f"{path}.q_rms_norm{text}", f"{path}.k_rms_norm{text}", whole_norm=True)


def sites(net: Any) -> Iterator[Site]:
    """HiDreamImageTransformer2DModel of either library."""
    image: dict[str, Any] = {"kind": "tokens", "grid": "", "patch": 2}
    for b, double in enumerate(net.double_stream_blocks):
        name, path = f"vit-block{b}", f"double_stream_blocks.{b}.block"
        attention, heads = f"{path}.attn1", int(double.block.attn1.heads)
        yield block_input(name, f"{path}.norm1_i", AdaLN(f"{path}.adaLN_modulation.1", parts=12), **image)
        for x in QKV:
            yield ModuleSite(f"{name}-{x}", f"{attention}.to_{x}", **image)
        for x in QKV:
            yield ModuleSite(f"{name}-ctx-{x}", f"{attention}.to_{x}_t", "text")
        both = (_stream(attention), _stream(attention, "_t"))
        yield joint_map(f"{name}-map", attention, both, f"{attention}.to_k_t", heads, rope=attention, rotary=_rope)
        yield ModuleSite(f"{name}-attn-out", f"{attention}.to_out", **image)
        yield ModuleSite(f"{name}-ffn-out", f"{path}.ff_i", **image)
        yield ModuleSite(f"{name}-out", path, element=0, **image)
    for j, single in enumerate(net.single_stream_blocks):
        name, path = f"vit-block{len(net.double_stream_blocks) + j}", f"single_stream_blocks.{j}.block"
        attention, heads = f"{path}.attn1", int(single.block.attn1.heads)
        yield block_input(name, f"{path}.norm1_i", AdaLN(f"{path}.adaLN_modulation.1"), joint=True, **image)
        yield from joined_projections(name, tuple(f"{attention}.to_{x}" for x in QKV), (None,) * 3, 2)
        joined = (_stream(attention),)
        yield joint_map(f"{name}-map", attention, joined, f"{attention}.to_k", heads, rope=attention, rotary=_rope)
        yield ModuleSite(f"{name}-attn-out", f"{attention}.to_out", joint=True, **image)
        yield ModuleSite(f"{name}-ffn-out", f"{path}.ff_i", joint=True, **image)
        yield ModuleSite(f"{name}-out", path, joint=True, **image)


def _tokens(x: torch.Tensor, t5: torch.Tensor, llama: int) -> Tokens:
    size = x.shape[-2], x.shape[-1]
    image = -(-size[0] // 2) * -(-size[1] // 2)
    return Tokens(x.shape[0], size, 1, t5.shape[1] + 2 * llama, text_start=image, image_start=0)


def diffusers_tokens(inputs: Inputs) -> Tokens:
    """Latents (B, C, h, w), T5's states (B, N, C) and Llama's (L, B, M, C)."""
    x = inputs(0, "hidden_states")
    if x.ndim != 4 or x.shape[-1] != x.shape[-2]:
        shown = f"latents {tuple(x.shape)}"
        raise refuse("latents", shown, "square pictures", "diffusers pads other shapes with unmasked tokens")
    return _tokens(x, inputs(2, "encoder_hidden_states_t5"), inputs(3, LLAMA).shape[2])


def comfyui_tokens(inputs: Inputs) -> Tokens:
    """Latents (B, C, h, w), T5's states (B, N, C) and Llama's (B, L, M, C)."""
    return _tokens(inputs(0, "x"), inputs(3, "context"), inputs(4, LLAMA).shape[2])


def call(net: Any, x: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
    """diffusers' HiDreamImageTransformer2DModel; its sign is reversed."""
    if LLAMA not in cond.extra:
        raise refuse("condition", sorted(cond.extra), f"Llama's states as {LLAMA!r}", "encode with HiDream's pipeline")
    llama = cond.extra[LLAMA].transpose(0, 1).to(x.dtype)
    return -net(x, t, text_of(cond), llama, cond.pooled).sample


def condition(pipe: Any, prompts: list[str], height: int, width: int) -> Condition:
    """Through HiDreamImagePipeline's own ``encode_prompt``."""
    encodings = pipe.encode_prompt(prompts, prompts, prompts, prompts, do_classifier_free_guidance=False)
    t5, _, llama, _, pooled, _ = encodings
    return Condition(t5, pooled, {LLAMA: llama.transpose(0, 1)})


def rope(part: Any, named: Mapping[str, Any], turn: Turn) -> Any:
    """HiDreamImageEmbedND: matrices, with an axis for the heads."""
    return turns(*turn(named["ids"], part.axes_dim, part.theta)).unsqueeze(2)


_ONE_AREA = Refusal(
    "whose pipeline generates at one area",
    "a pipeline that generates the requested size",
    "use ComfyUI's Fit Model to Size (Resolution Transfer), or another model",
)

FAMILY = Family(
    "HiDream",
    Side("HiDreamImageTransformer2DModel", sites, diffusers_tokens, refuses={"size": _ONE_AREA}),
    Side("HiDreamImageTransformer2DModel", sites, comfyui_tokens),
    call,
    Latent(16, patch=2),
    condition,
    WEIGHTS,
    trained=square(1024),
    time_input="1000 s",
    rope_readers={"HiDreamImageEmbedND": rope},
    modules=modules_of("hidream"),
)
