"""Flux.2 and Klein: Flux.1's layout with one modulation for all blocks, gated MLPs, and patches made by the VAE.

Site names as in ``flux.py``.

Facts (diffusers 0.42, ComfyUI 0.33):

- Time: s in both; both return eps - x0. Guidance is an input of dev (times 1000 inside); Klein has none.
- Latents: the VAE's 32 channels packed 2 x 2 to 128 and normalised by the statistics of its batch norm, factor 16; a
  token is a latent pixel.
- Text: dev Mistral-3-24B, three layers, 15360 wide; Klein Qwen3-4B or 8B, 7680 or 12288 wide; 512 tokens. ComfyUI fills
  dev's prompts with zeros on the left, diffusers encodes padding.
- Shift: ComfyUI s' with e^mu, mu = 2.02; Flux2Pipeline's mu is linear in steps and tokens.
- Positions: theta 2000, four axes of 32: text (0, 0, 0, n), image (0, y, x, 0), references at 10, 20 ...
- Numbers: qk-norm's epsilon is 1e-6 in diffusers and 1.2e-7 in ComfyUI: attention outputs differ by 6e-6 for that
alone.
- LoRA: single blocks fuse q, k, v and the MLP in both; ComfyUI's own map of diffusers names lacks the modulations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..errors import refuse
from ..network.condition import Condition
from ..network.site import ModuleSite, Site, Stream
from . import flux
from .facts import Published
from .family import Family, Inputs, Latent, Side, Tokens, square
from .joint import joint_map
from .module_names import modules_of
from .packing import flow_time, grid_ids, pack, text_of, unpack

WEIGHTS = flux.WEIGHTS | {
    "ff.linear_in": "img_mlp.0",
    "ff.linear_out": "img_mlp.2",
    "ff_context.linear_in": "txt_mlp.0",
    "ff_context.linear_out": "txt_mlp.2",
    "single_transformer_blocks.*.attn.to_qkv_mlp_proj": "single_blocks.*.linear1",
    "single_transformer_blocks.*.attn.to_out": "single_blocks.*.linear2",
    "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
    "double_stream_modulation_txt.linear": "double_stream_modulation_txt.lin",
    "single_stream_modulation.linear": "single_stream_modulation.lin",
    "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_guidance_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_guidance_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
}


def diffusers_sites(net: Any) -> Iterator[Site]:
    """Flux2Transformer2DModel."""
    for b in range(len(net.transformer_blocks)):
        yield from flux.diffusers_double(net, b, 1, "ff.act_fn")
    image: dict[str, Any] = {"kind": "tokens", "grid": "", "patch": 1, "joint": True}
    for j, block in enumerate(net.single_transformer_blocks):
        name, path = f"vit-block{len(net.transformer_blocks) + j}", f"single_transformer_blocks.{j}"
        yield flux.modulated_input(net, name, path, flux.SINGLE, j, **image)
        fused, width = f"{path}.attn.to_qkv_mlp_proj", int(block.attn.inner_dim)
        slices = tuple((i * width, width) for i in range(3))
        yield from flux.joined_projections(name, (fused,) * 3, slices, 1)
        stream = Stream(fused, fused, slices[0], slices[1], f"{path}.attn.norm_q", f"{path}.attn.norm_k")
        rope, heads = f"{path}.attn", int(block.attn.heads)
        yield joint_map(f"{name}-map", rope, (stream,), fused, heads, rope=rope, patch=1)
        yield ModuleSite(f"{name}-ffn-inner", f"{path}.attn.mlp_act_fn", **image)
        yield ModuleSite(f"{name}-out", path, element=1, **image)


def diffusers_tokens(inputs: Inputs) -> Tokens:
    """Latents (B, h w, C) with the position (_, row, column, _) of each token."""
    x, text, ids = inputs(0, "hidden_states"), inputs(1, "encoder_hidden_states"), inputs(3, "img_ids")
    size = inputs.known or inputs.sides((ids[0] if ids.ndim == 3 else ids)[:, 1:3])
    return Tokens(x.shape[0], size, 1, text.shape[1])


def _normalised(vae: Any, z: torch.Tensor) -> torch.Tensor:
    """2 x 2 positions packed into channels, then the statistics of the VAE's batch norm."""
    b, c, h, w = z.shape
    packed = z.view(b, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(b, 4 * c, h // 2, w // 2)
    mean, var = (v.view(1, -1, 1, 1).to(packed) for v in (vae.bn.running_mean, vae.bn.running_var))
    return (packed - mean) / torch.sqrt(var + vae.config.batch_norm_eps)


def _unpacked(vae: Any, x: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`_normalised`."""
    b, c, h, w = x.shape
    mean, var = (v.view(1, -1, 1, 1).to(x) for v in (vae.bn.running_mean, vae.bn.running_var))
    z = x * torch.sqrt(var + vae.config.batch_norm_eps) + mean
    return z.view(b, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(b, c // 4, 2 * h, 2 * w)


def call(net: Any, x: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
    """Flux2Transformer2DModel."""
    text = text_of(cond)
    text_ids = torch.zeros(text.shape[1], 4, device=x.device)
    text_ids[:, 3] = torch.arange(text.shape[1], device=x.device)
    guidance = cond.extra.get("guidance")
    if guidance is not None and not net.config.guidance_embeds:
        raise refuse("guidance", "an input for a model without one (Klein)", "none", "leave it out of the condition")
    tokens = net(pack(x, 1), text, flow_time(t), grid_ids(x, 1, 4), text_ids, guidance).sample
    return unpack(tokens, x, 1)


def condition(pipe: Any, prompts: list[str], height: int, width: int) -> Condition:
    """Through the pipeline's ``encode_prompt``, with dev's default guidance."""
    text = pipe.encode_prompt(prompts)[0]
    guided = pipe.transformer.config.guidance_embeds
    return Condition(text, None, {"guidance": torch.full((len(text),), 4.0)} if guided else {})


def unsupported_reason(net: Any) -> tuple[str, str] | None:
    """ComfyUI builds other models from Flux.2's class."""
    params = getattr(net, "params", None)
    if params is not None and (params.patch_size != 1 or not params.mlp_silu_act):
        return "a model built from the class of Flux.2 with other patches or MLPs", "it has no layout here yet"
    return None


FAMILY = Family(
    "Flux.2",
    Side("Flux2Transformer2DModel", diffusers_sites, diffusers_tokens),
    Side("Flux", flux.comfyui_sites, fits=lambda net: net.params.global_modulation),
    call,
    Latent(128, 16, packed=2, scaled=_normalised, unscaled=_unpacked),
    condition,
    WEIGHTS,
    unsupported_reason,
    trained=square(1024),
    rope_readers={"Flux2PosEmbed": flux.rope},
    published=(
        Published("Flux.2 Klein 4B", width=3072),  # before dev: its last modulation is 2 x 3072 wide
        Published("Flux.2 Klein 9B", width=4096),
        Published("Flux.2", width=6144),
    ),
    modules=modules_of("flux2"),
    blocks={"transformer_blocks": (5, 8), "double_blocks": (5, 8), "single_blocks": (20, 24, 48)},
)
