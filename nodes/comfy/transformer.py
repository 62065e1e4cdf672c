"""The portraits transformers as genuine ComfyUI objects: ComfyUI's PixArt network with their weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import torch

from ...engine.errors import refuse
from . import compat_comfyui as core
from .portraits import WEIGHTS, LatentFormat, read_part

TRAINED_SIDE = 64


class PixArt(core.PixArtMS):
    """ComfyUI's network, with positions spread over the trained number of tokens.

    ComfyUI spreads them over round(side / 64) times 64 latents, which is nothing at 16 x 16.
    """

    def __init__(self, base_size: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.base_size = base_size

    def forward_orig(self, x: Any, timestep: Any, y: Any, *unused: Any, **ignored: Any) -> torch.Tensor:
        """As the base class, without its mask and size conditions: (B, 4, H, W) in and out."""
        rows, columns = (side // self.patch_size for side in x.shape[-2:])
        positions = core.get_2d_sincos_pos_embed_torch(
            self.hidden_size, columns, rows, self.pe_interpolation or 1.0, self.base_size, x.device, x.dtype
        )
        tokens, t = self.x_embedder(x) + positions, self.t_embedder(timestep, x.dtype)
        text = self.y_embedder(y, self.training).squeeze(1).view(1, -1, self.hidden_size)
        scales = self.t_block(t)
        for block in self.blocks:
            tokens = block(tokens, text, scales, None, x.shape[-2:])
        return self.unpatchify(self.final_layer(tokens, t), *x.shape[-2:])


class _Base(comfy.model_base.PixArt):
    def __init__(self, config: Any, device: Any = None) -> None:
        kind = comfy.model_base.ModelType.EPS
        comfy.model_base.BaseModel.__init__(self, config, kind, device=device, unet_model=PixArt)


class PortraitsTransformer(comfy.supported_models.PixArtAlpha):
    """PixArt's model class with the portraits model's latents and noise schedule."""

    sampling_settings = {"beta_schedule": "linear", "linear_start": 0.00085, "linear_end": 0.012, "timesteps": 1000}

    def __init__(self, unet_config: dict, scale: float, side: int) -> None:
        super().__init__(unet_config)
        self.latent_format, self.trained_side = LatentFormat(scale, WEIGHTS), side

    def get_model(self, state_dict: dict, prefix: str = "", device: Any = None) -> Any:
        """The model without weights."""
        return _Base(self, device).eval()


def load_transformer(folder: str, disable_dynamic: bool = False) -> Any:
    """MODEL from a transformer's folder. Also the factory that deep clones call (``cached_patcher_init``)."""
    root = Path(folder)
    config, weights = read_part(str(root.parent), root.name)
    scale = json.loads((WEIGHTS / "vae" / "config.json").read_text())["scaling_factor"]
    betas = _trained_betas(root)
    side = TRAINED_SIDE if betas is None else 2 * TRAINED_SIDE
    model_config = PortraitsTransformer(_config(config), scale, side)
    model_config.set_inference_dtype(torch.float32, None)
    offload = comfy.model_management.unet_offload_device()
    model = model_config.get_model({}, "", device=offload)
    if betas is not None:
        abar = torch.cumprod(1 - betas, 0)
        model.model_sampling.set_sigmas(((1 - abar) / abar).sqrt())
    patcher_class = comfy.model_patcher.ModelPatcher if disable_dynamic else core.CoreModelPatcher
    device = comfy.model_management.get_torch_device()
    patcher = patcher_class(model, load_device=device, offload_device=offload)
    model.load_model_weights(converted(weights, model_config.unet_config), "", assign=patcher.is_dynamic())
    patcher.cached_patcher_init = (load_transformer, (folder,))
    return patcher


def _trained_betas(root: Path) -> torch.Tensor | None:
    """The noise schedule of a transformer that was not trained under the portraits model's; else None."""
    path = root / "scheduler_config.json"
    betas = json.loads(path.read_text()).get("trained_betas") if path.is_file() else None
    return None if betas is None else torch.tensor(betas, dtype=torch.float64)


def _config(config: dict) -> dict:
    width = config["num_attention_heads"] * config["attention_head_dim"]
    return {
        "in_channels": config["in_channels"],
        "hidden_size": width,
        "num_heads": config["num_attention_heads"],
        "depth": config["num_layers"],
        "caption_channels": config["caption_channels"],
        "patch_size": config["patch_size"],
        "model_max_length": 24,
        "micro_condition": False,
        "pred_sigma": config["out_channels"] != config["in_channels"],
        "base_size": config["sample_size"] // config["patch_size"],
    }


def converted(weights: dict[str, torch.Tensor], config: dict) -> dict[str, torch.Tensor]:
    """diffusers names -> ComfyUI's, by its own map; queries, keys and values that it keeps in one are joined."""
    paths = core.pixart_to_diffusers(config)
    lost = sorted(set(weights) - set(paths))
    if lost:
        raise refuse("transformer weights", lost[:3], "a PixArt-shaped transformer", "use a folder of one that ships")
    slices: dict[str, dict[int, torch.Tensor]] = {}
    for name, value in weights.items():
        where = paths[name]
        key, start = (where, 0) if isinstance(where, str) else (where[0], where[1][1])
        slices.setdefault(key, {})[start] = value
    joined = {key: torch.cat([v[start] for start in sorted(v)]) for key, v in slices.items()}
    # Only training reads it, but ComfyUI's modules need a value for every weight.
    empty = torch.zeros(config["model_max_length"], config["caption_channels"])
    return joined | {"y_embedder.y_embedding": empty}
