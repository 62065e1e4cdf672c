"""NEMO as a diffusers pipeline: score prompts, find the neurons that memorize, sample with them blocked.

Not postponing annotations here: ``from_pipe`` reads the component types from ``__init__``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from diffusers import DiffusionPipeline, StableDiffusionPipeline

from ..errors import refuse
from ..families import FAMILIES, family_of
from ..nemo import BlockConfig, NeuronSet, block
from ..nemo.block import RunningForward
from ..network.condition import Condition
from ..runtime.forward_hooks import hook_before
from ..settings.sizes import check_sides
from .around import AroundAnyPipeline, kept_whole, share_of
from .conventions import refuse_unknown
from .nemo_erase import ErasingPart
from .nemo_tools import NEMOTools
from .prompt_rows import noted_prompts

Neurons = NeuronSet | list[NeuronSet]


class NEMOPipeline(ErasingPart, NEMOTools, StableDiffusionPipeline):
    """Stable Diffusion 1.x or 2.x with the NEMO tools (Hintersdorf et al., NeurIPS 2024).

    Example:
        >>> pipe = NEMOPipeline.from_pipe(StableDiffusionPipeline.from_pretrained("path/to/model"))
        >>> statistics = pipe.statistics(ordinary_captions)
        >>> (result,) = pipe.find(["a suspicious prompt"], statistics)
        >>> images = pipe("a suspicious prompt", neurons=pipe.neurons(result)).images
    """

    _choices = ("size",)

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, *, size: tuple[int, int] | None = None, **kwargs: Any) -> Any:
        """A pipeline around the components of another: this class for Stable Diffusion 1.x and 2.x.

        SDXL, image to image, inpainting, ControlNets, and every pipeline with a transformer of a known family, are
        kept whole, and become a :class:`NEMOAroundPipeline`.

        Args:
            size: (height, width) in pixels of what scores and searches predict; by default the network's own. What a
                call samples is as large as the call says, and blocked at any size.

        Raises:
            VitrineError: If the other pipeline lacks a component, its model is of no known family, or the autoencoder
                does not divide the size.
        """
        check_sides("size", *(size or ()))
        if kept_whole(pipeline):
            return NEMOAroundPipeline.from_pipe(pipeline, size=size, **kwargs)
        made = super().from_pipe(pipeline, **kwargs)
        if size is not None and any(side < 1 or side % made.vae_scale_factor for side in size):
            accepted = f"(height, width), multiples of {made.vae_scale_factor}"
            raise refuse("size", size, accepted, "those of the pictures that you sample")
        made.__dict__["_size"] = size
        return made

    @torch.no_grad()
    def __call__(
        self, *args: Any, neurons: Neurons | None = None, block_config: BlockConfig | None = None, **kwargs: Any
    ) -> Any:
        """Sample as StableDiffusionPipeline does, with neurons blocked meanwhile.

        Args:
            neurons: one set, or several that are merged; None or an empty set samples untouched.
            block_config: factor, branch, part of sampling; the default blocks fully, in both branches, all the time.

        Raises:
            VitrineError: If the neurons belong to another model, or an argument is unknown, before any sampling.
        """
        refuse_unknown(type(self), kwargs)
        with self._in_use(), blocked(self, neurons, block_config):
            return super().__call__(*args, **kwargs)


class NEMOAroundPipeline(AroundAnyPipeline, NEMOTools):
    """The NEMO tools around SDXL, or any pipeline with a transformer of a known family, which still samples itself.

    Transformers' neurons are the values of the text stream in joint attention, or of cross-attention. No paper has
    published what the method does there.

    ::

        pipe = NEMOPipeline.from_pipe(StableDiffusion3Pipeline.from_pretrained("path/to/sd3"), size=(1024, 1024))
    """

    _choices = ("size",)

    @classmethod
    def from_pipe(cls, pipeline: DiffusionPipeline, *, size: tuple[int, int] | None = None, **kwargs: Any) -> Any:
        """As of every pipeline here; the other pipeline is kept.

        Args:
            size: (height, width) in pixels of what scores and searches predict; by default the other pipeline's own.

        Raises:
            VitrineError: If the model is of no known family, or the family has no pipeline to encode prompts.
        """
        check_sides("size", *(size or ()))
        made = super().from_pipe(pipeline, **kwargs)
        made.__dict__["_size"] = size
        return made

    def __call__(
        self, *args: Any, neurons: Neurons | None = None, block_config: BlockConfig | None = None, **kwargs: Any
    ) -> Any:
        """Sample as the other pipeline does, with neurons blocked meanwhile.

        Args:
            neurons, block_config: as in :class:`NEMOPipeline`.

        Raises:
            VitrineError: If the neurons belong to another model, an argument is unknown, or only the rows with the
                prompt are to be blocked where the other pipeline does not stack them behind the negative prompt's.
        """
        refuse_unknown(type(self._source), kwargs)
        with self._in_use(), blocked(self._source, neurons, block_config):
            return self._source(*args, **kwargs)

    def erase(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Erasing is for Stable Diffusion 1.x and 2.x.

        Raises:
            VitrineError: Always: its losses and attacks are of networks that read the text alone.
        """
        accepted = "StableDiffusionPipeline, of SD 1.x or 2.x, whose network reads the text alone"
        raise refuse("pipeline to erase from", type(self._source).__name__, accepted, "block the neurons instead")

    def _condition(self, prompts: list[str], *size: int) -> Condition:  # type: ignore[override]
        return AroundAnyPipeline._condition(self, prompts, *(size or self._pixels()))

    def _pixels(self) -> tuple[int, int]:
        """(height, width) of what is predicted."""
        chosen: tuple[int, int] | None = self.__dict__["_size"]
        return self._usual_size() if chosen is None else chosen

    def latent_shape(self) -> tuple[int, int, int]:
        """(C, h, w) of the latents that are scored and searched."""
        height, width = (side // self.vae_scale_factor for side in self._pixels())
        return self._latent_channels, height, width

    def _blank(self, cond: Condition) -> torch.Tensor:
        """The same noise for every caption, as the node samples it: values depend on it little."""
        blank = torch.randn(1, self._latent_channels, 16, 16, generator=torch.Generator().manual_seed(1))
        return blank.expand(cond.count, -1, -1, -1).to(self._execution_device)


@contextmanager
def blocked(pipe: Any, neurons: Neurons | None, config: BlockConfig | None) -> Iterator[None]:
    """Neurons of a pipeline's network, blocked in whatever it samples while the block is open.

    Raises:
        VitrineError: If the neurons belong to another model, or the rows of the requested branch cannot be told apart.
    """
    sets = [neurons] if isinstance(neurons, NeuronSet) else list(neurons or [])
    if not any(map(len, sets)):
        yield
        return
    net = getattr(pipe, "unet", None)
    net = pipe.transformer if net is None else net
    config, running = config or BlockConfig(), RunningForward()
    if config.branch == "cond" and not family_of(net).stacked:
        accepted = f"'both', or a pipeline of {', '.join(family.name for family in FAMILIES if family.stacked)}"
        raise refuse("branch", config.branch, accepted, "this one's order of prompt and negative prompt is not known")
    share = share_of(pipe, net)

    def follow(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        running.update(config, share(args, kwargs), lambda: rows.of(args, kwargs))

    with noted_prompts(pipe) as rows, block(net, sets[0].merged(*sets[1:]), config, running=running):
        handle = hook_before(net, follow, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
