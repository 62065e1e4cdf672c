"""Sampling with neurons blocked: the call of NEMO's pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..errors import refuse
from ..families import FAMILIES, family_of
from ..nemo.block import BlockConfig, RunningForward, block
from ..nemo.neurons import NeuronSet
from ..runtime.forward_hooks import hook_before
from .adapter import network_of
from .conventions import refuse_unknown
from .prompt_rows import noted_prompts
from .sampling_clock import share_of
from .shared import SharedPipeline

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

Neurons = NeuronSet | list[NeuronSet]


class BlockedSampling(SharedPipeline):
    """The call of :class:`~vitrine.engine.pipelines.NEMOPipeline`."""

    @torch.no_grad()
    def __call__(
        self, *args: Any, neurons: Neurons | None = None, block_config: BlockConfig | None = None, **kwargs: Any
    ) -> Any:
        """Sample as the stock pipeline does, with neurons blocked meanwhile.

        Args:
            neurons: one set, or several that are merged; None or an empty set samples untouched.
            block_config: factor, branch, part of sampling; the default blocks fully, in both branches, all the time.
        """
        pipe = self._adapter.pipe
        refuse_unknown(type(pipe), kwargs)
        with self._in_use(), blocked(pipe, neurons, block_config):
            return super().__call__(*args, **kwargs)  # type: ignore[misc] # the stock class's, or the wrapped one's


@contextmanager
def blocked(pipe: DiffusionPipeline, neurons: Neurons | None, config: BlockConfig | None) -> Iterator[None]:
    """Neurons of a pipeline's network, blocked in whatever it samples while the block is open."""
    sets = [neurons] if isinstance(neurons, NeuronSet) else list(neurons or [])
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
