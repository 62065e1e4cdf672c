"""A pipeline around another of any class, which stays that pipeline for everything else."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import Self

from ..errors import refuse
from ..families import family_of
from .shared import SharedPipeline

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class Wrapping(SharedPipeline):
    """Base of the pipelines that wrap another; each has its own call.

    Attributes:
        pipe: the wrapped pipeline.
    """

    def __init__(self, pipe: DiffusionPipeline) -> None:
        self.pipe = pipe

    def __getattr__(self, name: str) -> Any:
        """The rest is the wrapped pipeline's: saving, offloading, LoRAs, the progress bar."""
        if name == "pipe":
            raise AttributeError(name)  # while an object is copied, before it has one
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)  # a property that failed: its own error, not "no such name"
        return getattr(self.pipe, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """A new scheduler, network, text encoder or VAE is the wrapped pipeline's."""
        pipe = self.__dict__.get("pipe")
        if name in getattr(pipe, "components", {}):
            setattr(pipe, name, value)
        else:
            super().__setattr__(name, value)

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, *settings: Any, **named: Any) -> Any:
        """The same as the constructor, under diffusers' name."""
        constructor: Any = cls
        return constructor(pipeline, *settings, **named)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or cast the pipeline."""
        self.pipe.to(*args, **kwargs)
        return self


class AroundPipeline(Wrapping):
    """Base of the pipelines for any model of a known family, which encode prompts and sample with the wrapped one."""

    _needed: ClassVar[tuple[str, ...]] = ("vae", "scheduler")
    """Components without which the pipeline is refused."""

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **kwargs: Any) -> Any:
        """A pipeline around another, which is kept as it is.

        Args:
            kwargs: components to use instead; ``torch_dtype`` casts all modules of the other pipeline.
        """
        pipeline, dtype = whole(pipeline), kwargs.pop("dtype", kwargs.pop("torch_dtype", None))
        lacking = [name for name in cls._needed if getattr(pipeline, name, None) is None]
        if lacking:
            shown, accepted = f"{type(pipeline).__name__} without {lacking[0]}", f"one with {', '.join(cls._needed)}"
            raise refuse("pipeline", shown, accepted, f"load a pipeline that {cls.__name__} fits")
        transformer = getattr(pipeline, "transformer", None)
        if transformer is not None and family_of(transformer).condition is None:
            shown = f"a pipeline of {family_of(transformer).name}"
            raise refuse("pipeline", shown, "one that encodes prompts", "tap_latents takes encoded text")
        if set(kwargs) - set(pipeline.components):
            raise refuse("arguments", sorted(kwargs), sorted(pipeline.components), f"{cls.__name__} takes no others")
        if kwargs:
            pipeline = copy.copy(pipeline)  # the other one keeps its own
            pipeline.register_modules(**kwargs)
        made = cls(pipeline)
        return made if dtype is None else made.to(dtype)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Sample as the wrapped pipeline does."""
        return self.pipe(*args, **kwargs)

    @property
    def vae_scale_factor(self) -> int:
        """Pixels per latent position, along one side."""
        return self._adapter.factor


def whole(pipeline: DiffusionPipeline) -> DiffusionPipeline:
    """The pipeline with all its parts: of one that was put around another, that other."""
    return pipeline.pipe if isinstance(pipeline, AroundPipeline) else pipeline
