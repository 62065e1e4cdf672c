"""Which layers of a network a student's LoRA adapts, and how others call the network."""

from __future__ import annotations

import re

from torch import nn

from ..errors import refuse
from ..families import family_of, layout_of
from ..families.weights import comfyui_name


def part_of(backbone: nn.Module) -> str:
    """``unet`` or ``transformer``: the network's name in a pipeline, and before its layers' names in files."""
    return family_of(backbone).component


def adapted_layers(backbone: nn.Module) -> list[str]:
    """Paths, or their ends, of the layers that get an adapter; of a transformer all linear ones of its blocks.

    Left out are those whose halves stand the other way round in ComfyUI (the last modulation of SD3's text), where a
    LoRA's factors would have to be turned; and whatever all blocks share, such as Chroma's small network.

    Raises:
        VitrineError: The network is of no known family, or diffusers has no adapters for it.
    """
    family = family_of(backbone)
    if not hasattr(backbone, "add_adapter"):
        shown = f"{type(backbone).__name__}, which diffusers has no adapters for"
        raise refuse("backbone", shown, "a diffusers UNet or transformer with add_adapter", "EMD trains through LoRAs")
    if family.adapted:
        return list(family.adapted)
    matches = (re.match(r".*?\.\d+(?=\.|$)", getattr(site, "path", "")) for site in layout_of(backbone))
    blocks = tuple({f"{match[0]}." for match in matches if match})
    layers = {  # peft keeps a layer that it adapts as base_layer, beside its factors
        path.removesuffix(".base_layer"): (layer.out_features, layer.in_features)
        for path, layer in backbone.named_modules()
        if isinstance(layer, nn.Linear) and path.startswith(blocks) and ".lora_" not in path
    }
    return [path for path, shape in layers.items() if not comfyui_name(family.weights, path).swapped(shape)]
