"""A tap pipeline's call: its settings, its random numbers, and the pictures it gives back."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import torch
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image

from ..activations.activation_pca import PCABasis, pca_rgb
from ..activations.container import Activations
from ..activations.presets import preset as find_preset
from ..activations.tap_config import TapConfig
from ..errors import refuse
from ..runtime.compat_diffusers import loaded_from
from .adapter import network_of
from .conventions import Generators

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

MEANINGLESS = {
    "negative_prompt": "a tap is one forward, without guidance",
    "guidance_scale": "a tap is one forward, without guidance",
    "num_inference_steps": "a tap is one forward; tap_steps taps a sampling run",
    "callback_on_step_end": "a tap is one forward; callback= follows the pictures",
    "num_images_per_prompt": "pictures come in; seeds= averages over noises",
    "height": "use size=",
    "width": "use size=",
    "latents": "pass them as the picture",
    "cross_attention_kwargs": "set the strength of an adapter with set_adapters()",
}
"""What the stock pipelines take and a tap does not, and what to do instead."""


def tap_config(
    addresses: str | list[str] | None,
    preset: str | None,
    timestep: float | None,
    seeds: int | list[int] | None,
    generator: Generators | None,
    settings: dict[str, Any],
) -> TapConfig:
    """The caller's settings over the preset's over the defaults."""
    if addresses is None and preset is None:
        raise refuse("addresses", None, "layer names, globs, or preset=...", "see vitrine.engine.activations.PRESETS")
    if seeds is not None and generator is not None:
        raise refuse("seeds and generator", "both", "one of them", "a generator gives one noise a picture")
    chosen = dict(settings)
    if addresses is not None:
        chosen["addresses"] = addresses
    if timestep is not None:
        chosen["timestep"] = timestep
    if seeds is not None or generator is not None:
        chosen["seeds"] = (0,) if generator is not None else seeds
    return TapConfig(**chosen) if preset is None else find_preset(preset).config(**chosen)


def check_generators(generator: Generators | None, count: int) -> None:
    """Refuse anything but one generator, or one for each picture."""
    each = generator if isinstance(generator, list) else [generator] * count
    if generator is None:
        return
    if len(each) != count or not all(isinstance(g, torch.Generator) for g in each):
        shown = f"{len(each)} entries"
        raise refuse("generator", shown, f"one torch.Generator, or {count}", "one for each picture")


def drawn(generator: Generators, shape: tuple[int, ...]) -> torch.Tensor:
    """Standard normal float32 (B, ...) on the CPU, sampled on the generator's device, as diffusers does."""
    first = generator[0] if isinstance(generator, list) else generator
    return randn_tensor(shape, generator=generator, device=first.device, dtype=torch.float32).cpu()


def pca_pictures(
    activations: Activations, addresses: list[str], basis: dict[str, PCABasis] | None, height: int, width: int
) -> dict[str, list[Image.Image]]:
    """PCA pictures of every site with a grid, as large as the input."""
    pictures = {}
    for address in addresses:
        activation = activations[address]
        if activation.grid is None or activation.tensor.ndim != 4:
            continue
        rgb = pca_rgb(activation, (basis or {}).get(address), (height, width))
        arrays = (rgb * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
        pictures[address] = [Image.fromarray(a) for a in arrays]
    return pictures


def model_id(pipe: DiffusionPipeline) -> str:
    """A hub id as it is; of a local folder only its name, so that saved taps carry no machine's paths."""
    name = loaded_from(pipe.config) or loaded_from(network_of(pipe).config)
    return PurePath(name).name if PurePath(name).is_absolute() or name.startswith(".") else name
