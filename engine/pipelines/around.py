"""A pipeline around another one, which still does what only it knows: read prompts, sample, move its parts.

Not postponing annotations here: ``from_pipe`` reads the component types from ``__init__``.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModelMixin, SchedulerMixin, StableDiffusionPipeline, UNet2DConditionModel

from ..diffusion.forward_clock import Timesteps
from ..errors import refuse
from ..families import Latent, family_of, trained_size
from ..families.family import vae_factor
from ..network.condition import Condition
from .prompt_encoding import encoded, reads_sizes
from .shared import SharedPipeline, native_size, whole

MASKS = ("prompt_embeds_mask", "prompt_attention_mask")
"""Of encoded prompts, by the names of diffusers' pipelines."""


class AroundPipeline(SharedPipeline):
    """Base of the pipelines for any model of a known family; comes first among a class's bases.

    Wherever this pipeline goes, the other goes too, with its text encoders; and what this one lacks, the other does:
    ``encode_prompt``, ``load_lora_weights``, ``set_adapters`` ...
    """

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **kwargs: Any) -> Any:
        """As of every pipeline here; the other pipeline is kept.

        Raises:
            VitrineError: If the model is of no known family, or the family has no pipeline to encode prompts.
        """
        pipeline = whole(pipeline)
        transformer = getattr(pipeline, "transformer", None)
        if transformer is not None and family_of(transformer).condition is None:
            shown = f"a pipeline of {family_of(transformer).name}"
            raise refuse("pipeline", shown, "one that encodes prompts", "tap_latents takes encoded text")
        dtype = kwargs.pop("dtype", kwargs.pop("torch_dtype", None))
        made = super().from_pipe(pipeline, **kwargs)
        made.__dict__["source"] = pipeline
        return made if dtype is None else made.to(dtype)

    @property
    def _source(self) -> Any:
        """The pipeline this one was made from."""
        return self.__dict__["source"]

    def __getattr__(self, name: str) -> Any:
        """What this class has not, of the pipeline it was made from."""
        source = self.__dict__.get("source")
        if source is not None and not name.startswith("__") and hasattr(source, name):
            return getattr(source, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Another part becomes the other pipeline's as well, since it still reads prompts and samples."""
        source = self.__dict__.get("source")
        if source is not None and name in source.components:
            setattr(source, name, value)
            if name not in self.config:  # read there
                return
        super().__setattr__(name, value)

    def set_progress_bar_config(self, **kwargs: Any) -> None:
        """Of both pipelines: each has bars of its own."""
        super().set_progress_bar_config(**kwargs)
        self._source.set_progress_bar_config(**kwargs)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Saves the pipeline this one was made from, text encoders and all."""
        return self._source.save_pretrained(*args, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Moves or casts the pipeline this one was made from, text encoders and all."""
        self._source.to(*args, **kwargs)
        return self

    def enable_model_cpu_offload(self, *args: Any, **kwargs: Any) -> None:
        """Of the pipeline this one was made from."""
        self._source.enable_model_cpu_offload(*args, **kwargs)

    def enable_sequential_cpu_offload(self, *args: Any, **kwargs: Any) -> None:
        """Of the pipeline this one was made from."""
        self._source.enable_sequential_cpu_offload(*args, **kwargs)

    def enable_group_offload(self, *args: Any, **kwargs: Any) -> None:
        """Of the pipeline this one was made from."""
        self._source.enable_group_offload(*args, **kwargs)

    def remove_all_hooks(self) -> None:
        """Of the pipeline this one was made from."""
        self._source.remove_all_hooks()

    def maybe_free_model_hooks(self) -> None:
        """Of the pipeline this one was made from."""
        self._source.maybe_free_model_hooks()

    @property
    def _network(self) -> Any:
        """The UNet or transformer."""
        unet = getattr(self, "unet", None)
        return self.transformer if unet is None else unet

    @property
    def _latent(self) -> Latent:
        return family_of(self._network).latent

    @property
    def vae_scale_factor(self) -> int:
        """Pixels for each latent position."""
        return vae_factor(self.vae) * self._latent.packed

    @property
    def _latent_channels(self) -> int:
        config = self.vae.config
        return int(config.get("latent_channels") or config.get("z_dim")) * self._latent.packed**2

    def _usual_size(self) -> tuple[int, int]:
        """(height, width) in pixels that the other pipeline generates by default, or its network was trained on."""
        parameters = inspect.signature(type(self._source).__call__).parameters
        named = [parameters[side].default if side in parameters else None for side in ("height", "width")]
        if isinstance(named[0], int) and isinstance(named[1], int):  # Wan and Krea 2 name pixels
            return named[0], named[1]
        side = getattr(self._source, "default_sample_size", None)
        if side is not None:
            height, width = (side, side) if isinstance(side, int) else list(side)[-2:]
            return height * self._source.vae_scale_factor, width * self._source.vae_scale_factor
        known = None if self._network.config.get("sample_size") else trained_size(self._network)
        if known is not None:
            return known[1], known[0]
        return native_size(self._network, self.vae, self.vae_scale_factor, self.vae_scale_factor * self._latent.patch)

    def _condition(
        self, prompts: list[str], height: int, width: int, *, texts: Mapping[str, Any] | None = None
    ) -> Condition:
        """Text condition with one row for each prompt, for pictures of that many pixels.

        Args:
            texts: instead of ``prompts``, what the other pipeline's ``encode_prompt`` takes for encoded ones.
        """
        if getattr(self, "unet", None) is not None:
            return encoded(self._source, list(prompts), (height, width))
        if texts is None:
            self._refuse_without_encoder("prompt")
        family = family_of(self.transformer)
        assert family.condition is not None
        source = self._source if texts is None else _Encoded(self._source, texts)
        return family.condition(source, list(prompts), height, width)  # some pipelines write into the list

    def _refuse_without_encoder(self, what: str) -> None:
        if getattr(self._source, "text_encoder", None) is None:
            shown = f"a text, and {type(self._source).__name__} without a text encoder"
            raise refuse(what, shown, "a pipeline with one", "pass prompt_embeds= and what belongs to them")

    def _given(
        self, size: tuple[int, int], embeds: Any, pooled: torch.Tensor | None, masks: Mapping[str, torch.Tensor]
    ) -> Condition:  # fmt: skip
        """Text condition of encoded prompts, by the names of the other pipeline's ``encode_prompt``.

        Raises:
            VitrineError: If something is missing that belongs to them, or is not known to that pipeline.
        """
        texts: dict[str, Any] = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled, **masks}
        texts = {name: value for name, value in texts.items() if value is not None}
        source, takes = self._source, inspect.signature(self._source.encode_prompt).parameters
        belong = [name for name in ("prompt_embeds", "pooled_prompt_embeds", *MASKS) if name in takes]
        optional = MASKS if family_of(self._network).masks_optional else ()
        if set(texts) - set(takes) or set(belong) - set(texts) - set(optional):
            remedy = "as its encode_prompt gives them"
            raise refuse("encoded prompts", sorted(texts), f"{belong}, of {type(source).__name__}", remedy)
        return self._condition([], *size, texts=texts)


class _Encoded:
    """A pipeline whose prompts are encoded already: its ``encode_prompt`` makes of them what it makes of its own."""

    def __init__(self, source: Any, texts: Mapping[str, Any]) -> None:
        self._source, self._texts = source, texts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def encode_prompt(self, *prompts: Any, **how: Any) -> Any:
        return self._source.encode_prompt(*[None for _ in prompts], **how, **self._texts)


class AroundAnyPipeline(AroundPipeline):
    """Base of those for UNets and transformers alike."""

    model_cpu_offload_seq = "vae->unet->transformer"
    _optional_components = ["unet", "transformer"]

    def __init__(
        self,
        vae: ModelMixin,
        scheduler: SchedulerMixin,
        unet: UNet2DConditionModel | None = None,
        transformer: ModelMixin | None = None,
    ) -> None:
        super().__init__()
        self.register_modules(vae=vae, scheduler=scheduler, unet=unet, transformer=transformer)


def kept_whole(pipeline: DiffusionPipeline) -> bool:
    """Whether a pipeline samples in a way of its own: SDXL, a transformer, image to image, inpainting, a ControlNet."""
    pipeline = whole(pipeline)
    unet = getattr(pipeline, "unet", None)
    if getattr(pipeline, "transformer", None) is not None or (unet is not None and reads_sizes(unet)):
        return True
    return not isinstance(pipeline, (StableDiffusionPipeline, SharedPipeline))


def clock_of(pipe: Any, net: Any) -> Callable[[tuple, dict[str, Any]], float]:
    """(args, kwargs) of a forward of a pipeline's network -> its timestep on the scheduler's scale of 0..1000."""
    timesteps, time_input = Timesteps(), family_of(net).time_input

    def now(args: tuple, kwargs: dict[str, Any]) -> float:
        if time_input != "timestep" and hasattr(pipe.scheduler, "step_index"):
            # the scheduler counts its steps from the first
            step = pipe.scheduler.begin_index if pipe.scheduler.step_index is None else pipe.scheduler.step_index
            args, kwargs = (), {"timestep": pipe.scheduler.timesteps[step or 0]}
        t = timesteps.first(args, kwargs)
        assert t is not None
        return t

    return now


def share_of(pipe: Any, net: Any) -> Callable[[tuple, dict[str, Any]], float]:
    """(args, kwargs) of a forward of a pipeline's network -> how much of the run's steps is over, 0 to below 1.

    A run that begins late, as image to image does, or ends early, as SDXL's base before its refiner, is counted by
    its own steps.
    """
    clock, known, begin = clock_of(pipe, net), [torch.empty(0), torch.empty(0)], 0

    def now(args: tuple, kwargs: dict[str, Any]) -> float:
        nonlocal begin
        t, source = clock(args, kwargs), pipe.scheduler.timesteps
        first = source is not known[0]
        if first:
            known[:] = source, source.detach().double().cpu()
        times = known[1]
        step = int((times - t).abs().argmin())
        begin = step if first else begin
        steps = min(getattr(pipe, "_num_timesteps", None) or len(times), len(times) - begin)
        return min(max(0, step - begin), steps - 1) / steps

    return now
