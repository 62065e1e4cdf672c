"""weights2weights as a diffusers pipeline: sample, edit, invert and blend models of a space, and sample with them.

Not postponing annotations here: ``from_pipe`` reads the component types from ``__init__``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline, StableDiffusionPipeline

from ..w2w import EditConfig, Space, W2WModel
from .around import AroundAnyPipeline, clock_of, kept_whole
from .conventions import refuse_unknown
from .w2w_tools import CallRequest, W2WTools


class W2WPipeline(W2WTools, StableDiffusionPipeline):
    """Stable Diffusion whose weights are a point of a space of models (weights2weights, Dravid et al., NeurIPS 2024).

    Example:
        >>> pipe = W2WPipeline.from_pipe(StableDiffusionPipeline.from_pretrained("path/to/base"))
        >>> space = load_space("people.w2w.safetensors")
        >>> person = pipe.sample_models(space, seeds=[0])
        >>> images = pipe("sks person", space=space, model=person, edits={"beard": 2.0}, num_inference_steps=50).images
    """

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, **kwargs: Any) -> Any:
        """A pipeline around the components of another: this class for Stable Diffusion 1.x and 2.x.

        SDXL, image to image, inpainting, ControlNets, and every pipeline with a transformer of a known family, are
        kept whole, and become a :class:`W2WAroundPipeline`.

        Raises:
            VitrineError: If the other pipeline lacks a component, or its model is of no known family.
        """
        if kept_whole(pipeline):
            return W2WAroundPipeline.from_pipe(pipeline, **kwargs)
        return super().from_pipe(pipeline, **kwargs)

    @torch.no_grad()
    def __call__(  # type: ignore[override]
        self, prompt: str | list[str] | None = None, *args: Any, space: Space | None = None,
        model: W2WModel | None = None, edits: Mapping[str, float] | None = None, edit_config: EditConfig | None = None,
        seeds: Sequence[int] | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Samples as StableDiffusionPipeline does, each picture with its own model.

        Args:
            space, model: B models for B pictures, one for each prompt, or one for all; without them the base model
                draws.
            edits: label -> strength; they act from timestep ``edit_config.start`` down.
            seeds: one per picture, instead of ``generator``.
            args, kwargs: as StableDiffusionPipeline takes them; a single prompt, with its negative one, or encoded, is
                repeated for the models or seeds.

        Raises:
            VitrineError: If the model is of another space, or comes without one, or there is nothing to edit, or counts
                do not match.
        """
        refuse_unknown(type(self), kwargs)
        stock = super().__call__

        def run(prompt: Any, **named: Any) -> Any:
            return stock(prompt, *args, **named)

        wanted = CallRequest(space, model, edits, edit_config, seeds)
        return self._draw(run, wanted, {"prompt": prompt} | _texts(kwargs), kwargs)


class W2WAroundPipeline(AroundAnyPipeline, W2WTools):
    """The same around SDXL, or any pipeline with a transformer of a known family, which still samples itself.

    ::

        pipe = W2WPipeline.from_pipe(ZImagePipeline.from_pretrained("Tongyi-MAI/Z-Image-Turbo"))
        images = pipe("sks person", space=space, model=pipe.sample_models(space, seeds=[0])).images
    """

    def __call__(
        self, prompt: str | list[str] | None = None, *, space: Space | None = None,
        model: W2WModel | None = None, edits: Mapping[str, float] | None = None, edit_config: EditConfig | None = None,
        seeds: Sequence[int] | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Samples as the other pipeline does, each picture with its own model.

        Args:
            prompt, space, model, edits, edit_config, seeds: as in :class:`W2WPipeline`.
            kwargs: as the other pipeline takes them; a single prompt, with all that belongs to it, is repeated for the
                models or seeds.

        Raises:
            VitrineError: As :class:`W2WPipeline`, and if several models are to draw in one batch while a layer of the
                space sees the tokens of all pictures in one row.
        """
        refuse_unknown(type(self._source), kwargs)
        wanted = CallRequest(space, model, edits, edit_config, seeds)
        texts = {"prompt": prompt} | _texts(kwargs)
        return self._draw(self._source, wanted, texts, kwargs, clock_of(self._source, self._network))


def _texts(kwargs: dict[str, Any]) -> dict[str, Any]:
    """What says the same of each picture as its prompt does, taken out of a call's arguments."""
    names = [name for name in kwargs if "prompt" in name and not name.startswith("num_")]
    return {name: kwargs.pop(name) for name in names}
