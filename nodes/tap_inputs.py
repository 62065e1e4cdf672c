"""The inputs that say what of a picture is tapped, the same in every node that taps pictures, and the tap itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from comfy_api.latest import io

from ..engine.activations import PRESETS, Activations, TapConfig, preset, tap_latents
from ..engine.activations.gdf_protocol import PROTOCOLS, check_protocol, gdf_generator, gdf_samples, published_timestep
from ..engine.errors import refuse
from ..engine.tracing.addresses import AUTO, resolve
from .comfy.conditioning import condition_of
from .comfy.model import backbone_of, denoiser_of, encode, encode_samples, is_sdxl
from .comfy.patches import refuse_other_tokens
from .comfy.progress import progress
from .config_inputs import inputs_of

_OWN = "layers below"
_TYPED = "layers above"
HELP = (
    "One layer name or pattern a line, e.g. up-level*-cross-q; auto: a layer that every model has. A wrong name is "
    "refused with the nearest valid ones."
)


def selection_inputs() -> list[io.Input]:
    """The inputs that say which layers are tapped, and how; the same in every node that taps pictures."""
    return [
        io.Combo.Input(
            "selection",
            options=[_OWN, *PRESETS],
            default=_OWN,
            tooltip="A published selection of layers, or those typed below.",
        ),
        io.String.Input("layers", multiline=True, default=AUTO, tooltip=HELP),
        *inputs_of(TapConfig, "timestep"),
        io.Int.Input("seed", default=0, min=0, max=2**32, control_after_generate=True, tooltip="First noise seed."),
        io.Int.Input("ensemble", default=1, min=1, max=64, tooltip="Average over this many noises (DIFT: 8)."),
    ]


def remedy_inputs() -> list[io.Input]:
    """DiTF's remedy for transformers; at the end of a node's inputs, where they were added."""
    return [
        *inputs_of(TapConfig, "modulate", optional=True),
        io.String.Input(
            "discard",
            default="",
            optional=True,
            tooltip="Massive channels to set to zero, e.g. 154 1446 for Flux.1-dev. "
            "Look Inside (Activation Tap)'s report names them.",
        ),
    ]


def added_selection(tooltip: str) -> io.Input:
    """A published selection instead of the layers typed above it, where it was added later."""
    return io.Combo.Input("selection", options=[_TYPED, *PRESETS], default=_TYPED, optional=True, tooltip=tooltip)


def published_sites(choice: str) -> tuple[str, ...] | None:
    """The layers of a published selection; None where the layers above count."""
    return None if choice == _TYPED else preset(choice).addresses


def protocol_input() -> io.Input:
    """Whose conventions a tap follows; after the inputs above, where it was added."""
    return io.Combo.Input(
        "protocol",
        options=list(PROTOCOLS),
        default=PROTOCOLS[0],
        optional=True,
        tooltip="gdf: as the authors' code on SD 1.x and SDXL: posterior sample and noise of the whole batch, timestep "
        "51 for 50 on SD 1.x, features joined as they are. Square pictures of the model's own size.",
    )


def sized(kind: str, batch: torch.Tensor) -> str:
    """A batch of pictures (B, H, W, C) or masks (B, H, W) in words: number, width and height."""
    return f"{len(batch)} {kind} of {batch.shape[2]} x {batch.shape[1]}"


def tap_images(
    model: Any, vae: Any, image: torch.Tensor, positive: list, config: TapConfig, protocol: str = PROTOCOLS[0]
) -> Activations:
    """Activations of IMAGE (B, H, W, C), encoded once."""
    refuse_other_tokens(model, (site.address for site in resolve(backbone_of(model), list(config.addresses))))
    if not check_protocol(protocol):
        latents = encode(model, vae, image)
        cond = condition_of(model, positive, latents, config.timestep)
        return tap_latents(denoiser_of(model), latents, cond, config, progress())
    if image.shape[1] != image.shape[2]:
        shown, accepted = sized("pictures", image), "square pictures under protocol 'gdf'"
        raise refuse("image size", shown, accepted, "squeeze them to the model's own size")
    config = replace(config, timestep=published_timestep(config.timestep, is_sdxl(model)), posterior="sample")
    draws: list[torch.Tensor] = []

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        draws.extend(gdf_samples(config.seeds, shape))
        return draws[0]

    gdf_generator(config.seeds)  # refuses several before the VAE runs
    latents = encode_samples(model, vae, image, draw)
    cond, noise = condition_of(model, positive, latents, config.timestep), draws[1][None].to(latents)
    return tap_latents(denoiser_of(model), latents, cond, config, progress(), noise=noise)


def selection_config(
    choice: str, typed: str, timestep: float, seed: int, ensemble: int, remedy: tuple[bool, str], dtype: str = "float32"
) -> TapConfig:
    """What the inputs above ask for; a published selection brings its own remedy.

    Args:
        remedy: ``modulate`` and ``discard``.
    """
    settings: dict[str, Any] = {"timestep": timestep, "seeds": tuple(range(seed, seed + ensemble)), "dtype": dtype}
    modulate, discard = remedy
    words = discard.replace(",", " ").split()
    if not all(word.isdecimal() and len(word) < 10 for word in words):
        raise refuse("discard", discard, "channel numbers from 0", "e.g. 154 1446")
    settings |= {"modulate": True} if modulate else {}
    settings |= {"discard": tuple(map(int, words))} if words else {}
    return TapConfig(tuple(typed.split()), **settings) if choice == _OWN else preset(choice).config(**settings)
