"""Look Inside (Activation Tap) as diffusers pipelines: Stable Diffusion, SDXL, and every other model of a known family.

Pictures and prompts in, inner activations and their pictures out. Not postponing annotations here: ``from_pipe`` reads
the component types from ``__init__``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    SchedulerMixin,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from diffusers.utils import BaseOutput
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from ..activations.activation_pictures import PCABasis, pca_rgb
from ..activations.container import Activations
from ..activations.gdf_protocol import check_protocol, gdf_generator, gdf_pixels, gdf_timestep
from ..activations.picture_latents import per_picture, to_pixels, value_range_of
from ..activations.presets import preset as find_preset
from ..activations.ranked_pictures import MadeOf, Pictures
from ..activations.streaming import Streamed, stream_taps
from ..activations.tap import check_timestep, tap_latents
from ..activations.tap_config import TapConfig
from ..diffusion.denoiser import Denoiser
from ..errors import refuse
from ..io.picture_files import open_picture
from ..network.condition import Condition
from ..runtime.compat_diffusers import loaded_from
from ..runtime.progress import Progress, silent
from ..tracing.addresses import resolve
from .adapter import network_of
from .components import components_of
from .conventions import Generators
from .from_parts import FromParts
from .shared import SharedPipeline
from .wrapping import AroundPipeline

__all__ = [
    "ActivationTapPipeline",
    "ActivationTapPipelineOutput",
    "ActivationTapTransformerPipeline",
    "ActivationTapXLPipeline",
]

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


@dataclass
class ActivationTapPipelineOutput(BaseOutput):
    """``activations``: address -> activation of B rows. ``pictures``: address -> B PIL pictures of its components."""

    activations: Activations
    pictures: dict[str, list[Image.Image]]


class TapPipeline(SharedPipeline):
    """What the pipelines of every form share."""

    _meaningless = MEANINGLESS

    @property
    def vae_scale_factor(self) -> int:
        """Pixels per latent position, along one side."""
        return self._adapter.factor

    @property
    def side_step(self) -> int:
        """Sides of pictures are multiples of this many pixels: whole latent positions, whole tokens."""
        return self._adapter.side_step

    @torch.no_grad()
    def __call__(
        self,
        image: Any,
        prompt: str | list[str] = "",
        addresses: str | list[str] | None = None,
        preset: str | None = None,
        timestep: float | None = None,
        seeds: int | list[int] | None = None,
        generator: Generators | None = None,
        *,
        prompt_embeds: torch.Tensor | None = None,
        pooled_prompt_embeds: torch.Tensor | None = None,
        size: int | None = None,
        posterior: str | None = None,
        protocol: str = "vitrine",
        value_range: Sequence[float] | None = None,
        modulate: bool | None = None,
        discard: Sequence[int] | None = None,
        dtype: str = "float32",
        variance: bool = False,
        early_exit: bool = True,
        batch: int = 16,
        basis: dict[str, PCABasis] | None = None,
        output_type: str = "pil",
        callback: Progress = silent,
        return_dict: bool = True,
        **unknown: Any,
    ) -> ActivationTapPipelineOutput:
        """Tap pictures at one noise level (GDF, arXiv 2410.03558, section 3).

        Args:
            image: one or more pictures: PIL, array (H, W, 3) in [0, 1] or uint8, tensor (3, H, W) in [0, 1] or [-1, 1];
                or scaled latents as a tensor with the VAE's latent channels.
            prompt: one for all pictures or one for each.
            addresses: sites or globs; or ``preset``. Addresses win over the preset's, the rest of which stays.
            timestep: the network's own timestep (0..999); by default the preset's, else 50.
            seeds: noises to average over; by default the preset's, else 0.
            generator: instead of seeds: posterior samples, where they are asked for, and then the noises of all
                pictures, from one generator or a list with one each, as diffusers samples them.
            prompt_embeds, pooled_prompt_embeds: encoded prompts instead of ``prompt``, one row or one for each picture;
                of transformers what their pipelines' ``encode_prompt`` gives, ``prompt_embeds_mask`` or
                ``prompt_attention_mask`` too.
            size: resize pictures to a square first.
            posterior: "mean" (default) or "sample".
            protocol: "gdf" equals the authors' code where it differs from the defaults here: posterior sample and noise
                drawn for the whole batch, their timestep (51 for 50 on SD 1.5) and resizing, which default to the
                model's own size. The rows then depend on the batch. See :mod:`vitrine.engine.activations.gdf_protocol`.
            value_range: (0, 1) or (-1, 1) of float tensors; by default (-1, 1) where any of them has a negative number.
            modulate, discard: DiTF's remedy, as in :class:`TapConfig`; by default the preset's, else none.
            dtype, variance, early_exit, batch: see :class:`TapConfig`.
            basis: PCA bases by address, for colours that mean the same across calls.
            output_type: "pil" pictures of the activations, or "none".
            callback: called as callback(step, total, preview); may raise to interrupt, nothing is left behind.

        Returns:
            :class:`ActivationTapPipelineOutput`, or the tuple (activations, pictures).
        """
        adapter = self._adapter
        masks = {name: unknown.pop(name) for name in adapter.masks if name in unknown}
        self._refuse_arguments(unknown, adapter.masks)
        settings: dict[str, Any] = {
            "size": size,
            "dtype": dtype,
            "variance": variance,
            "batch": batch,
            "early_exit": early_exit,
        }
        optional = {"posterior": posterior, "modulate": modulate, "discard": discard}
        settings |= {name: value for name, value in optional.items() if value is not None}
        config = tap_config(addresses, preset, timestep, seeds, generator, settings)
        if self._follows_gdf(protocol):
            config = self.as_gdf(config, posterior)
            generator = generator or gdf_generator(config.seeds)
        if prompt and prompt_embeds is not None:
            raise refuse("prompt and prompt_embeds", "both", "one of them", "prompt_embeds are prompts, encoded")
        if output_type not in ("pil", "none"):
            raise refuse("output_type", output_type, "'pil' or 'none'", "activations come back either way")
        denoiser = self._denoiser()
        check_timestep(denoiser, config.timestep)
        sites = resolve(denoiser.backbone, list(config.addresses))
        inputs = self._inputs(image, config, protocol, value_range)
        prompts = per_picture(prompt, len(inputs), "prompt")
        check_generators(generator, len(inputs))
        self._refuse_broken_weights()
        with self._in_use():
            latents = self._latents(inputs, config, generator)
            height, width = (adapter.factor * side for side in latents.shape[-2:])
            texts = {"prompt_embeds": prompt_embeds, "pooled_prompt_embeds": pooled_prompt_embeds, **masks}
            cond = adapter.condition(prompts if prompt_embeds is None else None, (height, width), **texts)
            activations = self._tap(denoiser, latents, cond, config, prompts, generator, callback)
        shown = [s.address for s in sites] if output_type == "pil" else []
        pictures = pca_pictures(activations, shown, basis, height, width)
        output: Any = ActivationTapPipelineOutput(activations, pictures)
        return output if return_dict else output.to_tuple()

    @torch.no_grad()
    def stream(
        self,
        pictures: Mapping[str, Any],
        folder: str | Path,
        prompt: str | Mapping[str, str] = "",
        addresses: str | list[str] | None = None,
        preset: str | None = None,
        *,
        memory: int | str = "2GB",
        callback: Progress = silent,
        **settings: Any,
    ) -> Streamed:
        """Tap any number of pictures at any sites into a folder, in bounded memory.

        The same call resumes where an interrupted one stopped, also after ``kill -9``.

        Args:
            pictures: name -> picture, or the path of one, all of one size after ``size``; read when its turn comes.
            folder: of shards; ``Streamed.read(names, addresses)`` or :class:`ActivationReader` opens them.
            prompt: one for all pictures, or name -> prompt.
            memory: budget in bytes or as "2GB", for what is needed beyond the models and a bare forward. Sites that do
                not fit it together are tapped one part after another.
            settings: timestep, seeds, size, posterior, value_range, modulate, discard, dtype, variance, early_exit,
                batch: as in a call.
        """
        separate = {name: settings.pop(name, None) for name in ("timestep", "seeds")}
        value_range = settings.pop("value_range", None)
        config = tap_config(addresses, preset, separate["timestep"], separate["seeds"], None, settings)
        denoiser = self._denoiser()
        check_timestep(denoiser, config.timestep)
        resolve(denoiser.backbone, list(config.addresses))
        self._refuse_broken_weights()
        names = list(pictures)
        texts = dict.fromkeys(names, prompt) if isinstance(prompt, str) else prompt

        def source(numbers: Sequence[int]) -> tuple[torch.Tensor, Condition]:
            chosen = [names[n] for n in numbers]
            opened = [open_picture(p) if isinstance(p, (str, Path)) else p for p in (pictures[n] for n in chosen)]
            inputs = self._inputs(opened, config, value_range=value_range)
            latents = self._latents(inputs, config)
            height, width = (self.vae_scale_factor * side for side in latents.shape[-2:])
            return latents, self._adapter.condition([texts[name] for name in chosen], (height, width))

        def picture(number: int) -> list[object]:
            entry = pictures[names[number]]
            return [Path(entry) if isinstance(entry, str) else entry, texts[names[number]]]

        shared = components_of(self, ("unet", "transformer")) | {"value range": value_range}
        with self._in_use():
            chosen = Pictures(len(names), source, made_of=MadeOf(shared, picture))
            return stream_taps(denoiser, chosen, names, config, folder, memory, callback)

    def own_size(self) -> int:
        """Side in pixels of the square pictures that the model generates by default, or was trained on."""
        return max(self._adapter.usual_size())

    def as_gdf(self, config: TapConfig, posterior: str | None = None) -> TapConfig:
        """The config with what the authors' code takes instead of the defaults here."""
        self._follows_gdf("gdf")
        timestep = gdf_timestep(self._adapter.pipe.scheduler, config.timestep)
        return replace(config, timestep=timestep, posterior=posterior or "sample", size=config.size or self.own_size())

    def _follows_gdf(self, protocol: str) -> bool:
        """Whether the protocol is GDF's, which is written for the UNets of Stable Diffusion."""
        asked, family = check_protocol(protocol), self._adapter.family
        if asked and family.component != "unet":
            remedy = "the official code's timestep, posterior and joining are those of Stable Diffusion's UNets"
            raise refuse("protocol", f"'gdf' with {family.name}", "'vitrine'", remedy)
        return asked

    def _inputs(
        self, image: Any, config: TapConfig, protocol: str = "vitrine", value_range: Sequence[float] | None = None
    ) -> torch.Tensor:
        """Pixels (B, 3, H, W) in [-1, 1], or latents (B, 4, h, w) as they came."""
        channels = self._adapter.channels
        if isinstance(image, torch.Tensor) and image.ndim in (4, 5) and image.shape[1] == channels != 3:
            return image.float()
        return self._pixels([image], config.size, protocol, value_range)[0]

    def _pixels(
        self, pictures: Sequence[Any], size: int | None, protocol: str, value_range: Sequence[float] | None
    ) -> list[torch.Tensor]:
        """Pixels (B, 3, H, W) in [-1, 1] of each entry; what float tensors mean is decided for all entries together."""
        meant, factor = value_range_of(pictures, value_range), self.side_step
        if self._follows_gdf(protocol):
            return [gdf_pixels(entry, size or self.own_size(), factor, meant) for entry in pictures]
        return [to_pixels(entry, size, factor, meant) for entry in pictures]

    def _latents(self, inputs: torch.Tensor, config: TapConfig, generator: Generators | None = None) -> torch.Tensor:
        adapter, device = self._adapter, self._adapter.device
        if inputs.shape[1] == adapter.channels:
            return inputs.to(device)
        sides = [side // adapter.factor for side in inputs.shape[-2:]]
        parts = inputs.split(config.batch)
        noise: Sequence[torch.Tensor | None] = [None] * len(parts)
        if generator is not None and config.posterior == "sample":
            noise = drawn(generator, (len(inputs), adapter.channels, *sides)).split(config.batch)
        latents = [
            adapter.encode(pixels.to(device), config.posterior, config.seeds[0], n)
            for pixels, n in zip(parts, noise, strict=True)
        ]
        return torch.cat(latents).to(device)

    def _tap(
        self,
        denoiser: Denoiser,
        latents: torch.Tensor,
        cond: Condition,
        config: TapConfig,
        prompts: list[str],
        generator: Generators | None,
        callback: Progress,
    ) -> Activations:
        noise = None if generator is None else drawn(generator, tuple(latents.shape))[None]
        rows = len(latents) * len(config.seeds)
        with self._adapter.pipe.progress_bar(total=rows) as bar:

            def progress(step: int, total: int, preview: torch.Tensor | None = None) -> None:
                bar.update(step - bar.n)
                callback(step, total, preview)

            result = tap_latents(
                denoiser, latents, cond, config, progress, noise=noise, prompts=prompts, model=model_id(self)
            )
        if generator is not None:
            each = generator if isinstance(generator, list) else [generator]
            result.info = replace(result.info, seeds=tuple(g.initial_seed() for g in each))
        return result


# --- what a call is given, and what it gives back ---------------------------------------------------------------
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


# --- the forms ---------------------------------------------------------------------------------------------------
class ActivationTapPipeline(TapPipeline, FromParts):
    """Tap Stable Diffusion 1.x / 2.x and models of their shape.

    ::

        pipe = ActivationTapPipeline.from_pretrained("stable-diffusion-v1-5/stable-diffusion-v1-5")
        out = pipe(image, "a photo of a horse", preset="Ours-v1.5", size=512, seeds=range(8))
        out.activations["up-level1-repeat1-vit-block0-cross-q"].tensor   # (1, 1280, 16, 16)
        out.activations.save("horse.safetensors")
    """

    model_cpu_offload_seq = "text_encoder->vae->unet"
    _stock = "StableDiffusionPipeline"
    encode_prompt = StableDiffusionPipeline.encode_prompt

    def __init__(
        self,
        vae: AutoencoderKL,
        text_encoder: CLIPTextModel,
        tokenizer: CLIPTokenizer,
        unet: UNet2DConditionModel,
        scheduler: SchedulerMixin,
    ) -> None:
        super().__init__()
        if unet.config.addition_embed_type is not None:
            shown = f"a UNet with addition_embed_type {unet.config.addition_embed_type!r}"
            raise refuse("unet", shown, "SD 1.x or 2.x", "use ActivationTapXLPipeline for SDXL")
        self.register_modules(vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, unet=unet, scheduler=scheduler)


class ActivationTapXLPipeline(TapPipeline, FromParts):
    """Tap SDXL: two text encoders, pooled text, and time ids (H, W, 0, 0, H, W) as GDF gives them."""

    model_cpu_offload_seq = "text_encoder->text_encoder_2->vae->unet"
    _stock = "StableDiffusionXLPipeline"
    encode_prompt = StableDiffusionXLPipeline.encode_prompt

    def __init__(
        self,
        vae: AutoencoderKL,
        text_encoder: CLIPTextModel,
        text_encoder_2: CLIPTextModelWithProjection,
        tokenizer: CLIPTokenizer,
        tokenizer_2: CLIPTokenizer,
        unet: UNet2DConditionModel,
        scheduler: SchedulerMixin,
        force_zeros_for_empty_prompt: bool = True,
    ) -> None:
        super().__init__()
        if unet.config.addition_embed_type != "text_time":
            shown = f"a UNet with addition_embed_type {unet.config.addition_embed_type!r}"
            raise refuse("unet", shown, "an SDXL base UNet ('text_time')", "use ActivationTapPipeline for SD 1.x, 2.x")
        self.register_modules(
            vae=vae,
            text_encoder=text_encoder,
            text_encoder_2=text_encoder_2,
            tokenizer=tokenizer,
            tokenizer_2=tokenizer_2,
            unet=unet,
            scheduler=scheduler,
        )
        self.register_to_config(force_zeros_for_empty_prompt=force_zeros_for_empty_prompt)  # encode_prompt reads it


class ActivationTapTransformerPipeline(TapPipeline, AroundPipeline):
    """Tap any model of a known family through its own pipeline, which encodes the prompts.

    ::

        pipe = ActivationTapPipeline.from_pipe(ZImagePipeline.from_pretrained("Tongyi-MAI/Z-Image-Turbo"))
        pipe(image, "a photo of a horse", addresses="vit-block15-out", timestep=260).activations
    """

    _needed = ("vae", "transformer", "scheduler")


ActivationTapPipeline._forms = {"xl": ActivationTapXLPipeline, "transformer": ActivationTapTransformerPipeline}
