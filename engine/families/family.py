"""The record of a model family. Each family is one file of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..network.attention import text_bias
from ..network.condition import Condition
from ..network.site import Site
from .facts import Published, Refusal, RopeReader, SizeInput, TimeEmbedding, TimeInput

Call = Callable[[torch.Tensor, torch.Tensor, Condition], torch.Tensor]
"""(x_t (B, C, H, W) or (B, C, T, H, W), t (B,), Condition) -> the network's own prediction, of x_t's shape."""


# --- a running forward ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Inputs:
    """The arguments of a forward that is about to run.

    Attributes:
        net: the backbone.
        args, kwargs: its arguments.
        sides: (N, 2) row and column of each image token -> (height, width); one device synchronisation per sampling
            run.
        known: the latents' (h, w), if the caller passed it, to avoid reading it.
    """

    net: Any
    args: tuple
    kwargs: Mapping[str, Any]
    sides: Callable[[torch.Tensor], tuple[int, int]]
    known: tuple[int, int] | None = None

    def __call__(self, index: int, *names: str) -> Any:
        """An argument by its names, else by its position; None if it was not passed."""
        named = next((self.kwargs[n] for n in names if self.kwargs.get(n) is not None), None)
        return self.args[index] if named is None and 0 <= index < len(self.args) else named


@dataclass(frozen=True)
class Tokens:
    """Positions of image and text tokens in a forward.

    Attributes:
        batch: batch rows.
        size: (h, w) of the latents.
        frames: of a video's latents.
        text: text tokens, as many as the blocks see (with padding).
        text_start, image_start: where each starts in a joint sequence; images follow the text by default.
        bias: (B, 1, text) added to the scores of text keys to mask padding; or None.
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
        """Index of the first image token in a joint sequence."""
        return self.text if self.image_start < 0 else self.image_start


def plain_tokens(inputs: Inputs) -> Tokens:
    """Latents (B, C, [T,] h, w) as the first argument, text (B, N, C) as the third: ComfyUI's networks and most UNets.

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
        fits: distinguishes families that share a class.
        time: where the backbone embeds its timestep; None if no control embedding can be added there.
        sizes: where it takes the image size, None if it does not. Reads diffusers' backbone, or ComfyUI's
            ``BaseModel``.
        variant: which of the family's models it is, if methods differ. Reads what ``sizes`` reads.
        refuses: ``gradients``, ``size`` (to generate at another than the trained size) -> why that is unsupported.
    """

    kind: str
    sites: Callable[[Any], Iterator[Site]]
    tokens: Callable[[Inputs], Tokens] = plain_tokens
    fits: Callable[[Any], bool] = lambda net: True
    time: TimeEmbedding | None = None
    sizes: Callable[[Any], SizeInput | None] | None = None
    variant: Callable[[Any], str] = lambda model: ""
    refuses: Mapping[str, Refusal] = field(default_factory=dict)


def kl_scaled(vae: Any, z: torch.Tensor) -> torch.Tensor:
    """(z - shift) * scaling, as diffusers scales every AutoencoderKL; (z - mean) * scaling / std where it has both."""
    moments = _moments(vae, z, z.dtype)
    if moments is not None:
        return (z - moments[0]) * vae.config.scaling_factor / moments[1]
    return (z - (getattr(vae.config, "shift_factor", None) or 0.0)) * vae.config.scaling_factor


def kl_unscaled(vae: Any, x: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`kl_scaled`."""
    moments = _moments(vae, x, x.dtype)
    if moments is not None:
        return x * moments[1] / vae.config.scaling_factor + moments[0]
    z = x / vae.config.scaling_factor
    shift = getattr(vae.config, "shift_factor", None)
    return z if shift is None else z + shift


def _moments(vae: Any, like: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Mean and standard deviation per channel, (1, C, 1, 1), with frames (1, C, 1, 1, 1), of a VAE that has both."""
    values = [getattr(vae.config, name, None) for name in ("latents_mean", "latents_std")]
    if None in values:
        return None
    shape = (1, -1, *[1] * (like.ndim - 2))
    mean, std = (torch.tensor(value, device=like.device, dtype=dtype).view(shape) for value in values)
    return mean, std


def per_channel(vae: Any, z: torch.Tensor) -> torch.Tensor:
    """(z - mean) / std per channel, (B, C, 1, h, w) -> (B, C, h, w): the VAEs of Wan and Qwen-Image."""
    moments = _moments(vae, z, torch.float32)
    assert moments is not None
    scaled = (z - moments[0]) / moments[1]
    return scaled[:, :, 0] if scaled.shape[2] == 1 else scaled


def per_channel_unscaled(vae: Any, x: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`per_channel`: (B, C, h, w), or with frames -> (B, C, T, h, w)."""
    x = x[:, :, None] if x.ndim == 4 else x
    moments = _moments(vae, x, x.dtype)
    assert moments is not None
    return x * moments[1] + moments[0]


def vae_factor(vae: Any) -> int:
    """Image pixels per latent position, along one side, of any diffusers VAE."""
    config = vae.config
    halvings = len(config.get("block_out_channels") or (0,)) - 1 or len(config.get("temperal_downsample") or ())
    return int(config.get("scale_factor_spatial") or 2**halvings)


@dataclass(frozen=True)
class Latent:
    """The shape of a family's latents.

    Attributes:
        channels: default number of channels.
        factor: default number of image pixels per latent position, along one side.
        patch: latent positions per token along one side; sides of latents must be divisible by it.
        frames: the VAE and ComfyUI have a frame axis (B, C, T, h, w), of length one for images.
        packed: VAE positions per latent position along one side.
        scaled: (VAE, its encoder's output) -> latents in the network's scale.
        unscaled: the inverse: (VAE, latents) -> its decoder's input.
    """

    channels: int = 4
    factor: int = 8
    patch: int = 1
    frames: bool = False
    packed: int = 1
    scaled: Callable[[Any, torch.Tensor], torch.Tensor] = kl_scaled
    unscaled: Callable[[Any, torch.Tensor], torch.Tensor] = kl_unscaled


Trained = Callable[[Any], tuple[int, int] | None]
"""backbone -> (width, height) in pixels that it was trained at; None if the class does not determine it."""


def square(side: int) -> Trained:
    """For a family whose last training stage had images of ``side`` x ``side`` pixels, or of that area."""
    return lambda net: (side, side)


@dataclass(frozen=True)
class Family:
    """One model family in both libraries.

    Attributes:
        name: display name.
        diffusers, comfyui: its two layouts.
        call: (backbone, x_t, t in 0..1000 or the model's own timesteps, Condition) -> prediction, for diffusers'
            backbone. For flow networks the prediction is eps - x0, whatever sign and time the network itself uses.
        latent: shape of its latents.
        condition: (diffusers pipeline, prompts, height, width) -> Condition, or None if a pipeline class of ours
            encodes prompts itself.
        weights: names of modules, diffusers -> ComfyUI, as fragments of a path (``*`` is any number). A fragment with
            ``|n`` is the n-th block of rows of a fused weight, counted from its end if n is negative; ``|swap`` and
            ``|swap pair`` exchange halves of rows, see :class:`~vitrine.engine.families.weights.ComfyUIName`.
        unsupported_reason: why a backbone of these classes is not of the family, (``what is given``,
            ``what to do``); None if it is.
        trained: the size its published weights were trained at; a config or a user's value takes precedence.
        component: the backbone's name in a diffusers pipeline, and the prefix of its layers in files.
        time_input: what diffusers pipelines pass as its timestep.
        stacked: its pipelines run guidance as one forward, negative prompt's batch rows first, and say so by
            ``do_classifier_free_guidance``.
        guidance: name of the pipelines' argument, and its value for no guidance.
        masks_optional: the pipelines take encoded prompts without a mask if they are not padded.
        rope_readers: class of a rotary embedding -> function that recomputes it for other angles.
        rope_tables: class of an embedding with tables of positions -> its attribute with the axes' widths.
        grid_scale: (backbone, latent side) -> the divisor of positions that the network computes itself.
        adapted: suffixes of the layer paths that a student's LoRA adapts; by default all linear layers of blocks.
        renamed: (path of ComfyUI's or ldm's module, repeats of a level) -> diffusers' path, if a table cannot express
            it.
        lora_paths: pattern of layer paths in LoRA files that distinguish ``published``; empty: all.
        modules: names of all modules with a weight in both libraries, ``*`` for an entry of a list; names in LoRA
            files are read by them, see :mod:`~vitrine.engine.families.module_names`.
        blocks: list of blocks -> its lengths in published models, where families share names of modules.
        published: models of the family that methods must distinguish.
    """

    name: str
    diffusers: Side
    comfyui: Side | None = None
    call: Callable[[Any, torch.Tensor, torch.Tensor, Condition], torch.Tensor] | None = None
    latent: Latent = Latent()
    condition: Callable[[Any, list[str], int, int], Condition] | None = None
    weights: Mapping[str, str] = field(default_factory=dict)
    unsupported_reason: Callable[[Any], tuple[str, str] | None] = lambda net: None
    trained: Trained = lambda net: None
    component: str = "transformer"
    time_input: TimeInput = "s"
    stacked: bool = False
    guidance: tuple[str, float] = ("guidance_scale", 1.0)
    masks_optional: bool = False
    rope_readers: Mapping[str, RopeReader] = field(default_factory=dict)
    rope_tables: Mapping[str, str] = field(default_factory=dict)
    grid_scale: Callable[[Any, int], float] | None = None
    adapted: tuple[str, ...] = ()
    renamed: Callable[[str, int], str] | None = None
    lora_paths: str = ""
    modules: tuple[str, ...] = ()
    blocks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    published: tuple[Published, ...] = ()

    @property
    def flow(self) -> bool:
        """Whether its networks take a flow time, so that schedulers with a beta table do not suit them."""
        return self.time_input != "timestep"
