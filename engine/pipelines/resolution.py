"""Resolution transfer around any diffusers pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..diffusion.noise import generators
from ..errors import refuse
from ..resolution import Plan, ResolutionTransferConfig, apply, facts_of, plan_transfer
from ..resolution.transfer import backbone_of, refuse_moved
from .conventions import accepted_by, inputs_of_blocks, refuse_unknown
from .wrapping import Wrapping

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class ResolutionTransferPipeline(Wrapping):
    """A pipeline (SD, SDXL, PixArt, SD3, FLUX, DiT) sampled away from its training size (Berrada et al., NeurIPS 2024).

    It wraps the pipeline rather than deriving from one class, so it serves all of them. The pipeline is changed only
    while a call runs.

    Example:
        >>> base = StableDiffusionXLPipeline.from_pretrained("path/to/model")
        >>> pipe = ResolutionTransferPipeline.from_pipe(base, ResolutionTransferConfig((1536, 1024)))
        >>> print(pipe.plan.summary)
        >>> images = pipe("a prompt", seeds=[0, 1]).images
    """

    _choices = ("config", "metadata")

    def __init__(
        self, pipe: DiffusionPipeline, config: ResolutionTransferConfig, metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Plan at once, so that an impossible transfer is refused here.

        Args:
            pipe: any diffusers pipeline with a unet or a transformer.
            metadata: of the checkpoint's safetensors header, for relabel; see ``resolution.read_metadata``.
        """
        if isinstance(pipe, ResolutionTransferPipeline):
            remedy = "wrap its .pipe"
            raise refuse("pipeline", "one that is moved to another size already", "a pipeline as it was loaded", remedy)
        refuse_moved(pipe)
        self.pipe, self.config, self.metadata = pipe, config, metadata
        self.plan  # noqa: B018 - refuses what cannot be done

    @property
    def plan(self) -> Plan:
        """What will be done to the pipeline in its current state; ``plan.summary`` says it in words."""
        return plan_transfer(facts_of(self.pipe, self.config.train_size), self.config, self.metadata)

    def __call__(self, *args: Any, seeds: list[int] | None = None, **kwargs: Any) -> Any:
        """Sample at the target size, all other arguments as the pipeline takes them.

        Args:
            seeds: one for each picture; a single prompt is repeated for them.
            guidance_scale: without it the planned one is used, if the config has one.
        """
        blocks = inputs_of_blocks(self.pipe)
        accepted = [*accepted_by(type(self.pipe)), *blocks]
        refuse_unknown(type(self.pipe), kwargs, blocks)
        self._sizes(kwargs, accepted)
        if seeds is not None:
            kwargs["generator"] = generators(seeds)
            single = isinstance(args[0] if args else kwargs.get("prompt"), str)
            if single and "num_images_per_prompt" in accepted:
                kwargs["num_images_per_prompt"] = len(seeds)
        with apply(self.pipe, self.config, self.metadata) as applied:
            if applied.plan.guidance is not None:
                if blocks and "guidance_scale" not in accepted:
                    remedy = f"leave guidance out, and give {applied.plan.guidance:g} to the pipeline's guider"
                    raise refuse("guidance", self.config.guidance, "none for a modular pipeline", remedy)
                kwargs.setdefault("guidance_scale", applied.plan.guidance)
            return self.pipe(*args, **kwargs)

    def _sizes(self, kwargs: dict[str, Any], accepted: Sequence[str]) -> None:
        """Fill in height and width; a pipeline without them takes its size from the network's config."""
        width, height = self.config.target_size
        wanted = {"height": height, "width": width}
        if "height" not in accepted:
            side, factor = backbone_of(self.pipe)[1].config.sample_size, facts_of(self.pipe).factor
            if (side * factor,) * 2 != (width, height):
                remedy = "build the network with the target's sample_size and give train_size"
                raise refuse("target size", (width, height), f"{side * factor} a side, as built", remedy)
            return
        if "use_resolution_binning" in accepted:
            kwargs.setdefault("use_resolution_binning", False)  # PixArt would round the size to one of its bins
        for name, value in wanted.items():
            if kwargs.setdefault(name, value) != value:
                raise refuse(name, kwargs[name], value, "the plan is for one size; make another pipeline object")
