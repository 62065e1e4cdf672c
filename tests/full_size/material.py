"""What goes with the checkpoints: the configuration diffusers reads them by, LoRAs of their shape, a picture."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, EulerDiscreteScheduler
from transformers import CLIPTextConfig, CLIPTokenizer
from vitrine.engine.w2w import LoraLayer, write_lora
from vitrine_tests import models

from .checkpoint import FOLDER, UNETS, ensure

COMFYUI = Path(os.environ.get("COMFYUI_PATH", "~/comfy/ComfyUI")).expanduser()
VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "latent_channels": 4,
    "layers_per_block": 2,
    "sample_size": 512,
}
SCALES = {"sd15": 0.18215, "sdxl": 0.13025}
BIG_CLIP = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "hidden_act": "gelu",
    "projection_dim": 1280,
}
SMALL_CLIP = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
CLASSES = {"sd15": "StableDiffusionPipeline", "sdxl": "StableDiffusionXLPipeline"}


# --- for diffusers ------------------------------------------------------------------------------------------------
def configuration(family: str) -> Path:
    """A pipeline folder without weights, for ``from_single_file``: no hub is asked. CLIP's vocabulary is ComfyUI's."""
    folder = FOLDER / f"config-{family}"
    outline = models.outline(**UNETS[family])
    outline.save_config(folder / "unet")
    with torch.device("meta"):
        AutoencoderKL(**VAE, scaling_factor=SCALES[family]).save_config(folder / "vae")
    scheduler = DDIMScheduler(clip_sample=False, set_alpha_to_one=False, **BETAS)
    if family == "sdxl":
        scheduler = EulerDiscreteScheduler(timestep_spacing="leading", **BETAS)
    scheduler.save_config(folder / "scheduler")
    parts = {"unet": ["diffusers", "UNet2DConditionModel"], "vae": ["diffusers", "AutoencoderKL"]}
    parts["scheduler"] = ["diffusers", type(scheduler).__name__]
    parts |= _text(folder, "", SMALL_CLIP, "CLIPTextModel", "<|endoftext|>")
    if family == "sdxl":
        parts |= _text(folder, "_2", BIG_CLIP, "CLIPTextModelWithProjection", "!")
    else:
        parts |= {"safety_checker": [None, None], "feature_extractor": [None, None]}
    index = {"_class_name": CLASSES[family], "_diffusers_version": "0.36.0", **parts}
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def _text(folder: Path, ending: str, sizes: dict[str, Any], kind: str, pad: str) -> dict[str, list]:
    CLIPTextConfig(**sizes, architectures=[kind]).save_pretrained(folder / f"text_encoder{ending}")
    files = COMFYUI / "comfy" / "sd1_tokenizer"
    tokenizer = CLIPTokenizer(str(files / "vocab.json"), str(files / "merges.txt"), pad_token=pad, model_max_length=77)
    tokenizer.save_pretrained(folder / f"tokenizer{ending}")
    return {
        f"text_encoder{ending}": ["transformers", kind],
        f"tokenizer{ending}": ["transformers", "CLIPTokenizer"],
    }


# --- LoRAs --------------------------------------------------------------------------------------------------------
@functools.cache
def _layers(family: str) -> dict[str, tuple[int, int]]:
    """Cross-attention layers of the UNet and their weights' shapes."""
    ends = (".attn2.to_q", ".attn2.to_k", ".attn2.to_v", ".attn2.to_out.0")
    modules = models.outline(**UNETS[family]).named_modules()
    return {path: tuple(module.weight.shape) for path, module in modules if path.endswith(ends)}


def loras(family: str, folder: Path, count: int = 6) -> list[Path]:
    """LoRAs of rank 1 that began at one start and moved apart, as a folder of one kind has them."""
    paths = []
    for number in range(count):
        first, own = (torch.Generator().manual_seed(seed) for seed in (0, 100 + number))
        layers = {
            path: LoraLayer(
                torch.randn(1, wide, generator=first) * wide**-0.5,
                torch.randn(high, 1, generator=own) * 0.02 * high**-0.5,
                1.0,
            )
            for path, (high, wide) in _layers(family).items()
        }
        paths.append(write_lora(folder / f"{family}-{number}.safetensors", layers, dtype=torch.float16))
    return paths


# --- pictures -----------------------------------------------------------------------------------------------------
def pictures(count: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """IMAGE (count, side, side, 3) of the portraits' renderer, and MASK (count, side, side) of one part."""
    from vitrine.engine.portraits import PARTS, render, sample_scenes

    drawn = render(sample_scenes(range(7_000_000, 7_000_000 + count)), side)
    return drawn.images.permute(0, 2, 3, 1), (drawn.parts == PARTS.index("shirt")).float()


def checkpoint(family: str) -> Path:
    """The single file."""
    return ensure(family)
