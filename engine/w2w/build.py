"""From a folder of LoRA files to a space: what is in it, which mode suits it, and the principal components."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..config import Config
from ..errors import VitrineError, refuse
from ..files import open_artefact, write_json
from ..progress import Progress, silent
from .delta import DeltaSpace
from .gauge import Gauge, gauge_test
from .lora_files import BadFile, FolderReport, LoraFile, read_lora, scan_folder
from .manifest import LoraLayer, Manifest
from .pca import ALONE, Matrix, PCAConfig, Workers, principal_components
from .space import KIND, VERSION, WeightSpace

MODES = ("auto", "factors", "delta")
Space = WeightSpace | DeltaSpace


@dataclass(frozen=True)
class BuildConfig(Config):
    """How a space is built.

    Attributes:
        mode: ``factors`` is the paper's (LoRAs from one initialisation), ``delta`` takes any; ``auto`` tests and says.
        components: K, at most N - 1; None keeps all.
        memory: bytes the build may hold at once; larger data go through a file in the work folder.
        route: of the PCA in factors mode, see :class:`~.pca.PCAConfig`.
        layers_per_block: of the base UNet, to read ldm names: 2 for SD and SDXL.
        base: name of the base model, for the record.
    """

    mode: str = "auto"
    components: int | None = None
    memory: int = 2 * 2**30
    route: str = "auto"
    layers_per_block: int = 2
    base: str = ""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise refuse("mode", self.mode, MODES, "auto chooses and says why")
        PCAConfig(self.components, self.route, self.memory)


@dataclass(frozen=True)
class Built:
    """A space and the report of its building."""

    space: Space
    folder: FolderReport
    gauge: Gauge
    reason: str

    def text(self) -> str:
        """The report to print."""
        shares = self.space.explained.double().cumsum(0)
        half = int((shares < 0.5).sum()) + 1
        lines = [self.folder.text(), f"mode {self.space.mode}: {self.reason}"]
        held = f"{self.space.dimension} components hold {float(shares[-1]):.1%} of the variance, {half} hold half"
        if self.space.dimension > self.space.count / 3:
            held += f"; with {self.space.count} models, sample with at most {max(1, self.space.count // 3)}"
        return "\n".join([*lines, held])


def build_space(
    folder: str | Path | Sequence[Path],
    config: BuildConfig | None = None,
    progress: Progress = silent,
    work: str | Path | None = None,
    *,
    workers: Workers = ALONE,
) -> Built:
    """Build a space from LoRA files of one base model. Bad files are left out and named in the report.

    Args:
        work: folder for what a stopped build needs to go on; without it nothing is kept, and data above ``memory`` are
            refused.
        workers: processes that share the work of factors mode; each returns the same space.

    Raises:
        VitrineError: fewer than two usable LoRAs, factors mode with mixed ranks or layers, no room.
    """
    config = config or BuildConfig()
    report = scan_folder(folder, config.layers_per_block)
    mixed = _mixed(report)
    gauge = gauge_test(_readable(report.good))
    mode, reason = _choose(config.mode, mixed, gauge)
    info = {"base": config.base, "gauge": asdict(gauge), "reason": reason, "build": config.to_dict()}
    if mode == "delta":
        loras, report = _read_all(report)
        space: Space = DeltaSpace.of(loras, [f.name for f in report.good], config.components, progress, info)
        return Built(space, report, gauge, reason)
    rows, manifest, report = _rows(report, config, work, workers)
    pca = PCAConfig(config.components, config.route, config.memory)
    state = Path(work) / f"sums{workers.index}.safetensors" if work is not None else None
    found = principal_components(rows, pca, progress, resume=state, workers=workers)
    parts = (found.mean, found.scale, found.basis, found.singular_values, found.coefficients, rows.shape[0])
    names = tuple(f.name for f in report.good)
    return Built(WeightSpace(manifest, *parts, names, {}, found.total_variance, info), report, gauge, reason)


def load_space(path: str | Path) -> Space:
    """A space of either mode.

    Raises:
        VitrineError: see :meth:`WeightSpace.load`.
    """
    _, header = open_artefact(path, KIND, VERSION)
    return DeltaSpace.load(path) if header.get("mode") == "delta" else WeightSpace.load(path)


def _mixed(report: FolderReport) -> str:
    """Why factors cannot be laid side by side, or nothing."""
    first = report.good[0].entries
    for file in report.good[1:]:
        if set(file.entries) != set(first):
            return f"{file.name} has {len(file.entries)} layers, {report.good[0].name} {len(first)}"
        odd = next((p for p, e in file.entries.items() if (e.down, e.up) != (first[p].down, first[p].up)), None)
        if odd:
            ranks = file.entries[odd].down[0], first[odd].down[0]
            return f"{file.name} has rank {ranks[0]}, {report.good[0].name} rank {ranks[1]}"
    return ""


def _choose(wanted: str, mixed: str, gauge: Gauge) -> tuple[str, str]:
    if wanted == "delta":
        return "delta", "asked for"
    if mixed:
        if wanted == "factors":
            raise refuse("mode", f"factors, but {mixed}", "one set of layers and one rank", "use delta or auto")
        return "delta", mixed
    if wanted == "factors" and not gauge.shared:
        return "factors", f"asked for, although {gauge.reason()}: results may mean nothing, delta is safe"
    return ("factors" if gauge.shared else "delta"), gauge.reason()


def _readable(files: Sequence[LoraFile], most: int = 48) -> list[dict[str, LoraLayer]]:
    """Up to ``most`` LoRAs spread over the folder, passing over those with NaN."""
    picked = sorted({int(i) for i in np.linspace(0, len(files) - 1, min(most, len(files))).round()})
    found = [read for read in (_try(files[i])[0] for i in picked) if read is not None]
    if not found:
        raise refuse("folder", "no readable LoRA", "two or more", "download the files again")
    return found


def _try(file: LoraFile) -> tuple[dict[str, LoraLayer] | None, str]:
    try:
        return read_lora(file), ""
    except VitrineError as error:
        return None, str(error)


def _without(report: FolderReport, bad: dict[int, str]) -> FolderReport:
    """The report after some files turned out bad while they were read."""
    good = tuple(f for i, f in enumerate(report.good) if i not in bad)
    named = tuple(BadFile(report.good[i].path.name, problem) for i, problem in bad.items())
    if len(good) < 2:
        raise refuse("folder", f"{len(good)} usable LoRAs ({named[0].problem})", "two or more", "replace the bad files")
    return FolderReport(good, report.bad + named, report.notes, report.shapes)


def _read_all(report: FolderReport) -> tuple[list[dict[str, LoraLayer]], FolderReport]:
    read = [_try(file) for file in report.good]
    bad = {i: problem for i, (lora, problem) in enumerate(read) if lora is None}
    return [lora for lora, _ in read if lora is not None], _without(report, bad)


def _rows(
    report: FolderReport, config: BuildConfig, work: str | Path | None, workers: Workers
) -> tuple[Matrix, Manifest, FolderReport]:
    """The matrix of flat weights, in memory or, where that would be too much, in a file of the work folder."""
    entries = report.good[0].entries
    alphas = {p: float(e.down[0]) if e.alpha is None else e.alpha for p, e in entries.items()}
    blank = {p: LoraLayer(torch.zeros(e.down), torch.zeros(e.up), alphas[p]) for p, e in entries.items()}
    manifest = Manifest.of(blank)
    size = 4 * len(report.good) * manifest.size
    if size <= config.memory // 2:
        rows: Any = np.empty((len(report.good), manifest.size), np.float32)
        bad = _fill(rows, report, manifest, 0, lambda i, bad: None, {})
    elif work is None:
        needed = f"{size / 2**30:.1f} GiB of weights with {config.memory / 2**30:.1f} GiB of memory"
        raise refuse("build", needed, "a work folder on disk", "give a work folder, or allow more memory")
    else:
        if workers.index:
            workers.meet()  # the first process writes the rows, the others then find them complete
        rows, bad = _packed(report, manifest, Path(work))
        if not workers.index:
            workers.meet()
    keep = torch.tensor([i for i in range(len(report.good)) if i not in bad])
    report = _without(report, bad) if bad else report
    return Matrix(torch.from_numpy(rows), keep if bad else None), manifest, report


def _fill(
    rows: Any, report: FolderReport, manifest: Manifest, start: int, note: Callable, bad: dict[int, str]
) -> dict[int, str]:
    for i, file in list(enumerate(report.good))[start:]:
        lora, problem = _try(file)
        if lora is None:
            bad[i] = problem
        else:
            rows[i] = manifest.flatten(lora).numpy()
        note(i + 1, bad)
    return bad


def _packed(report: FolderReport, manifest: Manifest, work: Path) -> tuple[Any, dict[int, str]]:
    """Each file read once into a memory-mapped matrix; a stopped run goes on after the last row written."""
    work.mkdir(parents=True, exist_ok=True)
    shape, note = (len(report.good), manifest.size), work / "rows.json"
    names = [f.name for f in report.good]
    done, bad = 0, {}
    if note.is_file():
        told = json.loads(note.read_text())
        if told["names"] != names or told["shape"] != list(shape):
            raise refuse("work folder", "the state of another build", "an empty folder", f"empty {work.name}")
        done, bad = told["done"], {int(k): v for k, v in told["bad"].items()}
    rows = np.memmap(work / "rows.f32", np.float32, "r+" if done else "w+", shape=shape)

    def remember(count: int, problems: dict[int, str]) -> None:
        if count % 64 and count < len(names):
            return
        rows.flush()
        write_json(note, {"names": names, "shape": shape, "done": count, "bad": problems})

    return rows, _fill(rows, report, manifest, done, remember, bad)
