"""The portraits model as genuine ComfyUI objects: BaseModel in a patcher, CLIP, VAE, built from state dicts.

ComfyUI's own loaders recognise full-size configurations only (its detection matches fixed widths), and its conversion
of diffusers VAEs assumes four levels, so the tiny model brings its own loader. ComfyUI fixes GroupNorm at 32 groups;
the number the model was trained with is set on the modules after they are built.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import comfy.latent_formats
import comfy.ldm.modules.diffusionmodules.model
import comfy.model_management
import comfy.model_patcher
import comfy.sd
import comfy.sd1_clip
import comfy.supported_models
import comfy.supported_models_base
import comfy.utils
import torch

from ...engine.errors import refuse
from ...engine.io.number_checks import all_finite
from ...engine.portraits.preview import read_preview
from . import compat_comfyui as core

_VOCABULARY = 49408
WEIGHTS = Path(__file__).parents[2] / "engine" / "portraits" / "weights"


def load_model(folder: str, disable_dynamic: bool = False) -> Any:
    """MODEL from a diffusers UNet folder. Also the factory that deep clones call (``cached_patcher_init``)."""
    config, weights = read_part(folder, "unet")
    scale = json.loads((Path(folder) / "vae" / "config.json").read_text())["scaling_factor"]
    model_config = _Portraits(_unet_config(config), LatentFormat(scale, folder))
    model_config.set_inference_dtype(torch.float32, None)
    offload = comfy.model_management.unet_offload_device()
    model = model_config.get_model({}, "", device=offload)
    _set_groups(model.diffusion_model, config["norm_num_groups"])
    patcher_class = comfy.model_patcher.ModelPatcher if disable_dynamic else core.CoreModelPatcher
    device = comfy.model_management.get_torch_device()
    patcher = patcher_class(model, load_device=device, offload_device=offload)
    names = core.unet_to_diffusers(model_config.unet_config)
    renamed = {names[key]: value for key, value in weights.items() if key in names}
    if len(renamed) != len(weights):
        unknown = sorted(set(weights) - set(names))[:3]
        raise refuse("UNet weights", unknown, "an SD-shaped UNet", "use the portraits folder")
    model.load_model_weights(renamed, "", assign=patcher.is_dynamic())
    patcher.cached_patcher_init = (load_model, (folder,))
    return patcher


def load_vae(folder: str) -> Any:
    """VAE from a diffusers AutoencoderKL folder with any number of levels."""
    config, weights = read_part(folder, "vae")
    channels = config["block_out_channels"]
    ddconfig = {
        "double_z": True,
        "z_channels": config["latent_channels"],
        "resolution": 256,
        "in_channels": 3,
        "out_ch": 3,
        "ch": channels[0],
        "ch_mult": [c // channels[0] for c in channels],
        "num_res_blocks": config["layers_per_block"],
        "attn_resolutions": [],
        "dropout": 0.0,
    }
    renamed = {_vae_key(k, len(channels)): _vae_weight(k, v) for k, v in weights.items()}
    params = {"ddconfig": ddconfig, "embed_dim": config["latent_channels"]}
    with _groups_of_autoencoders(config["norm_num_groups"]):
        vae = comfy.sd.VAE(sd=renamed, config={"params": params}, dtype=torch.float32)
    vae.downscale_ratio = vae.upscale_ratio = 2 ** (len(channels) - 1)
    return vae


def load_clip(folder: str) -> Any:
    """CLIP from a diffusers text encoder and tokenizer folder, in float32."""
    config, weights = read_part(folder, "text_encoder")
    length = config["max_position_embeddings"]
    special = {"start": config["bos_token_id"], "end": config["eos_token_id"], "pad": config["eos_token_id"]}

    class Tokenizer(comfy.sd1_clip.SDTokenizer):
        """The folder's own vocabulary and length."""

        def __init__(self, embedding_directory: Any = None, tokenizer_data: dict | None = None, **kwargs: Any) -> None:
            super().__init__(
                str(Path(folder) / "tokenizer"),
                max_length=length,
                embedding_directory=embedding_directory,
                embedding_size=config["hidden_size"],
                tokenizer_data=tokenizer_data or {},
            )

    class TextModel(comfy.sd1_clip.SDClipModel):
        """The folder's own width, depth and special tokens."""

        def __init__(self, device: Any = "cpu", dtype: Any = None, model_options: Any = None, **kwargs: Any) -> None:
            super().__init__(
                device=device,
                dtype=dtype,
                max_length=length,
                textmodel_json_config=dict(config),
                special_tokens=special,
                return_projected_pooled=False,
                model_options=model_options or {},
            )

    clip = comfy.sd.CLIP(
        comfy.supported_models_base.ClipTarget(comfy.sd1_clip.SD1Tokenizer, comfy.sd1_clip.SD1ClipModel),
        tokenizer_data={"clip_l_tokenizer_class": Tokenizer},
        model_options={"clip_l_class": TextModel, "dtype": torch.float32},
    )
    _load_text_weights(clip, weights)
    clip.patcher.cached_patcher_init = (_clip_patcher, (folder,))
    return clip


def _clip_patcher(folder: str, disable_dynamic: bool = False) -> Any:
    return load_clip(folder).patcher


def _load_text_weights(clip: Any, weights: dict[str, torch.Tensor]) -> None:
    """transformers 5 saves the keys without ``text_model.``; ComfyUI's embedding always has CLIP's full vocabulary."""
    renamed = {k if k.startswith("text_model.") else f"text_model.{k}": v for k, v in weights.items()}
    token = "text_model.embeddings.token_embedding.weight"
    rows = _VOCABULARY
    renamed[token] = torch.nn.functional.pad(renamed[token], (0, 0, 0, rows - len(renamed[token])))
    width = renamed[token].shape[1]
    renamed["text_projection.weight"] = torch.eye(width)  # unused, but ComfyUI's module has it and never initialises it
    missing, _ = clip.load_sd(renamed)
    if missing:
        raise refuse("text encoder weights", f"no {missing[:3]}", "a CLIPTextModel folder", "use the portraits folder")


class _Portraits(comfy.supported_models.SD15):
    """SD1.5's model class at another width; the latent scale is the one the VAE was trained with."""

    def __init__(self, unet_config: dict, latent_format: LatentFormat) -> None:
        self.unet_extra_config = {"num_heads": unet_config["num_heads"], "num_head_channels": -1}
        super().__init__(unet_config)
        self.latent_format, self.trained_side = latent_format, 64


class LatentFormat(comfy.latent_formats.LatentFormat):
    """Four channels at a quarter of the picture's side. Empty Latent Image's eighth is enlarged by the sampler.

    Live previews take their colours from the model's folder.
    """

    spacial_downscale_ratio = 4

    def __init__(self, scale: float, folder: str | Path) -> None:
        self.scale_factor = scale
        self.latent_rgb_factors, self.latent_rgb_factors_bias = read_preview(folder)


def read_part(folder: str, part: str) -> tuple[dict, dict[str, torch.Tensor]]:
    """Config and float32 weights of one part of a diffusers folder."""
    root = Path(folder) / part
    files = sorted(root.glob("*model.safetensors"))  # a transformer's folder has its control file as well
    if not (root / "config.json").is_file() or not files:
        raise refuse(f"portraits {part}", str(root), "config.json and a .safetensors file", "reinstall the pack")
    weights, _ = comfy.utils.load_torch_file(str(files[0]), safe_load=True, return_metadata=True)
    weights = {k: v.float() for k, v in weights.items()}
    for key, value in weights.items():
        if not all_finite(value):
            raise refuse(f"portraits {part}", f"NaN or Inf in {key!r}", "finite weights", "reinstall the pack")
    return json.loads((root / "config.json").read_text()), weights


def _unet_config(config: dict) -> dict:
    channels, layers = config["block_out_channels"], config["layers_per_block"]
    depth = [1 if "CrossAttn" in kind else 0 for kind in config["down_block_types"]]
    return {
        "image_size": 32, "in_channels": config["in_channels"], "out_channels": config["out_channels"],
        "model_channels": channels[0], "channel_mult": [c // channels[0] for c in channels],
        "num_res_blocks": [layers] * len(channels), "use_spatial_transformer": True, "transformer_depth_middle": 1,
        "transformer_depth": [d for d in depth for _ in range(layers)],
        "transformer_depth_output": [d for d in depth for _ in range(layers + 1)],
        "context_dim": config["cross_attention_dim"], "num_heads": config["attention_head_dim"],
        "use_linear_in_transformer": False, "adm_in_channels": None, "use_temporal_attention": False,
        "use_temporal_resblock": False, "legacy": False,
    }  # fmt: skip


@contextmanager
def _groups_of_autoencoders(groups: int) -> Iterator[None]:
    """While open, core builds autoencoders with that many groups: with its 32 it cannot build one of 16 channels."""
    layers = comfy.ldm.modules.diffusionmodules.model
    before = layers.ops

    class Ops(before):  # type: ignore[misc, valid-type]
        """Core's layers."""

        @staticmethod
        def GroupNorm(num_groups: int, **settings: Any) -> torch.nn.Module:  # noqa: N802
            """Core's, with the number of groups that the weights were trained with."""
            return before.GroupNorm(num_groups=groups, **settings)

    layers.ops = Ops
    try:
        yield
    finally:
        layers.ops = before


def _set_groups(module: torch.nn.Module, groups: int) -> None:
    """GroupNorm's weights do not depend on the number of groups, its function does. diffusers uses one throughout."""
    for child in module.modules():
        if isinstance(child, torch.nn.GroupNorm):
            child.num_groups = groups


_MID = {
    "mid_block.resnets.0.": "mid.block_1.",
    "mid_block.attentions.0.": "mid.attn_1.",
    "mid_block.resnets.1.": "mid.block_2.",
}
_ATTENTION = {"group_norm.": "norm.", "to_q.": "q.", "to_k.": "k.", "to_v.": "v.", "to_out.0.": "proj_out."}


def _vae_key(key: str, levels: int) -> str:
    """diffusers AutoencoderKL key -> ldm key; the decoder counts its levels the other way round."""
    for old, new in _MID.items():
        key = key.replace(old, new)
    if ".mid.attn_1." in key:
        for old, new in _ATTENTION.items():
            key = key.replace(old, new)
    words = key.split(".")
    if len(words) > 2 and words[1] in ("down_blocks", "up_blocks"):
        level = int(words[2]) if words[1] == "down_blocks" else levels - 1 - int(words[2])
        words[1:3] = [words[1].split("_")[0], str(level)]
        key = ".".join(words)
        for old, new in (("resnets.", "block."), ("downsamplers.0.", "downsample."), ("upsamplers.0.", "upsample.")):
            key = key.replace(old, new)
    return key.replace("conv_shortcut", "nin_shortcut").replace("conv_norm_out", "norm_out")


def _vae_weight(key: str, value: torch.Tensor) -> torch.Tensor:
    """Attention projections are 1 x 1 convolutions in ldm."""
    projection = "attentions" in key and "group_norm" not in key and value.ndim == 2
    return value[:, :, None, None] if projection else value
