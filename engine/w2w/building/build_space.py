"""Builds a space from LoRA files: scan, choice of mode, principal components."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...errors import refuse
from ...io.files import named, open_artefact, parse_table
from ...io.hub import local_file
from ...io.lora_layer import LoraLayer
from ...io.table_on_disk import RowFile
from ...jobs.run import Run
from ...runtime.processes import ALONE, Workers
from ...runtime.progress import Progress, silent
from ...settings.one_line import one_line
from ...settings.w2w_options import BuildConfig, PCAConfig
from ..edit.coefficient_sampling import usual_sampling
from ..loras.base_weights import BaseWeights
from ..loras.gauge import Gauge, gauge_test
from ..loras.lora_folders import BadFile, FolderScan, scan_folder
from ..loras.near_copies import near_copies
from ..space.build_state import BuildState
from ..space.delta_space import DeltaSpace, Space
from ..space.factor_stacks import PRODUCTS, Stack, read_stacks
from ..space.linked_factors import LinkedStacks
from ..space.manifest import Manifest
from ..space.principal_components import Matrix, principal_components, shards
from ..space.space import KIND, LINKED_VERSION, WeightSpace
from ..space.space_mode import choose_mode, read_or_problem, some_readable, unlike

_BEGUN = ("rows.json", "sums*.safetensors", "products.safetensors")
"""Files of a build's work folder that mean that there is work to lose."""


@one_line
@dataclass(frozen=True)
class Built:
    """A space and how it was built.

    Attributes:
        space: the space.
        folder: the files used, and those left out.
        gauge: whether factors are comparable.
        reason: reason for the mode.
    """

    space: Space
    folder: FolderScan
    gauge: Gauge
    reason: str

    def summary(self) -> str:
        """A report of the build, as text."""
        explained = self.space.explained.double().cumsum(0)
        half = int((explained < 0.5).sum()) + 1
        lines = [self.folder.summary(), f"mode {self.space.mode}: {self.reason}"]
        line = f"{self.space.dimension} components have {float(explained[-1]):.1%} of the variance, {half} have half"
        if self.space.dimension > self.space.count / 3:
            line += f"; with {self.space.count} models, sample with at most {max(1, self.space.count // 3)}"
        copies = near_copies(self.space.coefficients.float(), [f.name for f in self.folder.good], most=10)
        return "\n".join([*lines, line, *(f"copies: {copy}" for copy in copies)])


def build_space(
    folder: str | Path | Sequence[Path],
    config: BuildConfig | None = None,
    progress: Progress = silent,
    work: str | Path | None = None,
    *,
    workers: Workers = ALONE,
    base: BaseWeights | None = None,
) -> Built:
    """Builds a space from LoRA files of one base model; bad files are left out and listed.

    Args:
        work: folder with the state of an interrupted build, which then resumes, also after a kill; without it, data
            larger than ``memory`` are refused. It belongs to one build with the same LoRAs (by content: each file is
            read once more), base weights and settings.
        workers: processes that divide the work of factors mode; each returns the same space.
        base: weights of the base model; without it DoRAs are left out.
    """
    config, work = config or BuildConfig(), None if work is None else Path(work)
    scan = scan_folder(folder, config.layers_per_block, progress, base=base)
    mixed = unlike(scan)
    gauge = gauge_test(some_readable(scan.good, config.memory))
    mode, reason = choose_mode(config.mode, mixed, gauge)
    info = {"base": config.base, "gauge": asdict(gauge), "reason": reason, "build": config.to_dict()}
    with Run(work, "W2W space", _inputs(scan, config, base), _BEGUN, workers) as run, ExitStack() as closing:
        made_of = {} if work is None else {"build": run.mark}
        if mode == "delta":
            keeps = work if not workers.index else None
            state = BuildState(keeps and keeps / "products.safetensors", PRODUCTS, made_of)
            space, scan = _delta_space(scan, config, progress, info, state)
            return Built(space, scan, gauge, reason)
        task = _Task(config, work, progress, workers)
        rows, manifest, scan = _rows(scan, task, closing)
        used = 4 * len(rows.data) * manifest.size if isinstance(rows.data, torch.Tensor) else 0
        pca = PCAConfig(config.components, config.route, config.memory - used)
        sums = None if work is None else workers.own_file(work / "sums.safetensors")
        components = principal_components(rows, pca, progress, resume=sums, workers=workers, inputs=made_of)
        names = tuple(f.name for f in scan.good)
        return Built(components.space(manifest, names, info), scan, gauge, reason)


def _inputs(scan: FolderScan, config: BuildConfig, base: BaseWeights | None) -> dict[str, object]:
    """The inputs of a space; files and weights are read when they are digested."""
    decomposed = {path for f in scan.good for path, entry in f.entries.items() if entry.decomposed}
    return {
        "LoRAs": [[f.name for f in scan.good], [f.path for f in scan.good]],
        "settings": config,
        "base weights": None if base is None else base.only(decomposed),
    }


def load_space(path: str | Path, folders: Sequence[str | Path] = ()) -> Space:
    """Loads a space of either mode.

    Args:
        path: its file, or a folder or hub id of :meth:`~..space.space.WeightSpace.push_to_hub`.
        folders: further folders with a linked space's LoRAs, after its own folder and a folder ``loras`` in or next to
            it.
    """
    path = local_file(path, WeightSpace.FILE)
    _, header = open_artefact(path, KIND, LINKED_VERSION)
    space = DeltaSpace.load(path, folders) if header.get("mode") == "delta" else WeightSpace.load(path)
    with named(path, "space", "settings that match its tensors", "build it again"):
        usual_sampling(space)
    return space


def labels_in(path: str | Path) -> list[str]:
    """Sorted labels of the listed directions in a space file, without reading tensors."""
    file, header = open_artefact(path, KIND, LINKED_VERSION)
    with named(path, "space", "a header that fits its tensors", "build it again"), file:
        retired = parse_table(header.get("info") or "{}").get("retired", ())
        labels = (key[4:] for key in file.keys() if key.startswith("dir."))  # noqa: SIM118  no mapping
        return sorted(label for label in labels if label not in retired)


def _without(scan: FolderScan, bad: dict[int, str]) -> FolderScan:
    """The scan without files whose tensors turned out to be bad."""
    good = tuple(f for i, f in enumerate(scan.good) if i not in bad)
    more = tuple(BadFile(scan.good[i].path.name, problem) for i, problem in bad.items())
    if len(good) < 2:
        raise refuse("folder", f"{len(good)} usable LoRAs ({more[0].problem})", "two or more", "replace the bad files")
    return FolderScan(good, scan.bad + more, scan.notes, scan.shapes)


def _delta_space(
    scan: FolderScan, config: BuildConfig, progress: Progress, info: dict[str, Any], state: BuildState
) -> tuple[DeltaSpace, FolderScan]:
    needed = 48 * len(scan.good) ** 2  # products of all pairs, their eigenvectors, the eigensolver's workspace
    if needed > config.memory:
        shown = f"{config.memory / 2**20:.0f} MiB for {len(scan.good)} LoRAs in delta mode"
        raise refuse(
            "memory", shown, f"{needed / 2**20:.0f} MiB", "allow more, or use factors mode if they share a start"
        )
    bad: dict[int, str] = {}

    def loras() -> Iterator[dict[str, LoraLayer] | None]:
        for i, file in enumerate(scan.good):
            lora, problem = read_or_problem(file)
            if lora is None:
                bad[i] = problem
            yield lora

    stacks: Mapping[str, Stack]
    if config.linked:
        for done, _ in enumerate(loras()):  # a broken file is found now, not after hours
            progress(done + 1, len(scan.good))
        scan = _without(scan, bad) if bad else scan
        stacks = LinkedStacks(scan.good, config.layers_per_block)
    else:
        paths = {p for f in scan.good for p in f.entries}
        ranks = {p: [f.entries[p].down[0] if p in f.entries else 0 for f in scan.good] for p in paths}
        stacks = read_stacks(ranks, loras(), progress)
        scan = _without(scan, bad) if bad else scan
    names = [f.name for f in scan.good]
    return DeltaSpace.of_stacks(stacks, names, config.components, progress, info, config.memory, state), scan


@dataclass(frozen=True)
class _Task:
    """Constants while rows are read."""

    config: BuildConfig
    work: Path | None
    progress: Progress
    workers: Workers


def _rows(scan: FolderScan, task: _Task, closing: ExitStack) -> tuple[Matrix, Manifest, FolderScan]:
    """The flat weights, in memory or, if too large, in a file of the work folder."""
    entries, memory = scan.good[0].entries, task.config.memory
    alphas = {p: float(e.down[0]) if e.alpha is None else e.alpha for p, e in entries.items()}
    manifest = Manifest.of(
        {p: LoraLayer(torch.empty(e.down), torch.empty(e.up), alphas[p]) for p, e in entries.items()}
    )
    shape = len(scan.good), manifest.size
    if 4 * shape[0] * shape[1] <= memory // 2:
        data = torch.empty(shape)
        bad = _read(scan, manifest, range(shape[0]), data.__setitem__, task.progress)
        rows = Matrix(data)
    elif task.work is None:
        needed = f"{4 * shape[0] * shape[1] / 2**30:.1f} GiB of weights with {memory / 2**30:.1f} GiB of memory"
        raise refuse("build", needed, "a work folder on disk", "give a work folder, or allow more memory")
    else:
        table = closing.enter_context(RowFile(task.work, shape, width=shards(*shape, memory)[0][1]))
        bad = _packed(scan, manifest, table, task)
        rows = Matrix(table)
    if not bad:
        return rows, manifest, scan
    good = torch.tensor([i for i in range(shape[0]) if i not in bad])
    return replace(rows, rows=good), manifest, _without(scan, bad)


def _read(
    scan: FolderScan,
    manifest: Manifest,
    numbers: Iterable[int],
    store: Callable[[int, torch.Tensor], None],
    progress: Progress,
) -> dict[int, str]:
    """Reads LoRAs by index and passes their flat weights to ``put``; returns index -> problem of bad files."""
    bad, numbers = {}, list(numbers)
    for done, i in enumerate(numbers):
        lora, problem = read_or_problem(scan.good[i])
        if lora is None:
            bad[i] = problem
        else:
            store(i, manifest.flatten(lora))
        progress(done + 1, len(numbers))
    return bad


def _packed(scan: FolderScan, manifest: Manifest, table: RowFile, task: _Task) -> dict[int, str]:
    """Reads each file that is not in the table yet; processes divide the files. Bad files are retried each time."""
    together = max(1, task.config.memory // 4 // (4 * manifest.size))
    runs = [range(a, min(a + together, table.shape[0])) for a in range(0, table.shape[0], together)]
    own = runs[task.workers.index :: task.workers.count]
    done, every, bad = 0, sum(map(len, own)), dict[int, str]()
    for run in own:
        missing = [i for i in run if not table.done[i]]
        for first, count in _consecutive(missing):
            buffer = torch.zeros(count, manifest.size)

            def store(i: int, row: torch.Tensor, first: int = first, buffer: torch.Tensor = buffer) -> None:
                buffer[i - first] = row

            def after(step: int, total: int, preview: torch.Tensor | None = None, *, before: int = done) -> None:
                task.progress(before + step, every)

            stacks = _read(scan, manifest, range(first, first + count), store, after)
            table.write(first, buffer, torch.tensor([i not in stacks for i in range(first, first + count)]))
            bad |= stacks
        done += len(run)
    return {i: problem for each in task.workers.gather(bad) for i, problem in each.items()}


def _consecutive(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """(first, count) of each run of ascending numbers."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs
