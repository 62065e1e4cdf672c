"""What a model family has to say of itself. Each family is one file of this folder."""

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
        sites: every site of a backbone in execution order; None where the family has no addresses.
        tokens: reads a forward's arguments.
        fits: tells families apart that share a class.
        time: where the backbone embeds its timestep; None where no control can be added to it.
        sizes: where it takes the picture's size, None where it takes none. Reads diffusers' backbone, or ComfyUI's
            ``BaseModel``.
        variant: which of the family's models it is, where methods differ. Reads what ``sizes`` reads.
        refuses: ``gradients``, ``size`` (to draw at another size than the trained one) -> why that cannot be done.
    """

    kind: str
    sites: Callable[[Any], Iterator[Site]] | None = None
    tokens: Callable[[Inputs], Tokens] = plain_tokens
    fits: Callable[[Any], bool] = lambda net: True
    time: TimeEmbedding | None = None
    sizes: Callable[[Any], SizeInput | None] | None = None
    variant: Callable[[Any], str] = lambda model: ""
    refuses: Mapping[str, Refusal] = field(default_factory=dict)


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
        unsupported_reason: what keeps a backbone of these classes from being of the family, (``what is given``,
            ``what to do``); None where nothing does.
        trained: the size its published weights were trained at; a config or a user that says another comes first.
        unaddressed: why no layer has an address; such a family is known for what other methods read here.
        component: the backbone's name in a diffusers pipeline, and before its layers in files.
        time_input: what diffusers' pipelines tell it as its time.
        stacked: they run the negative prompt's rows in front of the prompt's, in one forward, and say so by
            ``do_classifier_free_guidance``.
        stacking: names of pipelines that guide in one forward of [negative, positive] rows.
        guidance: name of their argument, and the value of it that is none.
        masks_optional: they take encoded prompts without a mask, for prompts that are not padded.
        rope_readers: class of a rotary embedding -> how it is computed anew for other angles.
        rope_tables: class of one that looks positions up in tables -> its attribute with the axes' widths.
        grid_scale: (backbone, latents on a side) -> the divisor of positions that a network works out by itself.
        adapted: ends of the paths of the layers that a student's LoRA adapts; by default all linear ones of blocks.
        renamed: (path of ComfyUI's or ldm's module, repeats of a level) -> diffusers', where no table can say it.
        lora_paths: a pattern of the paths of layers in LoRA files by which ``published`` are told apart.
        underscored: names of modules with an underscore of their own that ``weights`` lacks; kohya's names blur them.
        published: models of the family that methods must tell apart.
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
    unaddressed: str = ""
    component: str = "transformer"
    time_input: TimeInput = "s"
    stacked: bool = False
    stacking: tuple[str, ...] = ()
    guidance: tuple[str, float] = ("guidance_scale", 1.0)
    masks_optional: bool = False
    rope_readers: Mapping[str, RopeReader] = field(default_factory=dict)
    rope_tables: Mapping[str, str] = field(default_factory=dict)
    grid_scale: Callable[[Any, int], float] | None = None
    adapted: tuple[str, ...] = ()
    renamed: Callable[[str, int], str] | None = None
    lora_paths: str = ""
    underscored: tuple[str, ...] = ()
    published: tuple[Published, ...] = ()

    @property
    def flow(self) -> bool:
        """Its networks are told a flow's time, so no scheduler over a table of betas is for them."""
        return self.time_input != "timestep"
