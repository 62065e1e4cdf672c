"""Scans folders of LoRA files: compatible files, their names, and what a space leaves out."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...errors import VitrineError, printable, refuse
from ...io.folders import files_in
from ...runtime.progress import Progress, silent
from ...settings.one_line import one_line
from .adapters import Entry
from .base_models import families_of
from .base_weights import BaseWeights
from .lora_files import LoraFile, read_header, telling_parts

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class BadFile:
    """A file left out: its name, why, and what to do."""

    name: str
    problem: str


@one_line
@dataclass(frozen=True)
class FolderScan:
    """The LoRA files of a folder.

    Attributes:
        good: usable files, sorted by name.
        bad: files left out.
        notes: remarks about the usable ones.
        shapes: layer path -> (out, in).
    """

    good: tuple[LoraFile, ...]
    bad: tuple[BadFile, ...] = ()
    notes: tuple[str, ...] = ()
    shapes: Shapes = field(default_factory=dict)

    def heading(self) -> str:
        """Number of LoRAs, base model, key format, ranks and precision."""
        if not self.good:
            return "no usable LoRA"
        dialects = Counter(f.dialect for f in self.good)
        ranks = sorted({rank for f in self.good for rank in f.ranks})
        alphas = sorted({e.alpha for f in self.good for e in f.entries.values() if e.alpha is not None})
        bases, dtypes = Counter(f.base_model for f in self.good), Counter(d for f in self.good for d in f.dtypes)
        lines = [
            f"{len(self.good)} LoRAs: {_counted(dialects)}",
            f"base model: {_counted(bases)}",
            f"{len(self.shapes)} layers, ranks {_few(ranks)}, alphas {_few(alphas) or 'none'}, {_counted(dtypes)}",
        ]
        return "\n".join(lines)

    def summary(self) -> str:
        """The scan as text."""
        return "\n".join([self.heading(), *self.notes, *(f"left out {b.name}: {b.problem}" for b in self.bad)])


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in counts.most_common())


def _few(values: list) -> str:
    shown = [f"{v:g}" for v in values]
    return ", ".join(shown) if len(shown) < 6 else f"{shown[0]} .. {shown[-1]}"


def scan_folder(
    folder: str | Path | Iterable[Path],
    layers_per_block: int = 2,
    progress: Progress = silent,
    fewest: int = 2,
    base: BaseWeights | None = None,
) -> FolderScan:
    """Reads the headers of all files in a folder and its subfolders, or of an iterable of files.

    Files of another base model than most are left out, and DoRAs unless ``base`` has their weights.
    """
    paths = _files(folder)
    good: list[LoraFile] = []
    bad: list[BadFile] = []
    layouts: dict[tuple, dict[str, Entry]] = {}
    for number, path in enumerate(paths):
        try:
            file = read_header(path, layers_per_block, base)
            # files of one kind share their table of layers, which would take gigabytes for 65,000 files
            shared = layouts.setdefault(tuple(file.entries.items()), file.entries)
            good.append(replace(file, entries=shared))
        except VitrineError as error:
            bad.append(BadFile(printable(path.name), str(error)))
        progress(number + 1, len(paths))
    names = [printable(name) for name in distinct_names([f.path for f in good])]
    good = [replace(f, name=name) for f, name in zip(good, names, strict=True)]
    good, others, shapes = _same_base(sorted(good, key=lambda f: (f.name, str(f.path))))
    good = one_form(good)
    bad += others
    if len(good) < fewest:
        problems = "; ".join(f"{b.name}: {b.problem}" for b in bad[:3]) or "no .safetensors files"
        raise refuse("folder", f"{len(good)} usable LoRAs ({problems})", "two or more", "point to a folder of LoRAs")
    return FolderScan(tuple(good), tuple(bad), tuple(_notes(good, shapes)), shapes)


def _files(folder: str | Path | Iterable[Path]) -> list[Path]:
    if not isinstance(folder, (str, Path)):
        return [Path(p) for p in folder]
    folder = Path(folder)
    if not folder.is_dir():
        raise refuse("folder", folder.name, "an existing folder of LoRA files", "check the path")
    return files_in(folder, (".safetensors", ".pt", ".bin", ".ckpt"), deep=True)


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """A name per file: its own or its folder's, and if several are equal, the differing parts of their paths.

    ``anna/last``, ``bob/last`` are anna and bob; ``anna/last``, ``anna/old/last`` keep the full path.
    """
    root = Path(os.path.commonpath([p.parent for p in paths])) if paths else Path()
    parts = [telling_parts(p.relative_to(root)) or (root.name,) for p in paths]
    names = [p[-1] for p in parts]
    for name in _shared(names):
        group = [i for i, n in enumerate(names) if n == name]
        while len({parts[i][-1] for i in group}) == 1 and min(len(parts[i]) for i in group) > 1:
            for i in group:
                parts[i] = parts[i][:-1]
        depths = {len(parts[i]) for i in group}
        for i in group if len(depths) == 1 else ():
            names[i] = parts[i][-1]
    shared = _shared(names)
    whole = ["/".join(telling_parts(p.relative_to(root)) or (root.name,)) for p in paths]
    return [w if n in shared else n for n, w in zip(names, whole, strict=True)]


def _shared(names: Sequence[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}


def one_form(files: list[LoraFile]) -> list[LoraFile]:
    """Brings 1 x 1 projections, stored as (r, in) or (r, in, 1, 1), into one form: the longer one represents both."""
    forms: dict[str, tuple[int, ...]] = {}
    tables = {id(f.entries): f.entries for f in files}
    for entries in tables.values():
        for path, entry in entries.items():
            forms[path] = max(forms.get(path, ()), entry.down[1:], key=len)
    formed = {key: {p: _formed(e, forms[p]) for p, e in entries.items()} for key, entries in tables.items()}
    return [replace(f, entries=formed[id(f.entries)]) for f in files]


def _formed(entry: Entry, form: tuple[int, ...]) -> Entry:
    ones = (1,) * (len(form) - 1)
    return replace(entry, down=(entry.down[0], *form), up=(*entry.up[:2], *ones))


def _same_base(files: list[LoraFile]) -> tuple[list[LoraFile], list[BadFile], Shapes]:
    """Takes a layer's size from most files; files that differ belong to another base model."""
    votes: dict[str, Counter[tuple[int, ...]]] = {}
    alike = Counter(id(file.entries) for file in files)
    for entries in {id(file.entries): file.entries for file in files}.values():
        for path, entry in entries.items():
            votes.setdefault(path, Counter())[entry.outer] += alike[id(entries)]
    shapes = {path: count.most_common(1)[0][0] for path, count in sorted(votes.items())}
    families = Counter(_family(file) for file in files)
    common = families.most_common(1)[0][0] if families else ()
    good, bad = [], []
    for file in files:
        odd = next((p for p, e in file.entries.items() if e.outer != shapes[p]), None)
        if odd is not None:
            reason = f"{odd} is {file.entries[odd].outer} (out, in), in most files {shapes[odd]}"
        elif not _overlap(file, files, common):
            reason = f"none of its layers ({next(iter(file.entries))} ..) is in the other files"
            usual = next(f for f in files if _overlap(f, files, common))
            own = families_of(tuple(file.entries))
            if any(family in own for family in families_of(tuple(usual.entries))):
                reason = f"its layers have the names of the other library ({next(iter(file.entries))} ..) than most"
                problem = f"{reason} ({next(iter(usual.entries))} ..). Save all LoRAs in one library's names."
                bad.append(BadFile(file.path.name, problem))
                continue
        else:
            good.append(file)
            continue
        problem = f"of another base model: {reason}. Put LoRAs of one base into one folder."
        bad.append(BadFile(file.path.name, problem))
    used = {p for f in good for p in f.entries}
    return good, bad, {p: s for p, s in shapes.items() if p in used}


def _family(file: LoraFile) -> tuple[str, ...]:
    return tuple(sorted({path.split(".")[0] for path in file.entries}))


def _overlap(file: LoraFile, files: list[LoraFile], common: tuple[str, ...]) -> bool:
    return bool(set(_family(file)) & set(common)) or len(files) == 1


def _notes(files: list[LoraFile], shapes: Shapes) -> list[str]:
    notes = []
    short = [f.name for f in files if len(f.entries) < len(shapes)]
    if short:
        notes.append(f"{len(short)} files lack some of the {len(shapes)} layers, e.g. {short[0]}: counted as zero")
    text = sum(1 for f in files if f.text_layers)
    if text:
        notes.append(f"{text} files also change text encoders: left out of the space")
    parts = Counter(part for f in files for part in f.dropped)
    notes += [f"{count} files also have {part}: left out of the space" for part, count in sorted(parts.items())]
    kinds = Counter(kind for f in files for kind in {e.kind for e in f.entries.values()} - {"LoRA"})
    kinds += Counter("DoRA" for f in files if any(e.decomposed for e in f.entries.values()))
    notes += [f"{count} files have {kind}: converted without loss" for kind, count in sorted(kinds.items())]
    no_alpha = sum(1 for f in files if any(e.alpha is None for e in f.entries.values()))
    if no_alpha:
        notes.append(f"{no_alpha} files have no alpha: their scale is 1")
    return notes
