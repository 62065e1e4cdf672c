"""One-step generation around a transformer's own pipeline, which reads the prompts and loads the LoRA.

Not postponing annotations here: ``from_pipe`` reads the component types from ``__init__``.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import ModelMixin, SchedulerMixin

from ..emd import StudentPreset
from ..errors import refuse
from ..network.condition import Condition
from ..settings.sizes import check_sides
from .around import MASKS, AroundPipeline
from .emd_tools import OneStepTools


class EMDOneStepTransformerPipeline(AroundPipeline, OneStepTools):
    """Any transformer of a known family as a one-step student; of a flow, x0 = z - v(z, t*) at t* = 1000.

    ::

        pipe = EMDOneStepPipeline.from_pipe(FluxPipeline.from_pretrained("path/to/schnell"))
        images = pipe("a prompt", seeds=[0]).images

    Encoded prompts are taken with what the other pipeline's call takes with them: ``pooled_prompt_embeds``,
    ``prompt_embeds_mask`` or ``prompt_attention_mask``.
    """

    model_cpu_offload_seq = "vae->transformer"
    _masks = MASKS

    def __init__(self, vae: ModelMixin, transformer: ModelMixin, scheduler: SchedulerMixin) -> None:
        super().__init__()
        self.register_modules(vae=vae, transformer=transformer, scheduler=scheduler)

    @property
    def _processor(self) -> Any:
        source = self._source
        return source.image_processor if hasattr(source, "image_processor") else source.video_processor

    def load_lora_weights(self, tensors: dict[str, torch.Tensor], adapter_name: str) -> None:
        """By the other pipeline.

        Raises:
            VitrineError: If it loads no LoRAs.
        """
        if not hasattr(self._source, "load_lora_weights"):
            shown, accepted = f"a LoRA for {type(self._source).__name__}", "a pipeline that loads LoRAs"
            raise refuse("student", shown, accepted, "load a student that is a whole network")
        self._source.load_lora_weights(tensors, adapter_name=adapter_name)

    def _take(self, network: Any) -> None:
        source = copy.copy(self._source)  # the other pipeline keeps its own
        source.register_modules(transformer=network)
        self.__dict__["source"] = source
        self.register_modules(transformer=network)

    def prompted(
        self, prompts: Sequence[str] | None, size: tuple[int, int], embeds: Any = None,
        pooled: torch.Tensor | None = None, **masks: torch.Tensor,
    ) -> Condition:  # fmt: skip
        if embeds is None:
            return self._condition(list(prompts or []), *size)
        return self._given(size, embeds, pooled, masks)

    def unprompted(self, size: tuple[int, int]) -> Condition:
        self._refuse_without_encoder("guidance of the repair")
        return self._condition([""], *size)

    def _shape(self, contract: StudentPreset, height: int | None, width: int | None) -> tuple[int, ...]:
        check_sides("height, width", height, width)
        factor, patch = self.vae_scale_factor, self._latent.patch
        own = tuple(side * factor for side in contract.shape[1:])
        asked = (height, width) if height and width else own or self._usual_size()
        asked = (height or asked[0], width or asked[1])
        if contract.shape and asked != own:
            raise refuse("height, width", asked, f"{own}, the student's", "leave them out")
        if any(side % (factor * patch) for side in asked):
            raise refuse("height, width", asked, f"multiples of {factor * patch}", "round them")
        return self._latent_channels, asked[0] // factor, asked[1] // factor
