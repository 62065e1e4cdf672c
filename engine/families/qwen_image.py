"""Qwen-Image: double blocks with joint attention; modules have one name in both libraries.

Site names are ``vit-block{b}-...``; q, k, v are read before qk-norm and rotary embedding.

Facts (diffusers 0.42, ComfyUI 0.33):

- Time: s in both; both return eps - x0.
- Latents: 16 channels, factor 8, packed (c, ph, pw) for diffusers; ComfyUI takes (B, 16, 1, h, w) only.
- Text: Qwen2.5-VL-7B, the last state, 3584 wide, with a mask; a masked token has the effect of a removed one.
- Shift: ComfyUI s' with e^mu, mu = 1.15; QwenImagePipeline's mu is linear in image tokens, by its scheduler's config.
- Positions: theta 10000, axes 16, 56, 56; image (0, y, x) centred, text on the diagonal from max(h, w) // 2 on. On an
  odd number of rows or columns the libraries centre differently, and outputs differ by 9e-4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..network.attention import text_bias
from ..network.condition import Condition
from ..network.rotary_embedding import Rope, matrix_rope
from ..network.site import AdaLN, ModuleSite, Site
from .facts import Published, Turn
from .family import Family, Inputs, Latent, Side, Tokens, per_channel, per_channel_unscaled, plain_tokens, square
from .joint import block_input, split_attention
from .module_names import modules_of
from .packing import MASK, flow_time, masked, pack, text_of, unpack, video_grid


def _rope(args: tuple, kwargs: dict[str, Any]) -> Rope:
    """diffusers: complex numbers of image and of text tokens. ComfyUI: one table, text first."""
    rotary = kwargs["image_rotary_emb"]
    if isinstance(rotary, torch.Tensor):
        return matrix_rope(rotary)
    image, text = rotary
    both = torch.cat([text, image])
    return Rope(both.real, both.imag)


def sites(net: Any) -> Iterator[Site]:
    """QwenImageTransformer2DModel of either library."""
    image: dict[str, Any] = {"kind": "tokens", "grid": "", "patch": 2}
    for b in range(len(net.transformer_blocks)):
        name, path = f"vit-block{b}", f"transformer_blocks.{b}"
        yield block_input(name, f"{path}.img_norm1", AdaLN(f"{path}.img_mod.1"), **image)
        yield from split_attention(net, name, f"{path}.attn", image, rope=f"{path}.attn", rotary=_rope)
        yield ModuleSite(f"{name}-ctx-attn-out", f"{path}.attn.to_add_out", "text")
        yield ModuleSite(f"{name}-ffn-inner", f"{path}.img_mlp.net.0", **image)
        yield ModuleSite(f"{name}-ffn-out", f"{path}.img_mlp", **image)
        yield ModuleSite(f"{name}-out", path, element=1, **image)


def diffusers_tokens(inputs: Inputs) -> Tokens:
    """Packed latents; token grids are passed as numbers, the image's first."""
    x, text = inputs(0, "hidden_states"), inputs(1, "encoder_hidden_states")
    mask = inputs(2, "encoder_hidden_states_mask")
    shapes = inputs(4, "img_shapes")[0]
    frames, rows, columns = shapes[0] if isinstance(shapes, list) else shapes
    return Tokens(x.shape[0], (2 * rows, 2 * columns), frames, text.shape[1], bias=text_bias(mask))


def comfyui_tokens(inputs: Inputs) -> Tokens:
    """As a plain network, with a mask that is added to the scores unless it is an integer."""
    plain, mask = plain_tokens(inputs), inputs(3, "attention_mask")
    if mask is None:
        return plain
    bias = mask[:, None].float() if mask.is_floating_point() else text_bias(mask)
    return Tokens(plain.batch, plain.size, plain.frames, plain.text, bias=bias)


def call(net: Any, x: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
    """diffusers' QwenImageTransformer2DModel, with latents of 4 axes, or 5 with one frame."""
    shapes = [[(1, x.shape[-2] // 2, x.shape[-1] // 2)]] * len(x)
    mask = cond.extra.get(MASK)
    tokens = net(
        pack(x),
        encoder_hidden_states=text_of(cond),
        encoder_hidden_states_mask=mask,
        timestep=flow_time(t),
        img_shapes=shapes,
        guidance=cond.extra.get("guidance"),
    ).sample
    return unpack(tokens, x)


def condition(pipe: Any, prompts: list[str], height: int, width: int) -> Condition:
    """Through QwenImagePipeline's own ``encode_prompt``."""
    return masked(*pipe.encode_prompt(prompts))


def rope(part: Any, named: Mapping[str, Any], turn: Turn) -> Any:
    """Rows and columns are counted from the image centre; text continues beyond its corner, on all axes."""
    shapes = named["video_fhw"]
    shapes = shapes[0] if isinstance(shapes, list) else shapes
    shapes, device = shapes if isinstance(shapes, list) else [shapes], named.get("device")
    ids, last = [], 0
    for k, (frames, height, width) in enumerate(shapes):
        sides = [(-(n - n // 2), n // 2) if part.scale_rope else (0, n) for n in (height, width)]
        last = max(last, *(end for _, end in sides))
        ids.append(video_grid(*(torch.arange(a, b, device=device) for a, b in ((k, k + frames), *sides))))
    text = last + torch.arange(int(named["max_txt_seq_len"]), device=device)[:, None].expand(-1, 3)
    turned = []
    for positions in (torch.cat(ids), text):
        angles, factor = turn(positions, part.axes_dim, part.theta)
        turned.append(torch.polar(torch.full_like(angles, factor), angles).to(torch.complex64))
    return tuple(turned)


FAMILY = Family(
    "Qwen-Image",
    Side("QwenImageTransformer2DModel", sites, diffusers_tokens),
    Side("QwenImageTransformer2DModel", sites, comfyui_tokens),
    call,
    Latent(16, patch=2, frames=True, scaled=per_channel, unscaled=per_channel_unscaled),
    condition,
    trained=square(1328),
    guidance=("true_cfg_scale", 1.0),
    masks_optional=True,
    rope_readers={"QwenEmbedRope": rope},
    published=(Published("Qwen-Image", width=3072),),
    modules=modules_of("qwen_image"),
    blocks={"transformer_blocks": (60,)},
)
