"""The students of the portraits model that ship with the pack: a one-step generator, its score adapter, a baseline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import refuse

FOLDER = Path(__file__).parents[1] / "portraits" / "weights" / "emd"
STUDENTS = {
    "student": "EM Distillation, K = 4",
    "score": "the score adapter trained beside it, for MCMC correction",
    "diff-instruct": "the baseline: Diff-Instruct, trained for as long",
}


def shipped(name: str = "student") -> Path:
    """The LoRA file of a shipped student (kohya names, contract in its header).

    Raises:
        VitrineError: no such student.
    """
    path = FOLDER / f"vitrine-portraits-emd-{name}.safetensors"
    if name not in STUDENTS or not path.is_file():
        raise refuse("student", name, sorted(STUDENTS), "vitrine emd train makes one")
    return path


def one_step_pipeline(name: str = "student") -> tuple[Any, Any]:
    """(``EMDOneStepPipeline`` of the portraits model with that student, its contract)."""
    from ..pipelines import EMDOneStepPipeline
    from ..portraits import load_portraits

    pipe = EMDOneStepPipeline.from_pipe(load_portraits().pipeline())
    pipe.set_progress_bar_config(disable=True)
    return pipe, pipe.load_student(shipped(name), base="portraits")
