"""Reading LoRA files of any spelling: headers, factors, and whole folders, in which bad files are named."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import VitrineError, refuse
from ..files import check_tensors, named, parse_table
from .manifest import LoraLayer
from .names import other_kind, parse

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Entry:
    """One layer of a file: keys, shapes, and alpha (None if the file has none; the scale is then 1)."""

    down_key: str
    up_key: str
    down: tuple[int, ...]
    up: tuple[int, ...]
    alpha: float | None

    @property
    def outer(self) -> tuple[int, ...]:
        """(out, in), whatever the rank."""
        return self.up[0], math.prod(self.down[1:])


@dataclass(frozen=True)
class LoraFile:
    """What a file's header says.

    Attributes:
        path, name: the file, and the model's name (see :func:`name_of`).
        dialect: the spelling of its keys.
        entries: layer path -> :class:`Entry`, of the UNet only.
        text_layers: number of text encoder layers, which a space leaves out.
    """

    path: Path
    name: str
    dialect: str
    entries: dict[str, Entry]
    text_layers: int


@dataclass(frozen=True)
class BadFile:
    """A file left out: its name, why, and what to do."""

    name: str
    problem: str


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

    def summary(self) -> str:
        """The scan as text."""
        dialects = Counter(f.dialect for f in self.good)
        ranks = sorted({e.down[0] for f in self.good for e in f.entries.values()})
        alphas = sorted({e.alpha for f in self.good for e in f.entries.values() if e.alpha is not None})
        lines = [
            f"{len(self.good)} LoRAs: " + ", ".join(f"{n} {kind}" for kind, n in dialects.most_common()),
            f"{len(self.shapes)} layers, ranks {_few(ranks)}, alphas {_few(alphas) or 'none'}",
        ]
        lines += [*self.notes, *(f"left out {b.name}: {b.problem}" for b in self.bad)]
        return "\n".join(lines)


def _few(values: list) -> str:
    shown = [f"{v:g}" for v in values]
    return ", ".join(shown) if len(shown) < 6 else f"{shown[0]} .. {shown[-1]}"


def name_of(path: Path) -> str:
    """A model's name: the file's, or the folder's where all files are called the same."""
    return path.parent.name if path.stem in ("adapter_model", "pytorch_lora_weights") else path.stem


def read_header(path: str | Path, layers_per_block: int = 2) -> LoraFile:
    """Keys, shapes and alphas of one file, without its tensors.

    Raises:
        VitrineError: If the file is a pickle, corrupt, not a LoRA, another kind of adapter, or lacks a factor.
    """
    from safetensors import safe_open

    path = Path(path)
    if path.suffix != ".safetensors":
        raise refuse("LoRA file", path.name, "a .safetensors file", "pickles are not read; convert it once")
    with named(path, "LoRA file", "a whole safetensors file", "download it again"):
        with safe_open(str(path), "pt") as opened:
            keys = list(opened.keys())
            shapes = {k: tuple(opened.get_slice(k).get_shape()) for k in keys}
            alphas = {k: float(opened.get_tensor(k)) for k in keys if k.endswith(".alpha")}
            metadata = dict(opened.metadata() or {})
        return _header(path, shapes, alphas, _settings(path, metadata), layers_per_block)


def _header(path: Path, shapes: Shapes, alphas: dict[str, float], settings: _Settings, layers: int) -> LoraFile:
    foreign = next((kind for kind in map(other_kind, shapes) if kind), None)
    if foreign:
        raise refuse("LoRA file", f"{path.name} holds {foreign}", "plain LoRA factors", "convert it to a LoRA by SVD")
    keys: dict[str, dict[str, str]] = {}
    dialects: Counter[str] = Counter()
    text = set()
    for key in shapes:
        meaning = parse(key, layers)
        if meaning is None:
            continue
        if not meaning.unet:
            text.add(meaning.path)
            continue
        dialects[meaning.dialect] += meaning.role != "alpha"
        keys.setdefault(meaning.path, {})[meaning.role] = key
    entries = {p: _entry(path.name, p, k, shapes, alphas, settings) for p, k in sorted(keys.items())}
    if not entries:
        raise refuse("LoRA file", f"{path.name} without UNet layers", "a UNet LoRA", "choose another file")
    return LoraFile(path, name_of(path), dialects.most_common(1)[0][0], entries, len(text))


def _entry(
    name: str, path: str, keys: dict[str, str], shapes: Shapes, alphas: dict[str, float], settings: _Settings
) -> Entry:
    if "down" not in keys or "up" not in keys:
        raise refuse("LoRA file", f"{name}: {path} has only {sorted(keys)}", "two factors a layer", "download it again")
    down, up = shapes[keys["down"]], shapes[keys["up"]]
    if len(down) < 2 or len(up) < 2 or up[1] != down[0] or 0 in down + up:
        raise refuse("LoRA file", f"{name}: {path} has factors {down} and {up}", "(r, in), (out, r)", "export it again")
    alpha = alphas[keys["alpha"]] if "alpha" in keys else settings.alpha(path, down[0])
    if alpha is not None and not math.isfinite(alpha):
        raise refuse("LoRA file", f"{name}: alpha {alpha} of {path}", "a finite alpha", "export it again")
    return Entry(keys["down"], keys["up"], down, up, alpha)


# --- alphas outside the tensors -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Settings:
    """LoRA settings from adapter_config.json or a diffusers header."""

    values: dict[str, Any]

    def alpha(self, path: str, rank: int) -> float | None:
        """PEFT's rules: a pattern for this layer, else the common alpha; rank-stabilised LoRA divides by sqrt(r)."""
        alpha = self.values.get("lora_alpha")
        for pattern, value in (self.values.get("alpha_pattern") or {}).items():
            if path == pattern or path.endswith("." + pattern):
                alpha = value
        if alpha is None:
            return None
        return float(alpha) * (rank**0.5 if self.values.get("use_rslora") else 1.0)


def _settings(path: Path, metadata: dict[str, str]) -> _Settings:
    beside = path.with_name("adapter_config.json")
    if path.stem == "adapter_model" and beside.is_file():
        with named(beside, "LoRA settings", "PEFT's JSON file", "export the LoRA again"):
            config = parse_table(beside.read_text(encoding="utf-8"))
            alphas = (config.get("lora_alpha") or 0, *(config.get("alpha_pattern") or {}).values())
            if not all(math.isfinite(float(alpha)) for alpha in alphas):
                raise ValueError(f"alphas {alphas}")
            return _Settings(config)
    try:
        values = parse_table(metadata.get("lora_adapter_metadata", "{}"))
    except ValueError:
        return _Settings({})
    unet = {k[5:]: v for k, v in values.items() if k.startswith("unet.")}
    return _Settings(unet or values)


# --- tensors ------------------------------------------------------------------------------------------------------
def read_lora(file: str | Path | LoraFile, layers_per_block: int = 2) -> dict[str, LoraLayer]:
    """The UNet factors of a file in float32; alpha is the rank where the file has none.

    Raises:
        VitrineError: As :func:`read_header`, and if a factor holds NaN or infinity.
    """
    from safetensors import safe_open

    file = file if isinstance(file, LoraFile) else read_header(file, layers_per_block)
    layers = {}
    errors = named(file.path, "LoRA file", "a whole safetensors file", "download it again")
    with errors, safe_open(str(file.path), "pt") as opened:
        for path, entry in file.entries.items():
            factors = {k: opened.get_tensor(k) for k in (entry.down_key, entry.up_key)}
            check_tensors(factors)
            down, up = (factor.float() for factor in factors.values())
            layers[path] = LoraLayer(down, up, float(entry.down[0]) if entry.alpha is None else entry.alpha)
    return layers


def scan_folder(folder: str | Path | Iterable[Path], layers_per_block: int = 2) -> FolderScan:
    """Reads the headers of all files in a folder and its subfolders, or of an iterable of files.

    Files whose base model is not that of most others are left out.

    Raises:
        VitrineError: If the folder is missing, or holds fewer than two usable files.
    """
    paths = _files(folder)
    good: list[LoraFile] = []
    bad: list[BadFile] = []
    for path in paths:
        try:
            good.append(read_header(path, layers_per_block))
        except VitrineError as error:
            bad.append(BadFile(path.name, str(error)))
    good, others, shapes = _same_base(sorted(good, key=lambda f: (f.name, str(f.path))))
    bad += others
    if len(good) < 2:
        problems = "; ".join(f"{b.name}: {b.problem}" for b in bad[:3]) or "no .safetensors files"
        raise refuse("folder", f"{len(good)} usable LoRAs ({problems})", "two or more", "point to a folder of LoRAs")
    return FolderScan(tuple(good), tuple(bad), tuple(_notes(good, shapes)), shapes)


def _files(folder: str | Path | Iterable[Path]) -> list[Path]:
    if not isinstance(folder, (str, Path)):
        return [Path(p) for p in folder]
    folder = Path(folder)
    if not folder.is_dir():
        raise refuse("folder", folder.name, "an existing folder of LoRA files", "check the path")
    endings = (".safetensors", ".pt", ".bin", ".ckpt")
    return sorted(p for p in folder.rglob("*") if p.suffix in endings and p.is_file())


def _same_base(files: list[LoraFile]) -> tuple[list[LoraFile], list[BadFile], Shapes]:
    """A layer's size is that of most files; a file that differs belongs to another base model."""
    votes: dict[str, Counter[tuple[int, ...]]] = {}
    for file in files:
        for path, entry in file.entries.items():
            votes.setdefault(path, Counter())[entry.outer] += 1
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
    no_alpha = sum(1 for f in files if any(e.alpha is None for e in f.entries.values()))
    if no_alpha:
        notes.append(f"{no_alpha} files give no alpha: their scale is 1")
    return notes
