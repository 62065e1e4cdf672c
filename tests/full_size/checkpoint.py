"""Full-size SD1.5 and SDXL single-file checkpoints with random float16 weights, in the layout of the models' authors.

Names and shapes come from the networks that ComfyUI loads such files into, made without weights; the weights are drawn
and written tensor by tensor. Needs ComfyUI (``$COMFYUI_PATH``) and 2.0 GiB and 6.5 GiB of disk:

    VITRINE_FULL_SIZE=1 pytest tests/full_size/test_checkpoint.py
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from vitrine.engine.io.files import write_whole
from vitrine_tests import models

FOLDER = Path(os.environ.get("VITRINE_FULL_SIZE_DIR") or "~/.cache/vitrine-full-size").expanduser()
LAYOUT = "1"
"""Part of the file name: one that was drawn by another rule is not taken for this one."""
UNETS: dict[str, dict[str, Any]] = {"sd15": models.SD15, "sdxl": models.SDXL}
NAMES = {"sd15": "SD1.5", "sdxl": "SDXL"}

Listing = dict[str, torch.Tensor]
"""Name in the file -> tensor without content."""


def path_of(family: str) -> Path:
    """Where a family's file lies, written or not."""
    return FOLDER / f"random-{family}-fp16-{LAYOUT}.safetensors"


def ensure(family: str) -> Path:
    """The file, written on the first call."""
    path = path_of(family)
    return path if path.is_file() else write(path, listing(family))


# --- names and shapes ---------------------------------------------------------------------------------------------
def listing(family: str) -> Listing:
    """All tensors of a checkpoint, from ComfyUI's own networks on the meta device."""
    from comfy import supported_models

    kind = {"sd15": supported_models.SD15, "sdxl": supported_models.SDXL}[family]
    config = kind(_unet_config(family))
    parts = {"model.diffusion_model.": _unet(config), "first_stage_model.": _vae()}
    found = {prefix + k: v for prefix, part in parts.items() for k, v in part.state_dict().items()}
    text = config.process_clip_state_dict_for_saving({k: v.to("meta") for k, v in _text(family).items()})
    # The number of each position is stored as an integer; ComfyUI no longer keeps it, some files do.
    return found | {k: v for k, v in text.items() if not k.endswith("position_ids")}


def _unet_config(family: str) -> dict[str, Any]:
    """What ComfyUI detects behind the names and shapes of diffusers' own network."""
    from comfy.model_detection import unet_config_from_diffusers_unet

    names = models.outline(**UNETS[family]).state_dict()
    config: dict[str, Any] = unet_config_from_diffusers_unet(names, torch.float16)
    return config


def _unet(config: Any) -> torch.nn.Module:
    import comfy.ops
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    return UNetModel(**config.unet_config, device="meta", operations=comfy.ops.disable_weight_init)


def _vae() -> torch.nn.Module:
    from comfy.ldm.models.autoencoder import AutoencoderKL

    sizes = {
        "double_z": True,
        "z_channels": 4,
        "resolution": 256,
        "in_channels": 3,
        "out_ch": 3,
        "ch": 128,
        "ch_mult": [1, 2, 4, 4],
        "num_res_blocks": 2,
        "attn_resolutions": [],
        "dropout": 0.0,
    }
    with torch.device("meta"):
        return AutoencoderKL(ddconfig=sizes, embed_dim=4)


def _text(family: str) -> Listing:
    from comfy.sd1_clip import SD1ClipModel
    from comfy.sdxl_clip import SDXLClipModel

    kind = {"sd15": SD1ClipModel, "sdxl": SDXLClipModel}[family]
    found: Listing = kind(device="meta", dtype=torch.float16).state_dict()
    return found


# --- weights ------------------------------------------------------------------------------------------------------
def drawn(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """float32 values of one tensor: torch's usual scale for layers, CLIP's for embeddings, norms near the identity.

    Every layer adds a third of its input's variance, so that nothing grows out of float16, however deep.
    """
    if not shape:
        return torch.tensor(math.log(100.0))  # CLIP's logit scale
    noise = torch.randn(shape, generator=generator)
    if "embedding" in name:
        return noise * 0.02
    if len(shape) == 1:
        return noise * 0.02 + (1.0 if name.endswith("weight") else 0.0)
    return noise * (3 * shape[1:].numel()) ** -0.5


def write(path: Path, tensors: Listing) -> Path:
    """Write a safetensors file of random float16 weights, one tensor in memory at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "content": "random weights of vitrine's tests"}}
    end = 0
    for name, value in tensors.items():
        start, end = end, end + 2 * value.numel()
        header[name] = {"dtype": "F16", "shape": list(value.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def fill(scratch: str) -> None:
        with open(scratch, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for part in _contents(tensors):
                file.write(part)

    return write_whole(path, fill)


def _contents(tensors: Listing) -> Iterator[memoryview]:
    generator = torch.Generator().manual_seed(0)
    for name, value in tensors.items():
        yield drawn(name, value.shape, generator).half().reshape(-1).numpy().data.cast("B")
