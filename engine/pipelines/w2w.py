"""weights2weights as a diffusers pipeline: sample, edit, invert and blend models of a space, and sample with them.

Not postponing annotations here: ``from_pipe`` reads the component types from ``__init__``.
"""

from diffusers import StableDiffusionPipeline

from .from_parts import FromParts
from .w2w_tools import W2WTools
from .wrapping import AroundPipeline


class W2WPipeline(W2WTools, FromParts, StableDiffusionPipeline):
    """Stable Diffusion whose weights are a point of a space of models (weights2weights, Dravid et al., NeurIPS 2024).

    Example:
        >>> pipe = W2WPipeline.from_pipe(StableDiffusionPipeline.from_pretrained("path/to/base"))
        >>> space = load_space("people.w2w.safetensors")
        >>> person = pipe.sample_models(space, seeds=[0])
        >>> images = pipe("sks person", space=space, model=person, edits={"beard": 2.0}, num_inference_steps=50).images
    """


class W2WAroundPipeline(W2WTools, AroundPipeline):
    """The same around SDXL, or any pipeline with a transformer of a known family, which still samples itself.

    ::

        pipe = W2WPipeline.from_pipe(ZImagePipeline.from_pretrained("Tongyi-MAI/Z-Image-Turbo"))
        images = pipe("sks person", space=space, model=pipe.sample_models(space, seeds=[0])).images
    """


W2WPipeline._forms = dict.fromkeys(("xl", "transformer", "other"), W2WAroundPipeline)
