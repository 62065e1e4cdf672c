"""The estimator of the M-step's direction as a student is trained with it: ``vitrine reproduce emd.estimators``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...engine.errors import refuse
from ...engine.runtime.progress import Progress, silent
from ..registry import ClaimResult, Table, arms, claim
from .judge import QUICK_SAMPLES, Judge
from .mixture_claims import spread
from .student_claims import COUNT, PAPER, open_student
from .toy_students import DIFF_INSTRUCT, EMD, student_path

SEEDS, FIRST = (0, 1, 2), 5_200_000
"""Of the training, and the first scene whose caption is sampled."""
NAMES = {"last": "last", "cancel, as published": EMD, "raw": "raw", "Diff-Instruct, as much time": DIFF_INSTRUCT}
ROLES = {"last": "ours", "cancel, as published": "rival", "raw": "rival", "Diff-Instruct, as much time": "rival"}


@claim(
    "emd.estimators", paper=PAPER,
    figure="one-step students trained with each estimator of the direction, three seeds; Diff-Instruct next to them",
    target="FID of `last` below that of `cancel` and of Diff-Instruct, paired 95 % over three seeds",
    minutes=6, quick_minutes=1.5,
)  # fmt: skip
def estimators(
    model: str | None = None, progress: Progress = silent, quick: bool = False, students: str | None = None
) -> ClaimResult:
    """Students of a folder that ``vitrine train students`` filled, one a kind and seed, on the same captions."""
    if students is None:
        kinds = " ".join(NAMES.values())
        command = f"vitrine train students --kinds {kinds} --seeds 0 1 2 --out FOLDER"
        raise refuse("students", None, "a folder of trained students", f"run `{command}`, and give --students FOLDER")
    judge = Judge.open(FIRST, QUICK_SAMPLES if quick else COUNT, model)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
    for i, (name, kind) in enumerate(NAMES.items()):
        for seed in SEEDS:
            generate = open_student(student_path(Path(students), kind, seed), model)
            rows[name].append(judge.row(*judge.draw(generate)))
            progress(len(SEEDS) * i + seed + 1, len(SEEDS) * len(NAMES), None)
    fid = {name: [row["FID"] for row in of_seeds] for name, of_seeds in rows.items()}
    differences = {name: spread([a - b for a, b in zip(fid["last"], fid[name], strict=True)]) for name in NAMES}
    parts = {
        f"below {name}": differences[name]["mean"] + differences[name]["+-"] < 0
        for name in (list(NAMES)[1], list(NAMES)[3])
    }
    means = {name: spread(values) for name, values in fid.items()}
    spans = {name: (v["mean"] - v["+-"], v["mean"] + v["+-"]) for name, v in means.items()}
    details: dict[str, Any] = {"of each seed": rows, "last minus each, paired": differences}
    columns = ("FID", "recall", "precision", "agreement")
    table = tuple((n, *(spread([r[c] for r in of_seeds])["mean"] for c in columns)) for n, of_seeds in rows.items())
    return ClaimResult(
        means["last"]["mean"], spans["last"], all(parts.values()), details, n=len(judge.prompts), seeds=len(SEEDS),
        arms=arms({name: v["mean"] for name, v in means.items()}, ROLES, spans), parts=parts,
        tables=(Table("Means over seeds", ("student", *columns), table),),
    )  # fmt: skip
