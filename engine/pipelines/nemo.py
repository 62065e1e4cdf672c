"""NEMO as a diffusers pipeline: score prompts, find the neurons that memorize, sample with them blocked.

Not postponing annotations here: ``from_pipe`` reads the component types from ``__init__``.
"""

from diffusers import StableDiffusionPipeline

from .from_parts import FromParts
from .nemo_blocking import BlockedSampling
from .nemo_tools import NEMOTools
from .wrapping import AroundPipeline


class NEMOPipeline(NEMOTools, BlockedSampling, FromParts, StableDiffusionPipeline):
    """Stable Diffusion 1.x or 2.x with the NEMO tools (Hintersdorf et al., NeurIPS 2024).

    Example:
        >>> pipe = NEMOPipeline.from_pipe(StableDiffusionPipeline.from_pretrained("path/to/model"))
        >>> statistics = pipe.statistics(ordinary_captions)
        >>> (result,) = pipe.find(["a suspicious prompt"], statistics)
        >>> images = pipe("a suspicious prompt", neurons=pipe.neurons(result)).images
    """


class NEMOAroundPipeline(NEMOTools, BlockedSampling, AroundPipeline):
    """The NEMO tools around SDXL, or any pipeline with a transformer of a known family, which still samples itself.

    Transformers' neurons are the values of the text stream in joint attention, or of cross-attention. No paper has
    published what the method does there.

    ::

        pipe = NEMOPipeline.from_pipe(StableDiffusion3Pipeline.from_pretrained("path/to/sd3"), size=(1024, 1024))
    """


NEMOPipeline._forms = dict.fromkeys(("xl", "transformer", "other"), NEMOAroundPipeline)
