"""Z-Image: one sequence of image and text tokens, with projections shared by both.

Site names are ``vit-block{b}-...``; ``-q`` .. ``-out`` are image tokens, ``-ctx-q``, ``-ctx-k``, ``-ctx-v`` the text
tokens of the same projections. The refiners before the joint blocks have no sites.

Facts (diffusers 0.42, ComfyUI 0.33):

- Order: diffusers puts image tokens first, ComfyUI text. Both streams are padded to multiples of 32 with learned
  unmasked tokens; text sites keep text padding, image sites drop image padding.
- Time: diffusers takes 1 - s (1 is clean) and returns x0 - eps; ComfyUI takes s and returns eps - x0.
- Text: Qwen3-4B, the second-to-last state, 2560 wide. Prompts of unequal length are a ragged list in diffusers.
- Shift: ComfyUI s' = 3 s / (1 + 2 s); ZImagePipeline's mu is linear in image tokens, 256 .. 4096 -> 0.5 .. 1.15.
- Positions: theta 256, axes (t, h, w) = 32, 48, 48 of each head; text (1 + n, 0, 0), image (padded text + 1, y, x).
- Numbers: qk-norm's epsilon is 1e-5 in diffusers and 1.2e-7 in ComfyUI; outputs differ by 1e-5 for that alone.
- LoRA: ComfyUI fuses q, k, v to one weight of 3 x dim rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..errors import refuse
from ..network.condition import Condition
from ..network.rotary_embedding import complex_rope, matrix_rope
from ..network.site import Site
from .facts import Published
from .family import Family, Inputs, Latent, Side, Tokens, square
from .joint import JointBlock, joint_block, part, scale_alone
from .module_names import modules_of
from .packing import MASK, flow_time, ragged, text_of, whole

MULTIPLE = 32
"""Each stream is padded to a multiple of this many tokens."""

WEIGHTS = {
    "attention.to_q": "attention.qkv|0",
    "attention.to_k": "attention.qkv|1",
    "attention.to_v": "attention.qkv|2",
    "attention.norm_q": "attention.q_norm",
    "attention.norm_k": "attention.k_norm",
    "attention.to_out.0": "attention.out",
    "all_x_embedder.2-1": "x_embedder",
    "all_final_layer.2-1": "final_layer",
}


def diffusers_sites(net: Any) -> Iterator[Site]:
    """ZImageTransformer2DModel."""
    modules = JointBlock(
        [(f"attention.to_{x}", None) for x in "qkv"],
        ("attention.norm_q", "attention.norm_k"),
        "attention.to_out.0",
        "feed_forward.w2",
        "feed_forward",
        int(net.n_heads),
        "attention",
        lambda a, k: complex_rope(k["freqs_cis"]),
        norm="attention_norm1",
        adaln=scale_alone("attention_norm1", "adaLN_modulation.0"),
    )
    for b in range(len(net.layers)):
        yield from joint_block(f"vit-block{b}", f"layers.{b}", modules)


def comfyui_sites(net: Any) -> Iterator[Site]:
    """NextDiT with Z-Image's modulation. The qk-norms never run as modules (one kernel norms and rotates)."""
    for b in range(len(net.layers)):
        path = f"layers.{b}"
        modules = JointBlock(
            [("attention.qkv", part(net, f"{path}.attention.qkv", i, 3)) for i in range(3)],
            ("attention.q_norm", "attention.k_norm"),
            "attention.out",
            "feed_forward.w2",
            "feed_forward",
            int(net.n_heads),
            "attention",
            lambda a, k: matrix_rope(a[2]),
            norm="attention_norm1",
            adaln=scale_alone("attention_norm1", "adaLN_modulation.0"),
        )
        yield from joint_block(f"vit-block{b}", path, modules)


def padded(count: int) -> int:
    """The padded length of a stream."""
    return -(-count // MULTIPLE) * MULTIPLE


def diffusers_tokens(inputs: Inputs) -> Tokens:
    """Lists of latents (C, 1, h, w) and of captions (N, C); image tokens come first."""
    x, captions = inputs(0, "x"), inputs(2, "cap_feats")
    if isinstance(x[0], list):
        raise refuse(
            "forward",
            "several pictures in one sequence (Z-Image Omni)",
            "one picture a sequence",
            "leave references out",
        )
    size, lengths = (x[0].shape[-2], x[0].shape[-1]), [padded(len(caption)) for caption in captions]
    image, text = padded((size[0] // 2) * (size[1] // 2)), max(lengths)
    bias = None
    if min(lengths) < text:  # padding of shorter batch rows is masked
        shown = torch.tensor([[float(i < n) for i in range(text)] for n in lengths])
        bias = ((1 - shown) * -10000.0)[:, None]
    return Tokens(len(x), size, 1, text, text_start=image, image_start=0, bias=bias)


def comfyui_tokens(inputs: Inputs) -> Tokens:
    """Latents (B, C, h, w) and text (B, N, C); text comes first."""
    x, text = inputs(0, "x"), inputs(2, "context")
    if inputs.kwargs.get("ref_latents"):
        raise refuse("conditioning", "reference latents (Z-Image Omni)", "a prompt alone", "remove Reference Latent")
    return Tokens(x.shape[0], (x.shape[-2], x.shape[-1]), 1, padded(text.shape[1]))


def call(net: Any, x: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
    """ZImageTransformer2DModel; its sign and its time are reversed."""
    captions = whole(text_of(cond), cond.extra.get(MASK))
    rows = list(x.reshape(*x.shape[:2], 1, *x.shape[-2:]))
    return -torch.stack(net(rows, 1 - flow_time(t), captions).sample).reshape(x.shape)


def condition(pipe: Any, prompts: list[str], height: int, width: int) -> Condition:
    """Through ZImagePipeline's own ``encode_prompt``."""
    return ragged(pipe.encode_prompt(prompts, do_classifier_free_guidance=False)[0])


FAMILY = Family(
    "Z-Image",
    Side("ZImageTransformer2DModel", diffusers_sites, diffusers_tokens),
    Side("NextDiT", comfyui_sites, comfyui_tokens, lambda net: net.pad_tokens_multiple is not None),
    call,
    Latent(16, patch=2),
    condition,
    WEIGHTS,
    trained=square(1024),
    time_input="1 - s",
    guidance=("guidance_scale", 0.0),
    rope_tables={"RopeEmbedder": "axes_dims"},
    published=(Published("Z-Image", width=3840),),
    modules=modules_of("z_image"),
)
