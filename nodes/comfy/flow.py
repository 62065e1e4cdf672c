"""The flow portraits as genuine ComfyUI objects: core's Flux network and model class with their weights and sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import comfy.latent_formats
import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import torch

from ...engine.errors import refuse
from ...engine.portraits.preview import read_preview
from . import compat_comfyui as core
from .portraits import read_part

_NORM_EPSILON = 1e-6
"""diffusers' qk-norm was trained with this; ComfyUI's takes float32's own (1.2e-7)."""


class FlowLatentFormat(comfy.latent_formats.LatentFormat):
    """Sixteen channels at an eighth of the picture's side, standardised by the autoencoder itself."""

    latent_channels = 16
    scale_factor = 1.0

    def __init__(self, folder: str | Path) -> None:
        self.latent_rgb_factors, self.latent_rgb_factors_bias = read_preview(folder)


class FlowPortraits(comfy.supported_models.Flux):
    """Flux's model class at another width, without a shift of its noise levels."""

    def __init__(self, unet_config: dict, folder: str | Path, shift: float, side: int) -> None:
        self.sampling_settings = {"shift": shift}
        super().__init__(unet_config)
        self.latent_format, self.trained_side = FlowLatentFormat(folder), side


def load_flow_model(folder: str, disable_dynamic: bool = False) -> Any:
    """MODEL from the folder of a small FluxPipeline. Also the factory that deep clones call."""
    config, weights = read_part(folder, "transformer")
    scheduler = json.loads((Path(folder) / "scheduler" / "scheduler_config.json").read_text())
    shift = torch.tensor(float(scheduler["shift"])).log().item()  # ComfyUI's Flux counts a shift by its logarithm
    side = json.loads((Path(folder) / "vae" / "config.json").read_text())["sample_size"]
    model_config = FlowPortraits(_config(config), folder, shift, side)
    model_config.set_inference_dtype(torch.float32, None)
    offload = comfy.model_management.unet_offload_device()
    model = model_config.get_model({}, "", device=offload)
    for module in model.diffusion_model.modules():
        if isinstance(module, torch.nn.RMSNorm):
            module.eps = _NORM_EPSILON
    patcher_class = comfy.model_patcher.ModelPatcher if disable_dynamic else core.CoreModelPatcher
    device = comfy.model_management.get_torch_device()
    patcher = patcher_class(model, load_device=device, offload_device=offload)
    model.load_model_weights(_converted(weights, model_config.unet_config), "", assign=patcher.is_dynamic())
    patcher.cached_patcher_init = (load_flow_model, (folder,))
    return patcher


def _config(config: dict) -> dict:
    heads = config["num_attention_heads"]
    return {
        "image_model": "flux", "in_channels": config["in_channels"] // 4, "out_channels": config["in_channels"] // 4,
        "vec_in_dim": config["pooled_projection_dim"], "context_in_dim": config["joint_attention_dim"],
        "hidden_size": heads * config["attention_head_dim"], "mlp_ratio": 4.0, "num_heads": heads,
        "depth": config["num_layers"], "depth_single_blocks": config["num_single_layers"],
        "axes_dim": list(config["axes_dims_rope"]), "theta": 10000, "patch_size": 2, "qkv_bias": True,
        "guidance_embed": config["guidance_embeds"], "txt_ids_dims": [],
    }  # fmt: skip


def _converted(weights: dict[str, torch.Tensor], config: dict) -> dict[str, torch.Tensor]:
    """diffusers names -> ComfyUI names by core's own table: q, k, v and the single blocks' MLP are fused there."""
    table = core.flux_to_diffusers(config)
    unknown = sorted(set(weights) - set(table))
    if unknown:
        raise refuse("transformer weights", unknown[:3], "a Flux-shaped transformer", "use the portraits folder")
    parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for name, value in weights.items():
        where = table[name]
        key, rows, change = (where, None, None) if isinstance(where, str) else (*where, None)[:3]
        parts.setdefault(key, []).append((rows[1] if rows else 0, change(value) if change else value))
    return {key: torch.cat([v for _, v in sorted(values, key=lambda part: part[0])]) for key, values in parts.items()}
