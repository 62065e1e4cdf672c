"""Look Inside (Activation Tap) as a diffusers pipeline: what a model has inside while it looks at pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import torch
from diffusers.utils import BaseOutput
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image

from ..activations.activation_pictures import PCABasis, pca_rgb
from ..activations.container import Activations
from ..activations.gdf_protocol import check_protocol, gdf_generator, gdf_pixels, gdf_timestep
from ..activations.picture_latents import per_picture, to_pixels, value_range_of
from ..activations.presets import preset as find_preset
from ..activations.ranked_pictures import MadeOf, Pictures
from ..activations.streaming import Streamed, stream_taps
from ..activations.tap import check_timestep, tap_latents
from ..activations.tap_config import TapConfig
from ..errors import refuse
from ..io.picture_files import open_picture
from ..network.condition import Condition
from ..runtime.compat_diffusers import loaded_from
from ..runtime.progress import Progress, silent
from ..tracing.addresses import AUTO, resolve
from . import ranking
from .adapter import Adapter, network_of
from .components import UNREAD, components_of
from .conventions import Generators, refuse_arguments
from .joined import TaskPipeline

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

__all__ = ["ActivationTapPipeline", "ActivationTapPipelineOutput"]

MEANINGLESS = {
    "negative_prompt": "a tap is one forward, without guidance",
    "guidance_scale": "a tap is one forward, without guidance",
    "num_inference_steps": "a tap is one forward; tap_steps taps a sampling run",
    "callback_on_step_end": "a tap is one forward; progress= follows the pictures",
    "num_images_per_prompt": "pictures come in; seeds= averages over noises",
    "height": "use size=",
    "width": "use size=",
    "latents": "pass them as the picture",
    "cross_attention_kwargs": "set the strength of an adapter with set_adapters()",
}
"""What the stock pipelines' calls take and a tap does not, and what to do instead."""


@dataclass
class ActivationTapPipelineOutput(BaseOutput):
    """``activations``: address -> activation of B rows. ``pictures``: address -> B PIL pictures of its components."""

    activations: Activations
    pictures: dict[str, list[Image.Image]]


class ActivationTapPipeline(TaskPipeline):
    """A pipeline of any known family that is looked into, by its own encoders; its call samples as before.

    Example:
        >>> pipe = ActivationTapPipeline.from_pretrained("stable-diffusion-v1-5/stable-diffusion-v1-5")
        >>> out = pipe.tap(image, "a photo of a horse", preset="Ours-v1.5", size=512, seeds=range(8))
        >>> out.activations["up-level1-repeat1-vit-block0-cross-q"].tensor   # (1, 1280, 16, 16)
        >>> pipe = ActivationTapPipeline.from_pipe(ZImagePipeline.from_pretrained("Tongyi-MAI/Z-Image-Turbo"))
        >>> pipe.tap(image, "a photo of a horse", addresses="vit-block15-out", timestep=260).activations
    """

    rank = ranking.rank_layers

    @torch.no_grad()
    def tap(
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
        progress: Progress = silent,
        return_dict: bool = True,
        **unknown: Any,
    ) -> ActivationTapPipelineOutput:
        """Tap pictures at one noise level (GDF, arXiv 2410.03558, section 3).

        Args:
            image: one or more pictures: PIL, array (H, W, 3) in [0, 1] or uint8, tensor (3, H, W) in [0, 1] or [-1, 1];
                or scaled latents as a tensor with the VAE's latent channels.
            prompt: one for all pictures or one for each.
            addresses: layer names or globs; "auto", the default without a preset, is the layer that the nodes read.
                They win over the preset's, the rest of which stays.
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
            progress: called as progress(step, total, preview); may raise to interrupt, nothing is left behind.

        Returns:
            :class:`ActivationTapPipelineOutput`, or the tuple (activations, pictures).
        """
        adapter = self._adapter
        masks = {name: unknown.pop(name) for name in adapter.masks if name in unknown}
        refuse_arguments([self.tap], unknown, MEANINGLESS, adapter.masks)
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
        if follows_gdf(adapter, protocol):
            config = _as_gdf(adapter, config, posterior)
            generator = generator or gdf_generator(config.seeds)
        if prompt and prompt_embeds is not None:
            raise refuse("prompt and prompt_embeds", "both", "one of them", "prompt_embeds are prompts, encoded")
        if output_type not in ("pil", "none"):
            raise refuse("output_type", output_type, "'pil' or 'none'", "activations come back either way")
        denoiser = self._denoiser()
        check_timestep(denoiser, config.timestep)
        sites = resolve(denoiser.backbone, list(config.addresses))
        inputs = _inputs(adapter, image, config, protocol, value_range)
        prompts = per_picture(prompt, len(inputs), "prompt")
        check_generators(generator, len(inputs))
        self._refuse_broken_weights()
        with self._in_use():
            latents = _latents(adapter, inputs, config, generator)
            height, width = (adapter.factor * side for side in latents.shape[-2:])
            texts = {"prompt_embeds": prompt_embeds, "pooled_prompt_embeds": pooled_prompt_embeds, **masks}
            cond = adapter.condition(prompts if prompt_embeds is None else None, (height, width), **texts)
            noise = None if generator is None else drawn(generator, tuple(latents.shape))[None]
            with self.progress_bar(total=len(latents) * len(config.seeds)) as bar:

                def both(step: int, total: int, preview: torch.Tensor | None = None) -> None:
                    bar.update(step - bar.n)
                    progress(step, total, preview)

                activations = tap_latents(
                    denoiser, latents, cond, config, both, noise=noise, prompts=prompts, model=model_id(self)
                )
        if generator is not None:
            each = generator if isinstance(generator, list) else [generator]
            activations.info = replace(activations.info, seeds=tuple(g.initial_seed() for g in each))
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
        progress: Progress = silent,
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
                batch: as in :meth:`tap`.
        """
        separate = {name: settings.pop(name, None) for name in ("timestep", "seeds")}
        value_range = settings.pop("value_range", None)
        config = tap_config(addresses, preset, separate["timestep"], separate["seeds"], None, settings)
        adapter, denoiser = self._adapter, self._denoiser()
        check_timestep(denoiser, config.timestep)
        resolve(denoiser.backbone, list(config.addresses))
        self._refuse_broken_weights()
        names = list(pictures)
        texts = dict.fromkeys(names, prompt) if isinstance(prompt, str) else prompt

        def source(numbers: Sequence[int]) -> tuple[torch.Tensor, Condition]:
            chosen = [names[n] for n in numbers]
            opened = [open_picture(p) if isinstance(p, (str, Path)) else p for p in (pictures[n] for n in chosen)]
            latents = _latents(adapter, _inputs(adapter, opened, config, value_range=value_range), config)
            height, width = (adapter.factor * side for side in latents.shape[-2:])
            return latents, adapter.condition([texts[name] for name in chosen], (height, width))

        def picture(number: int) -> list[object]:
            entry = pictures[names[number]]
            return [Path(entry) if isinstance(entry, str) else entry, texts[names[number]]]

        shared = components_of(self, UNREAD) | {"value range": value_range}
        with self._in_use():
            chosen = Pictures(len(names), source, made_of=MadeOf(shared, picture))
            return stream_taps(denoiser, chosen, names, config, folder, memory, progress)


# --- pictures as the network takes them ------------------------------------------------------------------------------
def _as_gdf(adapter: Adapter, config: TapConfig, posterior: str | None) -> TapConfig:
    """The config with what the authors' code takes instead of the defaults here."""
    timestep = gdf_timestep(adapter.pipe.scheduler, config.timestep)
    size = config.size or max(adapter.usual_size())
    return replace(config, timestep=timestep, posterior=posterior or "sample", size=size)


def follows_gdf(adapter: Adapter, protocol: str) -> bool:
    """Whether the protocol is GDF's, which is written for the UNets of Stable Diffusion."""
    asked, family = check_protocol(protocol), adapter.family
    if asked and family.component != "unet":
        remedy = "the official code's timestep, posterior and joining are those of Stable Diffusion's UNets"
        raise refuse("protocol", f"'gdf' with {family.name}", "'vitrine'", remedy)
    return asked


def pixels_of(
    adapter: Adapter, pictures: Sequence[Any], size: int | None, protocol: str, value_range: Sequence[float] | None
) -> list[torch.Tensor]:
    """Pixels (B, 3, H, W) in [-1, 1] of each entry; what float tensors mean is decided for all entries together."""
    meant, factor = value_range_of(pictures, value_range), adapter.side_step
    if follows_gdf(adapter, protocol):
        return [gdf_pixels(entry, size or max(adapter.usual_size()), factor, meant) for entry in pictures]
    return [to_pixels(entry, size, factor, meant) for entry in pictures]


def _inputs(
    adapter: Adapter,
    image: Any,
    config: TapConfig,
    protocol: str = "vitrine",
    value_range: Sequence[float] | None = None,
) -> torch.Tensor:
    """Pixels (B, 3, H, W) in [-1, 1], or latents (B, 4, h, w) as they came."""
    if isinstance(image, torch.Tensor) and image.ndim in (4, 5) and image.shape[1] == adapter.channels != 3:
        return image.float()
    return pixels_of(adapter, [image], config.size, protocol, value_range)[0]


def _latents(
    adapter: Adapter, inputs: torch.Tensor, config: TapConfig, generator: Generators | None = None
) -> torch.Tensor:
    device = adapter.device
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
        addresses = AUTO
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
