"""One interface to the diffusers pipeline of any known family: prompts, pictures, the network's prediction, sizes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..activations.picture_latents import encode_pixels
from ..diffusion.denoiser import Denoiser
from ..errors import refuse
from ..families import Family, Latent, family_of, trained_size
from ..families.family import vae_factor
from ..network.condition import Condition
from ..runtime.compat_diffusers import execution_device
from ..runtime.placement import device_of, dtype_of, upcast_vae

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModelMixin

MASKS = ("prompt_embeds_mask", "prompt_attention_mask")
"""Masks of encoded prompts, by the names of diffusers' pipelines."""


def network_of(pipe: DiffusionPipeline) -> ModelMixin:
    """The UNet or transformer of a pipeline."""
    unet = getattr(pipe, "unet", None)
    return pipe.transformer if unet is None else unet  # a compiled one has no truth value


def stock_of(kind: type) -> type:
    """The class of the pipeline that tasks were put on; the class itself where it is none of a task and another."""
    while "_stock_class" in vars(kind):
        kind = vars(kind)["_stock_class"]
    return kind


class Adapter:
    """A pipeline as what every method needs of it. It reads the pipeline's components at each call and keeps none.

    Attributes:
        pipe: the pipeline, stock or ours, with all its components.
    """

    def __init__(self, pipe: DiffusionPipeline) -> None:
        self.pipe = pipe

    @property
    def network(self) -> ModelMixin:
        """The UNet or transformer."""
        return network_of(self.pipe)

    @property
    def family(self) -> Family:
        """The family of the network."""
        return family_of(self.network)

    @property
    def latent(self) -> Latent:
        """The shape of the family's latents."""
        return self.family.latent

    @property
    def is_unet(self) -> bool:
        """Whether the network is a UNet."""
        return getattr(self.pipe, "unet", None) is not None

    @property
    def device(self) -> torch.device:
        """Where the pipeline runs, its modules offloaded or not."""
        return execution_device(self.pipe)

    # --- sizes ---
    @property
    def factor(self) -> int:
        """Pixels per latent position, along one side."""
        return vae_factor(self.pipe.vae) * self.latent.packed

    @property
    def side_step(self) -> int:
        """Sides of pictures are multiples of this many pixels: whole latent positions, whole tokens."""
        return self.factor * self.latent.patch

    @property
    def channels(self) -> int:
        """Channels of the latents."""
        config = self.pipe.vae.config
        return int(config.get("latent_channels") or config.get("z_dim")) * self.latent.packed**2

    def trained_size(self) -> tuple[int, int]:
        """(height, width) in pixels of the pictures that the network was trained on.

        Networks with rotary positions do not name a size, and their pipelines generate 1024 pixels by default: then it
        is the size that the autoencoder names.
        """
        side, step = self.network.config.get("sample_size"), self.side_step
        pixels = self.pipe.vae.config.get("sample_size") or 1024 if side is None else side
        height, width = (pixels, pixels) if isinstance(pixels, int) else list(pixels)[-2:]
        scale = 1 if side is None else self.factor
        return max(1, height * scale // step) * step, max(1, width * scale // step) * step

    def usual_size(self) -> tuple[int, int]:
        """(height, width) in pixels that the pipeline generates by default, else that its network was trained on."""
        parameters = inspect.signature(stock_of(type(self.pipe)).__call__).parameters
        named = [parameters[side].default if side in parameters else None for side in ("height", "width")]
        if isinstance(named[0], int) and isinstance(named[1], int):  # Wan and Krea 2 name pixels
            return named[0], named[1]
        side = getattr(self.pipe, "default_sample_size", None)
        if side is not None:
            height, width = (side, side) if isinstance(side, int) else list(side)[-2:]
            return height * self.pipe.vae_scale_factor, width * self.pipe.vae_scale_factor
        known = None if self.network.config.get("sample_size") else trained_size(self.network)
        return self.trained_size() if known is None else (known[1], known[0])

    # --- prompts ---
    @property
    def masks(self) -> tuple[str, ...]:
        """Masks that may come with encoded prompts."""
        return () if self.is_unet else MASKS

    def condition(self, prompts: Sequence[str] | None, size: tuple[int, int], **texts: Any) -> Condition:
        """One batch row for each prompt, for pictures of ``size`` (height, width) in pixels.

        Args:
            texts: encoded prompts instead of ``prompts``, by the names of the pipeline's ``encode_prompt``:
                ``prompt_embeds``, ``pooled_prompt_embeds`` and masks; None counts as left out.
        """
        texts = {name: value for name, value in texts.items() if value is not None}
        if self.is_unet:
            embeds, pooled = (texts.get(name) for name in ("prompt_embeds", "pooled_prompt_embeds"))
            return encoded(self.pipe, prompts, size, embeds, pooled)
        if texts:
            self._check_encoded(texts)
        else:
            self._refuse_without_encoder("prompt")
        assert self.family.condition is not None
        source = _Encoded(self.pipe, texts) if texts else self.pipe
        return self.family.condition(source, list(prompts or ()), *size)  # some pipelines write into the list

    def empty(self, size: tuple[int, int]) -> Condition:
        """What guidance starts from, one batch row: the empty prompt, or zeros where the pipeline says so (SDXL)."""
        if self.is_unet:
            return empty_prompt(self.pipe, size)
        self._refuse_without_encoder("empty prompt for guidance")
        return self.condition([""], size)

    def _refuse_without_encoder(self, what: str) -> None:
        if getattr(self.pipe, "text_encoder", None) is None:
            shown = f"a text, and {type(self.pipe).__name__} without a text encoder"
            raise refuse(what, shown, "a pipeline with one", "pass prompt_embeds= and what belongs to them")

    def _check_encoded(self, texts: Mapping[str, Any]) -> None:
        takes = inspect.signature(self.pipe.encode_prompt).parameters
        belong = [name for name in ("prompt_embeds", "pooled_prompt_embeds", *MASKS) if name in takes]
        optional = MASKS if self.family.masks_optional else ()
        if set(texts) - set(takes) or set(belong) - set(texts) - set(optional):
            accepted = f"{belong}, of {type(self.pipe).__name__}"
            raise refuse("encoded prompts", sorted(texts), accepted, "as its encode_prompt gives them")

    # --- pictures and predictions ---
    def encode(
        self, pixels: torch.Tensor, posterior: str = "mean", seed: int = 0, noise: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Latents (B, C, h, w) float32 of pixels (B, 3, H, W) in [-1, 1], in the network's scale.

        Args:
            posterior, seed, noise: as in :func:`~vitrine.engine.activations.picture_latents.encode_pixels`.
        """
        return encode_pixels(self.pipe.vae, pixels, posterior, seed, noise, self.latent)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Pixels (B, 3, H, W), in [-1, 1] but for overshoot, of latents in the network's scale."""
        with upcast_vae(self.pipe.vae) as vae:
            pixels: torch.Tensor = vae.decode(
                self.latent.unscaled(vae, latents.to(device_of(vae), dtype_of(vae)))
            ).sample
        return pixels[:, :, 0] if pixels.ndim == 5 else pixels

    def denoiser(self) -> Denoiser:
        """eps and x0 of the network under the pipeline's scheduler."""
        return Denoiser.from_diffusers(self.pipe)


class _Encoded:
    """A pipeline whose prompts are encoded already: its ``encode_prompt`` returns what it would have made itself."""

    def __init__(self, pipe: DiffusionPipeline, texts: Mapping[str, Any]) -> None:
        self._pipe, self._texts = pipe, texts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)

    def encode_prompt(self, *prompts: Any, **how: Any) -> Any:
        return self._pipe.encode_prompt(*[None for _ in prompts], **how, **self._texts)


# --- prompts of UNets: Stable Diffusion 1.x, 2.x and SDXL, encoded by their own pipelines -----------------------------
def reads_sizes(unet: ModelMixin) -> bool:
    """Whether a UNet takes pooled text and picture sizes, as SDXL does."""
    return getattr(unet.config, "addition_embed_type", None) == "text_time"


def encoded(
    pipe: DiffusionPipeline,
    prompts: Sequence[str] | None,
    size: tuple[int, int],
    embeds: torch.Tensor | None = None,
    pooled: torch.Tensor | None = None,
) -> Condition:
    """One row for each prompt, for pictures of ``size`` (height, width) in pixels.

    Args:
        embeds, pooled: encoded prompts (B, T, C), (B, D) instead of ``prompts``; ``pooled`` for SDXL only.
    """
    if embeds is not None and (pooled is None) == reads_sizes(pipe.unet):
        shown, accepted = ("none", "a tensor (B, D)") if pooled is None else ("a tensor", "none")
        raise refuse("pooled_prompt_embeds", shown, accepted, "SDXL takes them with prompt_embeds, no other UNet does")
    texts = None if prompts is None else list(prompts)
    if not reads_sizes(pipe.unet):
        return Condition(pipe.encode_prompt(texts, execution_device(pipe), 1, False, prompt_embeds=embeds)[0])
    text, _, pooled, _ = pipe.encode_prompt(
        texts,
        device=execution_device(pipe),
        do_classifier_free_guidance=False,
        prompt_embeds=embeds,
        pooled_prompt_embeds=pooled,
    )
    sizes = torch.tensor([*size, 0, 0, *size], dtype=torch.float32, device=text.device)  # original, crop, target
    return Condition(text, pooled, {"time_ids": sizes.expand(len(text), 6)})


def empty_prompt(pipe: DiffusionPipeline, size: tuple[int, int]) -> Condition:
    """What guidance starts from, one row: the empty prompt, or zeros where the pipeline says so (SDXL)."""
    empty = encoded(pipe, [""], size)
    if not getattr(pipe.config, "force_zeros_for_empty_prompt", False) or empty.text is None or empty.pooled is None:
        return empty
    return Condition(torch.zeros_like(empty.text), torch.zeros_like(empty.pooled), empty.extra)
