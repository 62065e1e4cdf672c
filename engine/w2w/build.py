"""From a folder of LoRA files to a space: scan, choice of mode, principal components."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from ..config import Config
from ..errors import VitrineError, refuse
from ..files import named, open_artefact, parse_table, write_json
from ..progress import Progress, silent
from .delta import DeltaSpace, Space
from .gauge import Gauge, gauge_test
from .lora_files import LoraFile, read_lora
from .lora_folders import BadFile, FolderScan, scan_folder
from .manifest import LoraLayer, Manifest
from .pca import ALONE, Matrix, PCAConfig, Workers, principal_components
from .space import KIND, VERSION, WeightSpace

MODES = ("auto", "factors", "delta")
Note = Callable[[int, dict[int, str]], None]
"""Called with the number of rows read and the problems of bad files by index."""


@dataclass(frozen=True)
class BuildConfig(Config):
    """How a space is built.

    Attributes:
        mode: ``factors`` is the paper's (LoRAs from one initialisation), ``delta`` takes any; ``auto`` tests which.
        components: K, at most N - 1; None keeps all.
        memory: bytes the build may hold at once; larger data go through a file in the work folder.
        route: of the PCA in factors mode, see :class:`~.pca.PCAConfig`.
        layers_per_block: of the base UNet, to read ldm names: 2 for SD and SDXL.
        base: name of the base model, for the record.

    Raises:
        VitrineError: If a value is unknown or outside its range.
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
    """A space and how it was built.

    Attributes:
        space: the space.
        folder: the files it was made from, and those left out.
        gauge: whether factors could be compared.
        reason: why its mode was chosen.
    """

    space: Space
    folder: FolderScan
    gauge: Gauge
    reason: str

    def summary(self) -> str:
        """How it was built, as text."""
        shares = self.space.explained.double().cumsum(0)
        half = int((shares < 0.5).sum()) + 1
        lines = [self.folder.summary(), f"mode {self.space.mode}: {self.reason}"]
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
    """Builds a space from LoRA files of one base model; bad files are left out and named.

    Args:
        work: folder that keeps the state of an interrupted build, which then resumes; without it, data larger than
            ``memory`` are refused.
        workers: processes that share the work of factors mode; each returns the same space.

    Raises:
        VitrineError: If there are fewer than two usable LoRAs, ranks or layers differ in factors mode, or the data are
            larger than ``memory`` and there is no work folder.
    """
    config = config or BuildConfig()
    scan = scan_folder(folder, config.layers_per_block)
    mixed = _mixed(scan)
    gauge = gauge_test(_readable(scan.good))
    mode, reason = _choose(config.mode, mixed, gauge)
    info = {"base": config.base, "gauge": asdict(gauge), "reason": reason, "build": config.to_dict()}
    if mode == "delta":
        loras, scan = _read_all(scan)
        space: Space = DeltaSpace.of(loras, [f.name for f in scan.good], config.components, progress, info)
        return Built(space, scan, gauge, reason)
    rows, manifest, scan = _rows(scan, config, work, workers)
    pca = PCAConfig(config.components, config.route, config.memory)
    state = Path(work) / f"sums{workers.index}.safetensors" if work is not None else None
    components = principal_components(rows, pca, progress, resume=state, workers=workers)
    names = tuple(f.name for f in scan.good)
    return Built(components.space(manifest, names, info), scan, gauge, reason)


def load_space(path: str | Path) -> Space:
    """A space of either mode.

    Raises:
        VitrineError: As :meth:`WeightSpace.load`.
    """
    _, header = open_artefact(path, KIND, VERSION)
    return DeltaSpace.load(path) if header.get("mode") == "delta" else WeightSpace.load(path)


def _mixed(scan: FolderScan) -> str:
    """Why the factors do not form a matrix; empty if they do."""
    first = scan.good[0].entries
    for file in scan.good[1:]:
        if set(file.entries) != set(first):
            return f"{file.name} has {len(file.entries)} layers, {scan.good[0].name} {len(first)}"
        odd = next((p for p, e in file.entries.items() if (e.down, e.up) != (first[p].down, first[p].up)), None)
        if odd:
            ranks = file.entries[odd].down[0], first[odd].down[0]
            return f"{file.name} has rank {ranks[0]}, {scan.good[0].name} rank {ranks[1]}"
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
    """Up to ``most`` LoRAs spread over the folder, without those that cannot be read."""
    picked = sorted({int(i) for i in np.linspace(0, len(files) - 1, min(most, len(files))).round()})
    loras = [lora for lora in (_try(files[i])[0] for i in picked) if lora is not None]
    if not loras:
        raise refuse("folder", "no readable LoRA", "two or more", "download the files again")
    return loras


def _try(file: LoraFile) -> tuple[dict[str, LoraLayer] | None, str]:
    """The LoRA, or None and its problem."""
    try:
        return read_lora(file), ""
    except VitrineError as error:
        return None, str(error)


def _without(scan: FolderScan, bad: dict[int, str]) -> FolderScan:
    """The scan without files that turned out to be bad when their tensors were read."""
    good = tuple(f for i, f in enumerate(scan.good) if i not in bad)
    more = tuple(BadFile(scan.good[i].path.name, problem) for i, problem in bad.items())
    if len(good) < 2:
        raise refuse("folder", f"{len(good)} usable LoRAs ({more[0].problem})", "two or more", "replace the bad files")
    return FolderScan(good, scan.bad + more, scan.notes, scan.shapes)


def _read_all(scan: FolderScan) -> tuple[list[dict[str, LoraLayer]], FolderScan]:
    results = [_try(file) for file in scan.good]
    bad = {i: problem for i, (lora, problem) in enumerate(results) if lora is None}
    return [lora for lora, _ in results if lora is not None], _without(scan, bad)


def _rows(
    scan: FolderScan, config: BuildConfig, work: str | Path | None, workers: Workers
) -> tuple[Matrix, Manifest, FolderScan]:
    """The matrix of flat weights, in memory or, if it is too large, in a file of the work folder."""
    entries = scan.good[0].entries
    alphas = {p: float(e.down[0]) if e.alpha is None else e.alpha for p, e in entries.items()}
    blank = {p: LoraLayer(torch.zeros(e.down), torch.zeros(e.up), alphas[p]) for p, e in entries.items()}
    manifest = Manifest.of(blank)
    size = 4 * len(scan.good) * manifest.size
    if size <= config.memory // 2:
        rows = np.empty((len(scan.good), manifest.size), np.float32)
        bad = _fill(rows, scan, manifest, 0, lambda i, bad: None, {})
    elif work is None:
        needed = f"{size / 2**30:.1f} GiB of weights with {config.memory / 2**30:.1f} GiB of memory"
        raise refuse("build", needed, "a work folder on disk", "give a work folder, or allow more memory")
    else:
        if workers.index:
            workers.meet()  # the first process writes the rows; by then they are complete
        rows, bad = _packed(scan, manifest, Path(work))
        if not workers.index:
            workers.meet()
    good = torch.tensor([i for i in range(len(scan.good)) if i not in bad])
    scan = _without(scan, bad) if bad else scan
    return Matrix(torch.from_numpy(rows), good if bad else None), manifest, scan


def _fill(
    rows: np.ndarray, scan: FolderScan, manifest: Manifest, start: int, note: Note, bad: dict[int, str]
) -> dict[int, str]:
    for i, file in list(enumerate(scan.good))[start:]:
        lora, problem = _try(file)
        if lora is None:
            bad[i] = problem
        else:
            rows[i] = manifest.flatten(lora).numpy()
        note(i + 1, bad)
    return bad


def _packed(scan: FolderScan, manifest: Manifest, work: Path) -> tuple[np.ndarray, dict[int, str]]:
    """Reads each file once into a memory-mapped matrix; an interrupted run resumes after the last row noted."""
    work.mkdir(parents=True, exist_ok=True)
    shape, note = (len(scan.good), manifest.size), work / "rows.json"
    names = [f.name for f in scan.good]
    done, bad = 0, {}
    if note.is_file():
        with named(note, "work folder", "the state of a build", f"empty {work.name}"):
            state = parse_table(note.read_text(encoding="utf-8"))
            if state["names"] != names or state["shape"] != list(shape):
                raise refuse("work folder", "the state of another build", "an empty folder", f"empty {work.name}")
            done, bad = state["done"], {int(k): v for k, v in state["bad"].items()}
    rows = np.memmap(work / "rows.f32", np.float32, "r+" if done else "w+", shape=shape)

    def save(count: int, problems: dict[int, str]) -> None:
        if count % 64 and count < len(names):
            return
        rows.flush()
        write_json(note, {"names": names, "shape": shape, "done": count, "bad": problems})

    return rows, _fill(rows, scan, manifest, done, save, bad)
