"""Checkpoints of one training run: which files they are, and whether the weights still go the same way.

A stretch is what the weights change by from one checkpoint to the next. While a model learns, stretches point the same
way; once only the noise of the batches moves it, they do not. Longer stretches and larger batches average more noise,
so cosines are compared within one run, never between runs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import VitrineError, printable
from ..io.files import named
from ..io.folders import files_in
from ..io.lora_layer import LoraLayer
from ..settings.verdicts import BAD, FINE, LOOK, OPEN
from ..w2w.loras.adapter_factors import factors_of
from ..w2w.loras.lora_files import LoraFile, read_header, telling_parts

LEARNS, WANDERS, TURNS = 0.25, 0.1, -0.25
"""Cosine of a stretch with the one before: from the first on it learns, below the second it wanders, below the third it
turns back. Chosen on synthetic runs and three published ones; none of them is a test of the numbers."""
RESTARTS = 0.5
"""Fraction of the size before below which a LoRA counts as begun anew."""
SAME_RUN = 0.5
"""Cosine of the weights of neighbours from which files with unlabelled numbers are one run: LoRAs of different people
that were trained from one initialisation stay below 0.21."""
FEWEST = 3
"""Checkpoints of a run: two have no stretch to compare."""
_STILL = 1e-6
"""Length of a stretch over the largest size, below which it is none: rounding of float32."""
_LABELLED = re.compile(r"(?:steps?|epochs?|iter(?:ation)?s?|checkpoint|ckpt)[-_=. ]*$", re.IGNORECASE)
_LAST = "last"
"""Step of the file without a number."""
_PADDED = 5
"""Digits of a number that begins with 0 and is a step, as kohya's and ai-toolkit's: ``name-000010``."""


class _Numbered(NamedTuple):
    """A file's name cut at its number: the folder and the text around it, the number, and whether it is a step."""

    frame: tuple[str, ...]
    step: int
    labelled: bool


def _numbered(path: Path) -> Iterator[_Numbered]:
    """Each way to read a name as a step: by all numbers that are labelled as one, and by each other number."""
    parts = telling_parts(path)
    name, folder = parts[-1], str(Path(*parts[:-1]))
    steps = []
    for match in re.finditer(r"\d+", name):
        padded = match[0].startswith("0") and len(match[0]) >= _PADDED
        if _LABELLED.search(name[: match.start()]) or padded:
            steps.append(match)
        else:
            yield _Numbered((folder, name[: match.start()], name[match.end() :]), int(match[0]), False)
    if steps:
        ends = [0, *(match.end() for match in steps)]
        starts = [*(match.start() for match in steps), len(name)]
        around = [name[end:start] for end, start in zip(ends, starts, strict=True)]
        yield _Numbered((folder, *around), int(steps[-1][0]), True)


def named_runs(paths: Sequence[Path]) -> list[tuple[bool, list[tuple[int, Path]]]]:
    """Files whose names differ by one number: (whether the number is labelled as a step, [(step, path)] in order).

    kohya's last file, which has the name without a number, is not found here; see :func:`_unnumbered`.
    """
    frames: dict[tuple[str, ...], list[tuple[bool, int, Path]]] = defaultdict(list)
    for path in dict.fromkeys(paths):
        for reading in _numbered(path):
            frames[reading.frame].append((reading.labelled, reading.step, path))
    runs, taken = [], set[Path]()
    # labelled numbers first: of run2-step100 and run1-step100 the steps make runs, not the runs
    for members in sorted(frames.values(), key=lambda rows: (not all(row[0] for row in rows), -len(rows))):
        free = sorted({(step, path) for _, step, path in members if path not in taken})
        if len(free) >= 2 and len({step for step, _ in free}) == len(free):
            taken |= {path for _, path in free}
            runs.append((all(row[0] for row in members), free))
    return runs


_ENDING = re.compile(r"[-_. ]*(?:steps?|epochs?|checkpoint)?[-_=. ]*\d+$", re.IGNORECASE)
"""The end of a name that says the step."""


def _unnumbered(first: Path, paths: Sequence[Path]) -> Path | None:
    """The file with a run's name and no number, which kohya writes last; diffusers' is in the folder above."""
    *folders, name = telling_parts(first)
    bare = _ENDING.sub("", name)
    wanted = (*folders, bare) if bare else tuple(folders)
    return next((path for path in paths if path != first and telling_parts(path) == wanted), None)


# --- what a run did -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Checkpoint:
    """One file of a run.

    Attributes:
        name: of the file, as a report shows it.
        label: of its step: the number, or ``last``.
        size: norm of its change of the weights; of a whole model, of its weights.
        stretch: length of the way from the checkpoint before; of a LoRA's first one, from zero.
        cosine: of this stretch with the one before; None without two stretches that moved.
        to_last: distance to the last checkpoint.
    """

    name: str
    label: str
    size: float
    stretch: float | None
    cosine: float | None
    to_last: float


@dataclass(frozen=True)
class TrainingRun:
    """Checkpoints in the order of their steps, and what that says.

    Attributes:
        name: what the files' names have in common.
        checkpoints: at least two.
        verdict: ``fine``, ``look``, ``bad`` or ``not measured``, see :mod:`~vitrine.engine.settings.verdicts`.
        headline: the outcome in a few words.
        text: why, and what to do.
        copies: by checkpoint, see :class:`CopiesAtStep`; empty without a model.
        suggested: index of the last sampled checkpoint before the first that copies; None without such.
        left_out: files of the run that cannot be read, or have other layers.
    """

    name: str
    checkpoints: tuple[Checkpoint, ...]
    verdict: str
    headline: str
    text: str
    paths: tuple[Path, ...] = field(default=(), repr=False)
    copies: tuple[CopiesAtStep | None, ...] = ()
    suggested: int | None = None
    left_out: tuple[str, ...] = ()

    @property
    def measured(self) -> str:
        """Of how many checkpoints the verdict is made."""
        count, sampled = len(self.checkpoints), sum(row is not None for row in self.copies)
        text = f"Measured: the weights of {count} of {count + len(self.left_out)} checkpoints"
        text += f" (not of {', '.join(self.left_out[:3])})" if self.left_out else ""
        return text + (f", samples of {sampled}." if sampled else "; none was sampled, so copies were not looked for.")

    @property
    def first_copy(self) -> int | None:
        """Index of the first checkpoint that copies; None where none does."""
        return next((i for i, row in enumerate(self.copies) if row is not None and row.copied), None)

    @property
    def copies_counted(self) -> bool:
        """Whether there are training pictures, so that copies are counted."""
        return any(row is not None and row.copies is not None for row in self.copies)

    def lines(self) -> list[str]:
        """The outcome in some lines."""
        first, last = self.checkpoints[0].label, self.checkpoints[-1].label
        steps = f"{first} to {last}"
        return [
            f"{self.name}: a run of {len(self.checkpoints)} checkpoints, steps {steps}",
            f"  {self.headline} [{self.verdict}]: {self.text} {self.measured}",
        ]

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        rows = []
        for i, point in enumerate(self.checkpoints):
            row = {
                "name": point.name,
                "step": point.label,
                "size": _rounded(point.size),
                "stretch": _rounded(point.stretch),
                "cosine_with_the_stretch_before": _rounded(point.cosine),
                "distance_to_the_last": _rounded(point.to_last),
            }
            copies = self.copies[i] if self.copies else None
            rows.append(
                row
                if copies is None
                else row | {"copies": copies.copies, "samples": copies.samples, "agreement": _rounded(copies.agreement)}
            )
        best = None if self.suggested is None else self.checkpoints[self.suggested].name
        copied = None if self.first_copy is None else self.checkpoints[self.first_copy].name
        return {
            "name": self.name,
            "verdict": self.verdict,
            "headline": self.headline,
            "text": self.text,
            "measured": self.measured,
            "try_first": best,
            "first_that_copies": copied,
            "checkpoints": rows,
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None or value != value else round(value, 6)


def training_run(
    name: str,
    labels: Sequence[str],
    products: torch.Tensor,
    from_zero: bool = True,
    names: Sequence[str] = (),
    paths: Sequence[Path] = (),
) -> TrainingRun:
    """A run from the inner products of its checkpoints.

    Args:
        labels: steps, in their order.
        products: (N, N) of the checkpoints' weights; read are those of neighbours at distance one and two, and those
            with the last.
        from_zero: the run began at zero, as a LoRA's does; a whole model's beginning is not known.
        names: of the files.
    """
    count = len(labels)
    w = products.double()
    size = w.diagonal().clamp_min(0).sqrt()
    still = _STILL * max(float(size.max()), 1e-30)
    # stretch i leads to checkpoint i; a LoRA's first one comes from zero
    lengths: list[float | None] = [float(size[0]) if from_zero else None]
    lengths += [_length(float(w[i, i] + w[i - 1, i - 1] - 2 * w[i, i - 1])) for i in range(1, count)]
    cosines: list[float | None] = [None] * count
    for i in range(1, count):
        own, before = lengths[i], lengths[i - 1]
        if own is None or before is None or min(own, before) <= still:
            continue
        product = w[i, i - 1] - w[i - 1, i - 1]
        if i > 1:
            product = product - w[i, i - 2] + w[i - 1, i - 2]
        cosines[i] = max(-1.0, min(1.0, float(product) / (own * before)))
    to_last = [_length(float(w[i, i] + w[-1, -1] - 2 * w[i, -1])) for i in range(count)]
    points = tuple(
        Checkpoint(names[i] if names else labels[i], labels[i], float(size[i]), lengths[i], cosines[i], to_last[i])
        for i in range(count)
    )
    verdict = _verdict(points, still, from_zero)
    return TrainingRun(name, points, *verdict, paths=tuple(paths))


def _length(squared: float) -> float:
    return max(squared, 0.0) ** 0.5


def _verdict(points: Sequence[Checkpoint], still: float, from_zero: bool) -> tuple[str, str, str]:
    """(verdict, headline, text). Which checkpoint is nicer the weights do not say."""
    count, last = len(points), len(points) - 1
    if from_zero and max(point.size for point in points) < 1e-12:
        text = f"{count} files of exactly zero change. The rate was zero, or no gradient reached the LoRA."
        return BAD, "This training did nothing", text
    moved = [i for i in range(1, count) if (points[i].stretch or 0.0) > still]
    if not moved:
        text = f"{count} files of the same weights: no checkpoint differs from the first."
        return BAD, "Nothing was learned between these files", text
    turned = [i for i in range(1, count) if _restarted(points, i, from_zero)]
    if turned:
        step = points[turned[-1]].label
        text = f"The weights turn back at step {step}: training began anew, or these are files of two runs. "
        text += "Read the part before and the part after it as two runs."
        return LOOK, f"Restarted at step {step}", text
    if moved[-1] < last:
        step = points[moved[-1]].label
        text = f"The files after step {step} have its weights: the rate had come to zero, or nothing was trained."
        return LOOK, f"Nothing changes after step {step}", text
    known = [i for i in range(1, count) if points[i].cosine is not None]
    if len(known) < 2:
        text = f"{count} checkpoints are too few to say whether it still learns; {FEWEST} or more are needed."
        return OPEN, "Too few checkpoints", text
    return _direction(points, known)


def _direction(points: Sequence[Checkpoint], known: Sequence[int]) -> tuple[str, str, str]:
    """The same by the cosines alone."""
    values = [points[i].cosine or 0.0 for i in known]
    wandering = len(values)
    while wandering and values[wandering - 1] < WANDERS:
        wandering -= 1
    end = f"{values[-1]:.2f}"
    if len(values) - wandering >= 2:
        step = points[known[wandering] - 1].label
        if not wandering:
            text = "No checkpoint goes on in the direction of the one before: the steps are noise, or too far apart."
            return LOOK, "Wandering from the start", text
        text = f"From there on each stretch has nothing in common with the one before (cosine below {WANDERS}): "
        text += "more steps add noise; a smaller rate learns more."
        return LOOK, f"Wandering from step {step} on", text
    if values[-1] >= LEARNS:
        text = f"The last stretch still goes the way of the one before (cosine {end}): it has not come to an end. "
        text += "More steps change it further."
        return FINE, "Still learning", text
    text = f"The last stretch hardly goes the way of the one before (cosine {end}). More steps change it little."
    return FINE, "Learning slows down", text


def _restarted(points: Sequence[Checkpoint], i: int, from_zero: bool) -> bool:
    """Whether training began anew at a checkpoint: it turns back, by more than a step, or comes back near zero."""
    cosine, own, before = points[i].cosine, points[i].stretch, points[i - 1].stretch
    if from_zero and points[i].size < RESTARTS * points[i - 1].size:
        return True
    return cosine is not None and cosine < TURNS and (own or 0.0) > 2 * (before or 0.0)


# --- the files of a run ---------------------------------------------------------------------------------------------
def runs_among(files: Sequence[LoraFile], others: Sequence[Path] = ()) -> list[TrainingRun]:
    """Runs that the given files belong to.

    Args:
        others: further files that may be checkpoints of them.
    """
    known = {file.path: file for file in files}
    paths = list(dict.fromkeys([*known, *others]))
    runs = []
    for labelled, members in named_runs(paths):
        steps = [(str(step), path) for step, path in members]
        final = _unnumbered(members[0][1], paths)
        steps += [(_LAST, final)] if final is not None else []
        if not any(path in known for _, path in steps):
            continue
        opened = [(label, known[path] if path in known else _header(path)) for label, path in steps]
        usable = [(label, file) for label, file in opened if file is not None]
        alike = _equal_layers(usable)
        if len(alike) < FEWEST or not any(file.path in known for _, file in alike):
            continue
        run = _run_of(alike, labelled)
        read = {file.path for _, file in alike}
        left_out = tuple(printable(path.stem) for _, path in steps if path not in read)
        runs += [replace(run, left_out=left_out)] if run is not None else []
    return runs


def checkpoints_beside(path: Path) -> list[Path]:
    """The checkpoints of a file's run in the order of their steps; the file alone where it is of none."""
    file = _header(path)
    numbered = telling_parts(path)[-1] != path.stem and _ENDING.search(path.parent.name)  # diffusers' checkpoint-500
    folder = path.parent.parent if numbered else path.parent
    runs = [] if file is None else runs_among([file], files_in(folder, ".safetensors", deep=True))
    return list(runs[0].paths) if runs else [path]


def _header(path: Path) -> LoraFile | None:
    try:
        return read_header(path)
    except VitrineError:
        return None


def _equal_layers(files: Sequence[tuple[str, LoraFile]]) -> list[tuple[str, LoraFile]]:
    """Those with the layers, kinds and sizes that most of them have."""
    groups: dict[tuple, list[tuple[str, LoraFile]]] = defaultdict(list)
    for label, file in files:
        layout = tuple((path, entry.kind, entry.outer, entry.down) for path, entry in sorted(file.entries.items()))
        groups[layout].append((label, file))
    return max(groups.values(), key=len, default=[])


def _run_of(files: Sequence[tuple[str, LoraFile]], labelled: bool) -> TrainingRun | None:
    """None where a file cannot be read, or numbers without a label belong to unrelated weights."""
    try:
        products = lora_products([file for _, file in files])
    except VitrineError:
        return None
    if not bool(products.diagonal().isfinite().all()):
        return None
    size = products.diagonal().clamp_min(0).sqrt()
    if files[-1][0] == _LAST:  # diffusers writes the last step twice
        away = _length(float(products[-1, -1] + products[-2, -2] - 2 * products[-1, -2]))
        if away <= _STILL * float(size.max()) and float(size.max()) > 0:
            return _run_of(files[:-1], labelled) if len(files) > FEWEST else None
    alike = [float(products[i, i - 1] / (size[i] * size[i - 1])) for i in range(1, len(files)) if size[i] * size[i - 1]]
    if not labelled and alike and sorted(alike)[len(alike) // 2] < SAME_RUN:
        return None
    names = [printable(file.path.stem) for _, file in files]
    *folders, last = telling_parts(files[0][1].path)
    title = printable(_ENDING.sub("", last) or folders[-1])
    paths = [file.path for _, file in files]
    return training_run(title or names[0], [label for label, _ in files], products, names=names, paths=paths)


def lora_products(files: Sequence[LoraFile]) -> torch.Tensor:
    """(N, N) float64 inner products of the files' changes: of neighbours up to distance two and with the last.

    All others are NaN. One layer of every file is in memory at a time.
    """
    from safetensors import safe_open

    count = len(files)
    pairs = {(i, j) for i in range(count) for j in range(max(0, i - 2), i + 1)} | {(count - 1, j) for j in range(count)}
    products = torch.full((count, count), torch.nan, dtype=torch.float64)
    for i, j in pairs:
        products[i, j] = 0.0
    with ExitStack() as stack:
        opened = []
        for file in files:
            with named(file.path, "LoRA file", "a whole safetensors file", "download it again"):
                opened.append(stack.enter_context(safe_open(str(file.path), "pt")))
        for path in files[0].entries:
            layers = [_layer(file, tensors, path) for file, tensors in zip(files, opened, strict=True)]
            for i, j in pairs:
                # <U1 D1, U2 D2> = sum of (U1^T U2) * (D1 D2^T)
                (up, down), (other_up, other_down) = layers[i], layers[j]
                products[i, j] += ((up.T @ other_up) * (down @ other_down.T)).sum()
    return torch.where(products.isnan(), products.T, products)


def _layer(file: LoraFile, tensors: Any, path: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(up with the scale, down) in float64."""
    entry = file.entries[path]
    with named(file.path, "LoRA file", "a whole safetensors file", "download it again"):
        values: Mapping[str, torch.Tensor] = {r: tensors.get_tensor(key) for r, key in entry.keys if r != "alpha"}
    weight = file.base[path].cpu() if entry.decomposed and file.base is not None else None
    down, up = factors_of(entry, values, weight)
    layer = LoraLayer(down, up, float(entry.down[0]) if entry.alpha is None else entry.alpha)
    return layer.up.flatten(1).double() * layer.scale, layer.down.flatten(1).double()


# --- with samples ---------------------------------------------------------------------------------------------------
class CopiesAtStep(NamedTuple):
    """What a checkpoint's samples copy.

    Attributes:
        copies, samples: of the prompt that copies most; None without training pictures.
        agreement: 0..1, the largest fraction of the distance between samples of a prompt that it takes.
        copied: whether it copies, by the rule of the report.
    """

    copies: int | None
    samples: int
    agreement: float
    copied: bool


def with_copies(run: TrainingRun, copies: Sequence[CopiesAtStep | None]) -> TrainingRun:
    """The run with what its checkpoints copy, which comes first in the verdict."""
    run = replace(run, copies=tuple(copies))
    if not any(row is not None for row in copies):
        return run
    first = run.first_copy
    if first is None:
        measured = sum(row is not None for row in copies)
        text = f"{run.text} None of {measured} sampled checkpoints copies."
        return replace(run, text=text)
    step = run.checkpoints[first].label
    before = max((i for i in range(first) if copies[i] is not None), default=None)
    text = f"{run.checkpoints[first].name} is the first whose samples copy. "
    text += "Every sampled checkpoint copies." if before is None else f"Try step {run.checkpoints[before].label} first."
    weights = f" From the weights: {run.headline[0].lower()}{run.headline[1:]}."
    return replace(run, verdict=BAD, headline=f"Copies from step {step} on", text=text + weights, suggested=before)
