"""Resolution transfer around any diffusers pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from typing_extensions import Self

from ..diffusion.noise import generators, seeds_of
from ..errors import expect, refuse
from ..resolution import Plan, ResolutionTransferConfig, apply, facts_of, plan_transfer
from ..resolution.transfer import backbone_of, refuse_moved
from .conventions import accepted_by, inputs_of_blocks, refuse_unknown
from .joined import TaskPipeline


class ResolutionTransferPipeline(TaskPipeline):
    """A pipeline (SD, SDXL, PixArt, SD3, FLUX, DiT) sampled away from its training size (Berrada et al., NeurIPS 2024).

    The network and the scheduler are changed only while a call runs.

    Example:
        >>> base = StableDiffusionXLPipeline.from_pretrained("path/to/model")
        >>> pipe = ResolutionTransferPipeline.from_pipe(base, ResolutionTransferConfig((1536, 1024)))
        >>> print(pipe.plan.summary)
        >>> images = pipe("a prompt", seeds=[0, 1]).images

    Attributes:
        transfer: the target size, and how positions and schedule follow it.
        metadata: of the checkpoint's safetensors header, for relabel; see ``resolution.read_metadata``.
    """

    _choices = ("config", "metadata")
    _needed = ()
    transfer: ResolutionTransferConfig
    metadata: Mapping[str, Any] | None

    @classmethod
    def from_pipe(  # type: ignore[override] # with what is asked of it
        cls, pipeline: Any, config: ResolutionTransferConfig, metadata: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> Self:
        """As :meth:`TaskPipeline.from_pipe`, with what is asked of it; an impossible transfer is refused here.

        Args:
            pipeline: any diffusers pipeline with a unet or a transformer.
            metadata: of the checkpoint's safetensors header, for relabel; see ``resolution.read_metadata``.
        """
        remedy = "e.g. ResolutionTransferConfig((1536, 1024)), width and height"
        expect(config, ResolutionTransferConfig, "config", remedy)
        made = super().from_pipe(pipeline, **kwargs)
        made.transfer, made.metadata = config, metadata
        made.plan  # noqa: B018 - refuses what cannot be done
        return made

    @classmethod
    def _check(cls, pipeline: Any, components: dict[str, Any]) -> None:
        """Any network that the engine can move, whether it is of a known family or not."""
        if isinstance(pipeline, ResolutionTransferPipeline):
            shown, remedy = "one that is moved to another size already", "take the pipeline that it was made from"
            raise refuse("pipeline", shown, "a pipeline as it was loaded", remedy)
        refuse_moved(pipeline)

    @property
    def plan(self) -> Plan:
        """What will be done to the pipeline in its current state; ``plan.summary`` says it in words."""
        return plan_transfer(facts_of(self, self.transfer.train_size), self.transfer, self.metadata)

    def __call__(self, *args: Any, seeds: int | list[int] | None = None, **kwargs: Any) -> ImagePipelineOutput:
        """Sample at the target size, all other arguments as the pipeline takes them.

        Args:
            seeds: one for each picture; a single prompt is repeated for them.
            guidance_scale: without it the planned one is used, if the config has one.
        """
        blocks = inputs_of_blocks(self)
        accepted = [*accepted_by(type(self)), *blocks]
        refuse_unknown(type(self), kwargs, blocks)
        _fill_in_sizes(self, kwargs, accepted)
        if seeds is not None:
            seeds = seeds_of(seeds)
            kwargs["generator"] = generators(seeds)
            single = isinstance(args[0] if args else kwargs.get("prompt"), str)
            if single and "num_images_per_prompt" in accepted:
                kwargs["num_images_per_prompt"] = len(seeds)
        stock: Any = super().__call__
        with apply(self, self.transfer, self.metadata) as applied:
            if applied.plan.guidance is not None:
                if blocks and "guidance_scale" not in accepted:
                    remedy = f"leave guidance out, and give {applied.plan.guidance:g} to the pipeline's guider"
                    raise refuse("guidance", self.transfer.guidance, "none for a modular pipeline", remedy)
                kwargs.setdefault("guidance_scale", applied.plan.guidance)
            pictures: ImagePipelineOutput = stock(*args, **kwargs)
        return pictures


def _fill_in_sizes(pipe: ResolutionTransferPipeline, kwargs: dict[str, Any], accepted: Sequence[str]) -> None:
    """Fill in height and width; a pipeline without them takes its size from the network's config."""
    width, height = pipe.transfer.target_size
    wanted = {"height": height, "width": width}
    if "height" not in accepted:
        side, factor = backbone_of(pipe)[1].config.sample_size, facts_of(pipe).factor
        if (side * factor,) * 2 != (width, height):
            remedy = "build the network with the target's sample_size and give train_size"
            raise refuse("target size", (width, height), f"{side * factor} a side, as built", remedy)
        return
    if "use_resolution_binning" in accepted:
        kwargs.setdefault("use_resolution_binning", False)  # PixArt would round the size to one of its bins
    for name, value in wanted.items():
        if kwargs.setdefault(name, value) != value:
            raise refuse(name, kwargs[name], value, "the plan is for one size; make another pipeline object")
