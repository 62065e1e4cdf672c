"""Records activations while a sampler runs: any pipeline, sampler or callable that calls the network.

::

    with tap_steps(pipe.unet, "up-level*-cross-q", steps=(0, 10, 29), rows=("uncond", "cond")) as record:
        pipe("a portrait")
    record[10]["cond"]["up-level0-repeat0-vit-block0-cross-q"].tensor
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..diffusion.forward_clock import Timesteps
from ..errors import refuse
from ..network.site import MapSite, Site
from ..runtime.compiled import uncompiled
from ..runtime.forward_hooks import Unreached, hook_after, hook_before
from ..tracing.addresses import resolve
from ..tracing.hooks import Activation, Capture, capture
from .container import Activations, TapInfo, store
from .tap_config import DTYPES


class Rows(NamedTuple):
    """One of the equal parts of the batch.

    Attributes:
        name: key of the recording.
        tokens: length of its prompt, if the sampler may have repeated that to match a longer one.
    """

    name: str
    tokens: int | None = None


Layout = Sequence[str] | Callable[[tuple, dict], Sequence[str | Rows]] | None
"""The equal parts of the batch, such as ("uncond", "cond"); or a function of the call's (args, kwargs); or None."""


class Moment(NamedTuple):
    """The step and the sampler call of a network call; a later call of a step replaces an earlier one."""

    step: int
    call: int


Counting = str | Callable[[tuple, dict], Moment | None]

DIFFUSERS_GUIDED = ("uncond", "cond")
"""The batch layout of guided diffusers pipelines."""


class StepRecord(Mapping[int, dict[str, Activations]]):
    """Step -> {"cond": Activations, "uncond": ...}; a call without a layout is stored under "all".

    Attributes:
        timesteps: of each recorded step.
        calls: number of network calls so far.
        unreached: sites that the last call should have recorded but did not run.
    """

    def __init__(self) -> None:
        self._steps: dict[int, dict[str, dict[str, Activation]]] = {}
        self.timesteps: dict[int, float] = {}
        self.calls = 0
        self.unreached: set[str] = set()

    def __getitem__(self, step: int) -> dict[str, Activations]:
        info = TapInfo(timestep=self.timesteps[step], step=step)
        return {half: Activations(items, info) for half, items in self._steps[step].items()}

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def contrast(self, step: int) -> dict[str, torch.Tensor]:
        """Conditional minus unconditional activation at each site: the effect of the prompt at this step."""
        halves = self[step]
        if not {"cond", "uncond"} <= set(halves):
            raise refuse("contrast", sorted(halves), "cond and uncond", "sample with guidance and give `rows`")
        cond, uncond = halves["cond"], halves["uncond"]
        return {a: cond[a].tensor - uncond[a].tensor for a in cond if a in uncond}


class _Recorder:
    """State of a recording: current step, batch layout, and recorded activations."""

    def __init__(
        self,
        sites: Sequence[Site],
        is_recorded: Callable[[int], bool],
        rows: Layout,
        count: Counting,
        dtype: torch.dtype,
        first: int,
    ) -> None:
        self.sites = {site.address: site for site in sites}
        self.is_recorded, self.rows, self.count, self.dtype = is_recorded, rows, count, dtype
        self.record = StepRecord()
        self.first, self.step = first, first - 1
        self.layout: tuple[Rows, ...] = (Rows("all"),)
        self._call: dict[int, int] = {}
        self._seen: set[str] = set()
        self.taps: Capture | None = None
        self._kept: list[tuple[dict[str, Activation], Activation]] = []
        self._aside = False
        self._last: float | None = None
        self._timesteps = Timesteps()

    def watch(self, network: nn.Module) -> list[RemovableHandle]:
        """Hooks at both ends of each forward."""
        before = hook_before(network, self.before, with_kwargs=True)
        return [before, hook_after(network, self.after, with_kwargs=True)]

    def before(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        counted = self._counted(args, kwargs)
        for half, activation in self._kept:  # from a forward that failed
            half.pop(activation.address, None)
        self._kept.clear()
        self._aside, self.record.unreached = False, set()
        self.record.calls += 1
        active = counted and self.is_recorded(self.step)
        if self.taps is not None:
            self.taps.enabled = active  # other steps run at full speed
        if active:
            layout = self.rows(args, kwargs) if callable(self.rows) else self.rows or ("all",)
            self.layout = tuple(Rows(part) if isinstance(part, str) else part for part in layout)
            self.record.timesteps.setdefault(self.step, float("nan"))  # read after the forward
            self._once()

    def after(self, module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        """Stores the activations of a finished forward; only here may the host synchronise.

        Raises:
            Unreached: If sites were not reached, as in blocks that were replayed without their hooks.
        """
        active = self.taps is not None and self.taps.enabled
        if active and not self._aside:
            self.record.unreached = set(self.sites) - {activation.address for _, activation in self._kept}
        if self._kept:
            refuse_unreached(self.record)
        for half, activation in self._kept:
            stored = store(activation.tensor, self.dtype, activation.address)
            half[activation.address] = replace(activation, tensor=stored.clone())
        self._kept.clear()
        if active:
            t = self._timesteps.first(args, kwargs)
            self.record.timesteps[self.step] = float("nan") if t is None else t

    def _once(self) -> None:
        """If calls are distinguished, each part of the batch may occur only once per call."""
        names = {part.name for part in self.layout}
        if callable(self.count) and names & self._seen:
            shown = f"several of {sorted(names & self._seen)} in one step"
            remedy = "record without context windows, tiling or similar"
            raise refuse("network calls", shown, "one per prompt", remedy)
        self._seen |= names

    def _counted(self, args: tuple, kwargs: dict) -> bool:
        """Records the step of this call; whether the call counts."""
        if callable(self.count):
            moment = self.count(args, kwargs)
            if moment is None:
                return False
            self.step = self.first + moment.step
            if self._call.get(self.step) != moment.call:
                self._call[self.step] = moment.call
                self._seen.clear()
                self.record._steps.pop(self.step, None)
            return True
        t = None if self.count == "calls" else self._timesteps.first(args, kwargs)
        if t is None or t != self._last:
            self.step += 1
        self._last = t
        return True

    def keep(self, activation: Activation) -> None:
        batch, count = activation.tensor.shape[0], len(self.layout)
        if count == 0 or batch % count:
            accepted = f"parts that divide {batch} rows"
            raise refuse("order of the batch", self.layout, accepted, "match it to the sampler's batch")
        halves = self.record._steps.setdefault(self.step, {})
        if not callable(self.count) and count < sum(activation.address in items for items in halves.values()):
            self._aside = True  # an additional pass, such as one with perturbed attention
            return
        for part, half in zip(self.layout, activation.tensor.chunk(count), strict=True):
            own = _unrepeated(half, self.sites[activation.address], part.tokens)
            items = halves.setdefault(part.name, {})
            items[activation.address] = replace(activation, tensor=own)
            self._kept.append((items, items[activation.address]))


def refuse_unreached(record: StepRecord) -> None:
    """Raises if the last call did not run sites that it should have recorded.

    Raises:
        Unreached: If there are such sites.
    """
    if record.unreached:
        shown = f"{len(record.unreached)} that a forward never reached: {min(record.unreached)} ..."
        remedy = "tap sites that every forward runs; start ComfyUI with --disable-cuda-graphs if it replays the network"
        raise Unreached(str(refuse("sites", shown, "layers that the network runs through", remedy)))


def _unrepeated(tensor: torch.Tensor, site: Site, tokens: int | None) -> torch.Tensor:
    """Undoes the repetition of a prompt of ``tokens`` tokens that was repeated to match a longer one.

    Text tokens (B, N, C) are those of the first copy. Maps (B, heads, queries, N) are summed over the copies, which
    share the attention to a token.
    """
    axis = 1 if site.kind == "text" else -1
    if tokens is None or not (site.kind == "text" or (isinstance(site, MapSite) and site.text_keys)):
        return tensor
    copies, remainder = divmod(tensor.shape[axis], tokens)
    if remainder or copies < 2:
        return tensor
    return tensor[:, :tokens] if axis == 1 else tensor.unflatten(-1, (copies, tokens)).sum(-2)


@contextmanager
def tap_steps(
    backbone: nn.Module,
    addresses: str | Sequence[str],
    steps: int | Collection[int] | Callable[[int], bool],
    *,
    rows: Layout = None,
    count: Counting = "calls",
    dtype: str = "float32",
    first: int = 0,
) -> Iterator[StepRecord]:
    """Records activations at chosen sampling steps while the block is open.

    Args:
        steps: step numbers from ``first``, or a function of the step number; only these are stored, which bounds
            memory.
        rows: the equal parts of the batch (``DIFFUSERS_GUIDED`` for guided diffusers pipelines; perturbed-attention
            guidance adds a third part, and InstructPix2Pix begins with the prompt), or a function of the network
            call's (args, kwargs) for samplers whose layout changes.
        count: "calls" counts network calls; "timesteps" counts changes of the timestep, for samplers that call the
            network separately for cond and uncond. Or a function of the network call's (args, kwargs): the call's
            :class:`Moment`, counted from ``first``, or None for a call that is not to be recorded.
        first: index of the first step inside the block, for a run that continues another.

    Leaving the block removes every hook, also after an interruption.
    """
    sites = resolve(backbone, addresses)
    if not callable(steps):
        steps = frozenset([steps] if isinstance(steps, int) else steps)
        if not steps or any(isinstance(s, bool) or not isinstance(s, int) or s < 0 for s in steps):
            raise refuse("steps", sorted(steps, key=str), "one or more integers >= 0", "count sampling steps from 0")
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise refuse("first", first, "an integer >= 0", "give the index of the run's first step")
    if not callable(count) and count not in ("calls", "timesteps"):
        raise refuse(
            "count", count, "'calls', 'timesteps' or a function", "'timesteps' suits separate cond / uncond calls"
        )
    if dtype not in DTYPES:
        raise refuse("dtype", dtype, sorted(DTYPES), "float16 halves the memory")
    recorder = _Recorder(sites, steps if callable(steps) else steps.__contains__, rows, count, DTYPES[dtype], first)
    handles = recorder.watch(uncompiled(backbone))
    try:
        with capture(backbone, sites, reduce=recorder.keep) as recorder.taps:
            yield recorder.record
    finally:
        for handle in handles:
            handle.remove()
