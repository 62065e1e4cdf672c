"""Recording activations while a sampler runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import comfy.model_management
import torch
from comfy_execution.graph_utils import ExecutionBlocker
from comfy_execution.utils import get_executing_context

from ...engine.activations import Activations, StepRecord, tap_steps
from ...engine.activations.tap_during_sampling import Moment, Rows, refuse_unreached
from ...engine.errors import refuse
from ...engine.tracing.addresses import resolve
from .forwards import Forward, Run, around_forwards, around_sampling
from .model import backbone_of
from .patches import refuse_other_tokens
from .running import Running, running_in, watched

_KEY = "vitrine"


Origin = tuple[str, int | None] | None
"""The node, and its index in a list, that ran a sampler; None outside a graph."""


@dataclass
class Recorded:
    """One sampling run.

    Attributes:
        record: what was kept of it.
        origin: who ran it, of which the newest run counts.
        prompt: the execution of the graph in which it ran.
        latent: digest of the latents that came out, "" before the end.
        clean: digest of the clean prediction of the last step, which custom samplers put out too.
        earlier: runs of the same origin before it, in the same execution.
    """

    record: StepRecord
    origin: Origin = None
    prompt: str = ""
    latent: str = ""
    earlier: int = 0
    clean: str = ""


@dataclass
class Recorder:
    """What the clone it was made with has recorded: the newest run of each sampler node."""

    runs: list[Recorded] = field(default_factory=list)

    @property
    def record(self) -> StepRecord | None:
        """Of the newest run."""
        return self.runs[-1].record if self.runs else None

    def begin(self, record: StepRecord) -> Recorded:
        """A new run; earlier ones of the same node go, but for those of the same list."""
        context = get_executing_context()
        prompt, origin = ("", None) if context is None else (context.prompt_id, (context.node_id, context.list_index))
        node = origin and origin[0]
        same = [run for run in self.runs if origin is not None and (run.origin, run.prompt) == (origin, prompt)]
        self.runs = [
            run
            for run in self.runs
            if (run.origin and run.origin[0]) != node or (run.prompt == prompt and run.origin != origin)
        ]
        self.runs.append(Recorded(record, origin, prompt, earlier=sum(1 + run.earlier for run in same)))
        return self.runs[-1]

    @contextmanager
    def recorded(self, forward: Forward) -> Iterator[None]:
        """Around one forward of a run, which is refused if layers to record were not run."""
        yield
        if self.record is not None:
            refuse_unreached(self.record)

    def of(self, latent: dict | None) -> StepRecord | None:
        """The record of the run that a LATENT came out of, however few runs there are; None: the newest run."""
        if latent is None or not self.runs:
            return self.record
        wanted = _digest(latent["samples"])
        records = [run.record for run in self.runs if wanted in (run.latent, run.clean)]
        if not records:
            count = sum(1 + run.earlier for run in self.runs)
            runs = "the recorded run" if count == 1 else f"the newest of the {count} recorded runs"
            remedy = "connect the LATENT straight from the sampler that used the recording MODEL; if it is, let that "
            remedy += "run again with another seed: each run of a sampler replaces its last recording"
            raise refuse("latent", f"one that did not come out of {runs}", "the output of a recorded run", remedy)
        return records[-1]

    def activations(self, step: int, half: str, latent: dict | None = None, part: int = 0) -> Activations:
        """What one step recorded; ``step`` -1 is the last one.

        Args:
            half: ``cond``, ``uncond``, or what else the run's guider has, such as ``middle``.
            latent: that came out of the run; None: the newest run.
            part: which of several prompts combined in one conditioning, from 1; 0: the only one of that step.
        """
        record = self.of(latent)
        if record is None:
            raise refuse("recording", "empty", "a sampled model", "run the sampler first: connect its LATENT here")
        if not len(record):
            shown = f"nothing in {record.calls} network calls"
            remedy = "ask for steps that the run has; context windows and tiles are not recorded"
            raise refuse("recording", shown, "a whole pass of guidance at a chosen step", remedy)
        steps = list(record)
        chosen = steps[-1] if step == -1 else step
        halves = record[chosen] if chosen in steps else {}
        names = [name for name in halves if name == half or name.startswith(f"{half} ")]
        if part:
            names = [name for name in names if name == (half if part == 1 and half in names else f"{half} {part}")]
        if len(names) > 1:
            shown, accepted = f"{half} at step {chosen}, which has {len(names)}", f"one of {sorted(names)}"
            raise refuse("part", shown, accepted, "several prompts were combined: give the number of one as part")
        if not names:
            shown = f"{step} ({half}{f' {part}' if part else ''})"
            remedy = "record that step in Tap During Sampling"
            raise refuse("step", shown, f"steps {steps}, {sorted(halves or record[steps[-1]])}", remedy)
        return halves[names[0]]


def _digest(samples: Any) -> str:
    """Of latents as samplers put them out: in the dtype in which they are handed on."""
    if samples.is_nested:
        return ",".join(_digest(part) for part in samples.unbind())
    values = samples.detach().to("cpu", comfy.model_management.intermediate_dtype()).contiguous()
    return hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()


def record_sampling(
    model: Any,
    addresses: str,
    steps: set[int] | Callable[[int], bool],
    watch: Callable[[Activations], None] | None = None,
    first: int = 0,
) -> tuple[Any, Recorder]:
    """A clone that records while it is sampled, and the recorder. Other clones never see its hooks.

    The hooks exist only inside this clone's sampling runs, and go when a run ends, fails or is interrupted. Passes that
    guidance starts from are kept; what a patch adds (perturbed, blurred, skipped) is not.

    Args:
        watch: called with the prompted half of each recorded step, as soon as that is over.
        first: number of a run's first step, where it is the later part of another.
    """
    sites = [site.address for site in resolve(backbone_of(model), addresses)]
    refuse_other_tokens(model, sites)
    recorder = Recorder()
    wanted = steps if callable(steps) else steps.__contains__

    @contextmanager
    def recording(run: Run) -> Iterator[None]:
        refuse_other_tokens(run.guider.model_patcher, sites)  # also a node behind this one
        running, began = run.running, dict[int, int]()
        watched_steps = _Watched(watch)

        def moment(args: tuple, kwargs: dict) -> Moment | None:
            options = kwargs.get("transformer_options") or {}
            if running_in(options) is not running or not running.plain:
                return None
            if args and not running.whole(args[0], len(running.parts(options))):
                return None  # pieces of the batch, or tiles
            step, begins = running.step_of(options["sigmas"])
            if not begins and began.get(step, running.evaluation) != running.evaluation:
                return None
            began[step] = running.evaluation
            return Moment(step, running.evaluation)

        def before(step: int) -> bool:
            watched_steps.look(record)  # the step before this one is over
            return wanted(step)

        network = backbone_of(run.guider.model_patcher)
        with tap_steps(network, addresses, before, rows=partial(_rows, running), count=moment, first=first) as record:
            entry = recorder.begin(record)
            yield
            watched_steps.look(record)
        entry.latent = "" if run.output is None else _digest(run.output)
        if running.clean is not None:
            entry.clean = _digest(run.guider.model_patcher.model.process_latent_out(running.clean.cpu()))

    clone = around_sampling(watched(model), _KEY, recording)
    return around_forwards(clone, f"{_KEY}.forward", recorder.recorded), recorder


def _rows(running: Running, args: tuple, kwargs: dict) -> list[Rows]:
    """Whose batch rows a forward has."""
    return [Rows(part.name, part.tokens) for part in running.parts(kwargs["transformer_options"])]


class _Watched:
    """Shows each step once, when it is over."""

    def __init__(self, watch: Callable[[Activations], None] | None) -> None:
        self._watch, self._shown = watch, list[int]()

    def look(self, record: StepRecord) -> None:
        """Show the newest step's prompt if that has not been shown."""
        latest = list(record)[-1:]
        if self._watch is None or not latest or latest == self._shown:
            return
        prompts = [taps for name, taps in record[latest[0]].items() if name.partition(" ")[0] == "cond"]
        if prompts:
            self._shown = latest
            self._watch(prompts[0])


def nothing_recorded() -> Any:
    """For an output without a recording: nodes behind it are skipped, and the rest of the graph runs."""
    return ExecutionBlocker(None)
