"""Entropy rectifying guidance around a diffusers pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..control.entropy_guidance import EntropyConfig, first_half_weakened, query_sites
from ..diffusion.noise import generators
from ..errors import refuse
from ..families import FAMILIES
from .conventions import accepted_by, refuse_unknown
from .wrapping import Wrapping

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_STACKING = [name for family in FAMILIES for name in family.stacking]


class EntropyGuidedPipeline(Wrapping):
    """A pipeline (SD1.x, SD2.x, SDXL, PixArt) under entropy rectifying guidance (Berrada et al., NeurIPS 2025).

    It wraps the pipeline, whose own guidance then leads away from the same network with flat attention. The pipeline is
    changed only while a call runs.

    Example:
        >>> base = StableDiffusionPipeline.from_pretrained("path/to/model")
        >>> pipe = EntropyGuidedPipeline.from_pipe(base, EntropyConfig(scale=2.0, tau=0.01))
        >>> images = pipe("a prompt", seeds=[0, 1]).images
    """

    _choices = ("config",)

    def __init__(self, pipe: DiffusionPipeline, config: EntropyConfig) -> None:
        """Look for the sites at once."""
        calling = next((kind.__name__ for kind in type(pipe).__mro__ if "__call__" in vars(kind)), "")
        if calling not in _STACKING:
            raise refuse("pipeline", type(pipe).__name__, _STACKING, "others run the two branches apart, or not at all")
        self.pipe, self.config = pipe, config
        query_sites(self._network, config)

    def __call__(self, prompt: Any = None, *, seeds: list[int] | None = None, **kwargs: Any) -> Any:
        """Sample, all other arguments as the pipeline takes them.

        Args:
            negative_prompt: what conditions the weakened network, in place of the prompt; "" adds ordinary guidance.
            seeds: one for each picture; a single prompt is repeated for them.
        """
        if "guidance_scale" in kwargs:
            raise refuse("guidance_scale", kwargs["guidance_scale"], "the config's scale", "EntropyConfig(scale=...)")
        refuse_unknown(type(self.pipe), kwargs)
        if seeds is not None:
            kwargs["generator"] = generators(seeds)
            if isinstance(prompt, str):
                kwargs["num_images_per_prompt"] = len(seeds)
        same = not any(kwargs.get(name) is not None for name in ("negative_prompt", "negative_prompt_embeds"))
        if self.config.scale == 1 or (same and self.config.tau == 1):
            return self.pipe(prompt, guidance_scale=1.0, **kwargs)
        if same:
            kwargs |= self._repeated({"prompt": prompt} | kwargs)
        with first_half_weakened(self._network, self.config):
            return self.pipe(prompt, guidance_scale=self.config.scale, **kwargs)

    def _repeated(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The prompt, as text or encoded, under the names of the negative's."""
        accepted = accepted_by(type(self.pipe))
        pairs = {f"negative_{name}": value for name, value in arguments.items()}
        return {name: value for name, value in pairs.items() if name in accepted and value is not None}
