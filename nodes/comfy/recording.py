"""Recording activations while a sampler runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from comfy_execution.graph_utils import ExecutionBlocker

from ...engine.activations import Activations, StepRecord, tap_steps
from ...engine.errors import refuse
from .forwards import Run, around_sampling
from .model import backbone_of

_KEY = "vitrine"


@dataclass
class Recorder:
    """Filled anew by each sampling run of the clone it was made with."""

    record: StepRecord | None = None

    def activations(self, step: int, half: str) -> Activations:
        """What one step recorded; ``step`` -1 is the last one.

        Raises:
            VitrineError: Nothing has been recorded, or nothing at that step or for that half.
        """
        if self.record is None or not len(self.record):
            raise refuse("recording", "empty", "a sampled model", "run the sampler first: connect its LATENT here")
        steps = list(self.record)
        chosen = steps[-1] if step == -1 else step
        if chosen not in steps or half not in self.record[chosen]:
            halves = sorted(self.record[steps[-1]])
            remedy = "record that step in Tap During Sampling"
            raise refuse("step", f"{step} ({half})", f"steps {steps}, {halves}", remedy)
        return self.record[chosen][half]


def record_sampling(
    model: Any, addresses: str, steps: set[int] | Callable[[int], bool],
    watch: Callable[[Activations], None] | None = None, first: int = 0,
) -> tuple[Any, Recorder]:  # fmt: skip
    """A clone that records while it is sampled, and the recorder. Other clones never see its hooks.

    The hooks exist only inside this clone's sampling runs, and go when a run ends, fails or is interrupted.

    Args:
        watch: called with the prompted half of each recorded step, as soon as that is over.
        first: number of a run's first step, where it is the later part of another.
    """
    recorder = Recorder()
    wanted = steps if callable(steps) else steps.__contains__

    @contextmanager
    def recording(run: Run) -> Iterator[None]:
        network = backbone_of(run.guider.model_patcher)
        shown: list[int] = []

        def look() -> None:
            record = recorder.record
            latest = list(record or ())[-1:]
            if watch is None or not record or latest == shown or "cond" not in record[latest[0]]:
                return
            shown[:] = latest
            watch(record[latest[0]]["cond"])

        def before(step: int) -> bool:
            look()  # the step before this one is over
            return wanted(step)

        recorder.record = None
        with tap_steps(network, addresses, before, rows=_halves, count="timesteps", first=first) as record:
            recorder.record = record
            yield
            look()

    return around_sampling(model, _KEY, recording), recorder


def nothing_recorded() -> Any:
    """For an output without a recording: nodes behind it are skipped, and the rest of the graph runs."""
    return ExecutionBlocker(None)


def _halves(args: tuple, kwargs: dict) -> list[str]:
    """ComfyUI says for each part of the batch whether it is conditional (0) or not (1)."""
    parts = kwargs.get("transformer_options", {}).get("cond_or_uncond", [0])
    return ["uncond" if part else "cond" for part in parts]
