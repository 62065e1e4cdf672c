"""Where the addresses of each model family lie. One generator for each family; diffusers and ComfyUI side by side.

Families are told apart by the modules they have, so neither library is imported.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ..addresses import Site
from ..errors import refuse
from . import dit, unet

_FAMILIES = (
    # (name, modules it has, generator)
    ("diffusers UNet", ("down_blocks", "mid_block", "up_blocks", "conv_in"), unet.diffusers),
    ("ComfyUI UNet", ("input_blocks", "middle_block", "output_blocks"), unet.comfyui),
    ("diffusers Flux", ("transformer_blocks", "single_transformer_blocks"), dit.flux_diffusers),
    ("ComfyUI Flux", ("double_blocks", "single_blocks", "img_in"), dit.flux_comfyui),
    ("diffusers PixArt", ("transformer_blocks", "adaln_single", "caption_projection"), dit.pixart_diffusers),
    ("ComfyUI PixArt", ("blocks", "t_block", "y_embedder"), dit.pixart_comfyui),
    ("diffusers SD3", ("transformer_blocks", "context_embedder", "time_text_embed"), dit.sd3_diffusers),
    ("ComfyUI SD3", ("joint_blocks", "context_embedder"), dit.sd3_comfyui),
)


def layout_of(backbone: nn.Module) -> Iterator[Site]:
    """The sites of a backbone in execution order.

    Raises:
        VitrineError: no family fits.
    """
    for _, has, generate in _FAMILIES:
        if all(hasattr(backbone, n) for n in has):
            return generate(backbone)
    known = ", ".join(name for name, *_ in _FAMILIES)
    raise refuse("backbone", type(backbone).__name__, known, "pass the UNet or transformer itself, not a pipeline")
