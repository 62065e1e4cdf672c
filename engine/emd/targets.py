"""The layers that a student's LoRA adapts, and the network's component name."""

from __future__ import annotations

import re

from torch import nn

from ..errors import refuse
from ..families import family_of, layout_of
from ..families.weights import comfyui_name


def part_of(backbone: nn.Module) -> str:
    """``unet`` or ``transformer``: the network's component name in a pipeline, and its prefix in files."""
    return family_of(backbone).component


def adapted_layers(backbone: nn.Module) -> list[str]:
    """Paths, or their suffixes, of the adapted layers: in transformers all linear layers of blocks.

    Layers whose halves are swapped in ComfyUI are left out (the last text modulation of SD3), since a
    LoRA's factors would differ, and so are layers shared by all blocks, such as Chroma's modulation network.
    """
    family = family_of(backbone)
    if not hasattr(backbone, "add_adapter"):
        shown = f"{type(backbone).__name__}, which diffusers has no adapters for"
        raise refuse("backbone", shown, "a diffusers UNet or transformer with add_adapter", "EMD trains through LoRAs")
    if family.adapted:
        return list(family.adapted)
    matches = (re.match(r".*?\.\d+(?=\.|$)", getattr(site, "path", "")) for site in layout_of(backbone))
    blocks = tuple({f"{match[0]}." for match in matches if match})
    layers = {  # peft keeps an adapted layer as base_layer, next to its factors
        path.removesuffix(".base_layer"): (layer.out_features, layer.in_features)
        for path, layer in backbone.named_modules()
        if isinstance(layer, nn.Linear) and path.startswith(blocks) and ".lora_" not in path
    }
    return [path for path, shape in layers.items() if not comfyui_name(family.weights, path).swapped(shape)]
