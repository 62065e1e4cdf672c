"""What a model family has to say of itself. Each family is one file of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..attention import text_bias
from ..condition import Condition
from ..errors import refuse
from ..site import Site

Call = Callable[[torch.Tensor, torch.Tensor, Condition], torch.Tensor]
"""(x_t (B, C, H, W) or (B, C, T, H, W), t (B,), Condition) -> the network's own prediction, of x_t's shape."""


# --- a running forward ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Inputs:
    """The arguments of a forward that is about to run.

    Attributes:
        net: the backbone.
        args, kwargs: what it was called with.
        sides: (N, 2) row and column of each image token -> (rows, columns); read from the device once a sampling run.
        known: the latents' (h, w) where the caller said it, so that nothing need be read.
    """

    net: Any
    args: tuple
    kwargs: Mapping[str, Any]
    sides: Callable[[torch.Tensor], tuple[int, int]]
    known: tuple[int, int] | None = None

    def __call__(self, place: int, *names: str) -> Any:
        """An argument by its names, else by its place; None where it was not given."""
        named = next((self.kwargs[n] for n in names if self.kwargs.get(n) is not None), None)
        return self.args[place] if named is None and 0 <= place < len(self.args) else named


@dataclass(frozen=True)
class Tokens:
    """What hooks must know of a forward to find image and text tokens in it.

    Attributes:
        batch: rows.
        size: (h, w) of the latents.
        frames: of a video's latents.
        text: text tokens, counted as the blocks see them (with their padding).
        text_start, image_start: where each begins in a sequence that holds both; images behind the text by default.
        bias: (B, 1, text) added to the scores of text keys, which hides padding; or None.
    """

    batch: int
    size: tuple[int, int] | None
    frames: int = 1
    text: int = 0
    text_start: int = 0
    image_start: int = -1
    bias: torch.Tensor | None = None

    @property
    def first_image(self) -> int:
        """Row of the first image token in a sequence that holds both."""
        return self.text if self.image_start < 0 else self.image_start


def plain_tokens(inputs: Inputs) -> Tokens:
    """Latents (B, C, [T,] h, w) as the first argument, text (B, N, C) as the third: ComfyUI's networks, and most UNets.

    A mask is diffusers' ``encoder_attention_mask``.
    """
    x = inputs(0, "hidden_states", "sample", "x")
    text = inputs(2, "encoder_hidden_states", "context")
    size = (x.shape[-2], x.shape[-1]) if x.ndim in (4, 5) else None
    count = text.shape[1] if isinstance(text, torch.Tensor) and text.ndim == 3 else 0
    bias = text_bias(inputs.kwargs.get("encoder_attention_mask"))
    return Tokens(x.shape[0], size, x.shape[2] if x.ndim == 5 else 1, count, bias=bias)


# --- a family -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Side:
    """A family in one library.

    Attributes:
        kind: name of the backbone's class; a subclass counts. The library itself is not imported.
        sites: every site of a backbone in execution order.
        tokens: reads a forward's arguments.
        fits: tells families apart that share a class.
    """

    kind: str
    sites: Callable[[Any], Iterator[Site]]
    tokens: Callable[[Inputs], Tokens] = plain_tokens
    fits: Callable[[Any], bool] = lambda net: True


def kl_scaled(vae: Any, z: torch.Tensor) -> torch.Tensor:
    """(z - shift) * scaling: diffusers' convention for every AutoencoderKL."""
    return (z - (getattr(vae.config, "shift_factor", None) or 0.0)) * vae.config.scaling_factor


def kl_unscaled(vae: Any, x: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`kl_scaled`."""
    z = x / vae.config.scaling_factor
    shift = getattr(vae.config, "shift_factor", None)
    return z if shift is None else z + shift


def per_channel(vae: Any, z: torch.Tensor) -> torch.Tensor:
    """(z - mean) / std of each channel, (B, C, 1, h, w) -> (B, C, h, w): the VAEs of Wan and Qwen-Image."""
    mean, std = (
        torch.tensor(v, device=z.device).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std)
    )
    scaled = (z - mean) / std
    return scaled[:, :, 0] if scaled.shape[2] == 1 else scaled


def per_channel_unscaled(vae: Any, x: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`per_channel`: (B, C, h, w), or with frames -> (B, C, T, h, w)."""
    x = x[:, :, None] if x.ndim == 4 else x
    mean, std = (
        torch.tensor(v, device=x.device, dtype=x.dtype).view(1, -1, 1, 1, 1)
        for v in (vae.config.latents_mean, vae.config.latents_std)
    )
    return x * std + mean


def vae_factor(vae: Any) -> int:
    """Pixels on a side of one position of a diffusers VAE's latents, whichever way its config says it."""
    config = vae.config
    halvings = len(config.get("block_out_channels") or (0,)) - 1 or len(config.get("temperal_downsample") or ())
    return int(config.get("scale_factor_spatial") or 2**halvings)


@dataclass(frozen=True)
class Latent:
    """What a family's latents look like.

    Attributes:
        channels: usual number of channels.
        factor: usual number of pixels for each latent position.
        patch: latent positions on a token's side, by which a latent's sides must be divisible.
        frames: the VAE and ComfyUI have a frame axis (B, C, T, h, w), of length one for pictures.
        packed: VAE positions on a latent position's side.
        scaled: (VAE, what it encodes) -> latents in the network's scale.
        unscaled: the inverse: (VAE, latents) -> what it decodes.
    """

    channels: int = 4
    factor: int = 8
    patch: int = 1
    frames: bool = False
    packed: int = 1
    scaled: Callable[[Any, torch.Tensor], torch.Tensor] = kl_scaled
    unscaled: Callable[[Any, torch.Tensor], torch.Tensor] = kl_unscaled


Trained = Callable[[Any], tuple[int, int] | None]
"""backbone -> (width, height) in pixels that it was trained at; None where the class alone does not say."""


def square(side: int) -> Trained:
    """Of a family whose last stage of training had pictures of ``side`` x ``side`` pixels, or of that area."""
    return lambda net: (side, side)


@dataclass(frozen=True)
class Family:
    """One model family in both libraries.

    Attributes:
        name: as people call it.
        diffusers, comfyui: its two layouts.
        call: (backbone, x_t, t in 0..1000 or the model's own steps, Condition) -> prediction, for diffusers' backbone.
            Of a flow network that is eps - x0, whatever sign and time the network itself has.
        latent: shape of its latents.
        condition: (diffusers pipeline, prompts, height, width) -> Condition, or None where a pipeline class of ours
            encodes prompts itself.
        weights: names of modules, diffusers -> ComfyUI, as fragments of a path (``*`` is any number). A fragment with
            ``|n`` is the n-th block of rows of a fused weight, counted from its end where n is negative; ``|swap`` and
            ``|swap pair`` exchange halves of rows, see :class:`~vitrine.engine.families.weights.Place`.
        strangeness: what keeps a backbone of these classes from being of the family (``what is given``, ``what to
            do``), None where nothing does.
        trained: the size its published weights were trained at; a config or a user that says another comes first.
    """

    name: str
    diffusers: Side
    comfyui: Side
    call: Callable[[Any, torch.Tensor, torch.Tensor, Condition], torch.Tensor]
    latent: Latent = Latent()
    condition: Callable[[Any, list[str], int, int], Condition] | None = None
    weights: Mapping[str, str] = field(default_factory=dict)
    strangeness: Callable[[Any], tuple[str, str] | None] = lambda net: None
    trained: Trained = lambda net: None

    def side(self, backbone: nn.Module) -> Side | None:
        """The side that a backbone is of; None for any other.

        Raises:
            VitrineError: If the class is the family's, but its modules are arranged or wired otherwise.
        """
        classes = {kind.__name__ for kind in type(backbone).__mro__}
        ours = self.diffusers if "ModelMixin" in classes else self.comfyui  # some classes have one name in both
        if ours.kind not in classes or not ours.fits(backbone):
            return None
        strange = self.strangeness(backbone)
        if strange is not None:
            raise refuse("backbone", strange[0], f"{self.name} as the libraries build it", strange[1])
        return ours
