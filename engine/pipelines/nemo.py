"""NEMO as a diffusers pipeline: calibrate, detect, find the neurons that memorize, sample with them blocked, verify."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from typing_extensions import Self

from ..errors import expect, refuse
from ..families import FAMILIES, family_of
from ..nemo import BlockConfig, NeuronSet, block
from ..nemo.block import RunningForward
from ..runtime.forward_hooks import hook_before
from ..settings.sizes import check_sides
from . import nemo_jobs
from .adapter import network_of
from .conventions import refuse_unknown
from .joined import TaskPipeline
from .prompt_rows import noted_prompts
from .sampling_clock import share_of

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

Neurons = NeuronSet | list[NeuronSet]


class NEMOPipeline(TaskPipeline):
    """Any pipeline with the NEMO tools (Hintersdorf et al., NeurIPS 2024), which still samples itself.

    Functions that take it: ``import_statistics``, ``adjust_prompt``, ``verify_blocking``.

    Transformers' neurons are the values of the text stream in joint attention, or of cross-attention. No paper has
    published what the method does there.

    Example:
        >>> pipe = NEMOPipeline.from_pipe(StableDiffusionPipeline.from_pretrained("path/to/model"))
        >>> calibration = pipe.calibrate(ordinary_captions)
        >>> (result,) = pipe.find(["a suspicious prompt"], calibration)
        >>> images = pipe("a suspicious prompt", neurons=pipe.neurons(result)).images

    Attributes:
        predicted_size: (height, width) in pixels of what scores and searches predict; None is the pipeline's own.
    """

    _choices = ("size",)
    predicted_size: tuple[int, int] | None = None

    calibrate = nemo_jobs.calibrate
    detect = nemo_jobs.detect
    find = nemo_jobs.find
    neurons = nemo_jobs.neurons_of
    copies = nemo_jobs.count_copies

    @classmethod
    def from_pipe(cls, pipeline: Any, *, size: tuple[int, int] | None = None, **kwargs: Any) -> Self:
        """As :meth:`TaskPipeline.from_pipe`, with a size.

        Args:
            size: (height, width) in pixels of what scores and searches predict; by default the pipeline's own. What a
                call samples is as large as the call says, and blocked at any size.
        """
        check_sides("size", *(size or ()))
        made = super().from_pipe(pipeline, **kwargs)
        if size is not None and any(side < 1 or side % made._adapter.factor for side in size):
            accepted = f"(height, width), multiples of {made._adapter.factor}"
            raise refuse("size", size, accepted, "those of the pictures that you sample")
        made.predicted_size = size
        return made

    @torch.no_grad()
    def __call__(
        self, *args: Any, neurons: Neurons | None = None, block_config: BlockConfig | None = None, **kwargs: Any
    ) -> ImagePipelineOutput:
        """Sample as the stock pipeline does, with neurons blocked meanwhile.

        Args:
            neurons: one set, or several that are merged; None or an empty set samples untouched.
            block_config: factor, branch, part of sampling; the default takes the sets' own factors, in both branches,
                all the time.
        """
        refuse_unknown(type(self), kwargs)
        stock: Any = super().__call__
        with self._in_use(), blocked(self, neurons, block_config):
            pictures: ImagePipelineOutput = stock(*args, **kwargs)
        return pictures


@contextmanager
def blocked(pipe: DiffusionPipeline, neurons: Neurons | None, config: BlockConfig | None) -> Iterator[None]:
    """Neurons of a pipeline's network, blocked in whatever it samples while the block is open."""
    sets = neurons if isinstance(neurons, (list, tuple)) else [] if neurons is None else [neurons]
    for each in sets:
        expect(each, NeuronSet, "neurons", "pipe.neurons(result) makes them, NeuronSet.load(file) reads them")
    if not any(map(len, sets)):
        yield
        return
    net = network_of(pipe)
    config, running = config or BlockConfig(), RunningForward()
    if config.branch == "cond" and not family_of(net).stacked:
        accepted = f"'both', or a pipeline of {', '.join(family.name for family in FAMILIES if family.stacked)}"
        raise refuse("branch", config.branch, accepted, "this one's order of prompt and negative prompt is not known")
    elapsed = share_of(pipe, net)

    def follow(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        running.update(config, elapsed(args, kwargs), lambda: rows.of(args, kwargs))

    with noted_prompts(pipe) as rows, block(net, sets[0].merged(*sets[1:]), config, running=running):
        handle = hook_before(net, follow, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
