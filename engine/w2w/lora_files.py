"""Reading LoRA files of any spelling: headers and factors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import refuse
from ..files import check_tensors, named
from .adapters import Entry, entry_of, factors_of
from .base_models import named_base, shaped_base
from .base_weights import BaseWeights
from .lora_settings import LoraRules, settings_of
from .manifest import LoraLayer
from .names import dropped_part, other_kind, parse

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class LoraFile:
    """What a file's header says.

    Attributes:
        path, name: the file, and the model's name (see :func:`name_of`).
        dialect: the spelling of its keys.
        entries: layer path -> :class:`Entry`, of the UNet only.
        text_layers: number of text encoder layers, which a space leaves out.
        dropped: other parts that it leaves out, in words.
        dtypes: of the factors, as safetensors calls them (F16, BF16, ..).
        said_base, shaped_base: the base model by the header, and by names and widths of layers; empty if unknown.
        base: weights of the base model, for a DoRA.
    """

    path: Path
    name: str
    dialect: str
    entries: dict[str, Entry]
    text_layers: int
    dropped: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    said_base: str = ""
    shaped_base: str = ""
    base: BaseWeights | None = field(default=None, repr=False, compare=False)

    @property
    def base_model(self) -> str:
        """In words, the header's name only where the layers do not tell."""
        return self.shaped_base or self.said_base or "not known"

    @property
    def ranks(self) -> list[int]:
        """The different ranks, ascending."""
        return sorted({entry.down[0] for entry in self.entries.values()})


def telling_parts(path: Path) -> tuple[str, ...]:
    """The parts of a file's path that can tell models apart, without those that every export has."""
    parts = [*path.parent.parts, path.stem]
    if path.stem in ("adapter_model", "pytorch_lora_weights"):
        parts.pop()
        while len(parts) > 1 and parts[-1] in ("unet", "transformer", "default"):
            parts.pop()
    return tuple(parts)


def name_of(path: Path) -> str:
    """A model's name: the file's, or the folder's where all files are called the same."""
    return telling_parts(path)[-1]


def read_header(path: str | Path, layers_per_block: int = 2, base: BaseWeights | None = None) -> LoraFile:
    """Keys, shapes and alphas of one file, without its tensors.

    Args:
        base: weights of the base model, which a DoRA needs.

    Raises:
        VitrineError: If the file is a pickle, corrupt, an adapter that is no sum of factors, lacks a factor, or is a
            DoRA without its base weights.
    """
    from safetensors import safe_open

    path = Path(path)
    if path.suffix != ".safetensors":
        raise refuse("LoRA file", path.name, "a .safetensors file", "pickles are not read; convert it once")
    with named(path, "LoRA file", "a whole safetensors file", "download it again"):
        with safe_open(str(path), "pt") as opened:
            keys = list(opened.keys())
            slices = {k: opened.get_slice(k) for k in keys}
            shapes = {k: tuple(part.get_shape()) for k, part in slices.items()}
            alphas = {k: float(opened.get_tensor(k)) for k in keys if k.endswith(".alpha")}
            metadata = dict(opened.metadata() or {})
        settings = settings_of(path, metadata)
        file = _header(path, shapes, alphas, settings, layers_per_block, base)
        used = {key for e in file.entries.values() for role, key in e.keys if role != "alpha"}
        kinds = {slices[key].get_dtype() for key in used}
        by_shape = shaped_base({p: e.outer for p, e in file.entries.items()})
        said = named_base(metadata, settings.values)
        return replace(file, dtypes=tuple(sorted(kinds)), said_base=said, shaped_base=by_shape)


def _header(
    path: Path, shapes: Shapes, alphas: dict[str, float], settings: LoraRules, layers: int,
    base: BaseWeights | None,
) -> LoraFile:  # fmt: skip
    foreign = next((kind for kind in map(other_kind, shapes) if kind), None)
    if foreign:
        shown = f"{path.name} holds {foreign}"
        raise refuse("LoRA file", shown, "LoRA, LoCon, LoHa, LoKr or full difference", "merge it and extract a LoRA")
    keys: dict[str, dict[str, str]] = {}
    dialects: Counter[str] = Counter()
    text, dropped = set(), set[str]()
    for key in shapes:
        meaning = parse(key, layers)
        if meaning is None or meaning.role == "diff" and len(shapes[key]) < 2:
            dropped.add(dropped_part(key))
            continue
        if not meaning.unet:
            text.add(meaning.path)
            continue
        dialects[meaning.dialect] += meaning.role != "alpha"
        keys.setdefault(meaning.path, {})[meaning.role] = key
    entries = {}
    for layer, roles in sorted(keys.items()):
        alpha = alphas[roles["alpha"]] if "alpha" in roles else None
        entries[layer] = entry_of(path.name, layer, roles, shapes, alpha, settings, base)
    if not entries:
        held = "text encoder layers" if text else "a whole model or other tensors" if dropped else "nothing"
        shown = f"{path.name} without UNet layers: it holds {held}"
        raise refuse("LoRA file", shown, "a UNet LoRA", "choose another file")
    dialect = dialects.most_common(1)[0][0]
    return LoraFile(path, name_of(path), dialect, entries, len(text), tuple(sorted(dropped)), base=base)


# --- tensors ------------------------------------------------------------------------------------------------------
def read_lora(
    file: str | Path | LoraFile, layers_per_block: int = 2, base: BaseWeights | None = None,
    only: Collection[str] | None = None,
) -> dict[str, LoraLayer]:  # fmt: skip
    """The UNet factors of a file in float32; alpha is the rank where the file has none.

    LoHa, LoKr, full differences and, with ``base``, DoRAs become factors with the same product (see ``adapters.py``).
    With ``only``, no other layers are read.

    Raises:
        VitrineError: As :func:`read_header`, and if a factor holds NaN or infinity.
    """
    from safetensors import safe_open

    file = file if isinstance(file, LoraFile) else read_header(file, layers_per_block, base)
    layers = {}
    errors = named(file.path, "LoRA file", "a whole safetensors file", "download it again")
    with errors, safe_open(str(file.path), "pt") as opened:
        for path, entry in file.entries.items():
            if only is not None and path not in only:
                continue
            tensors = {role: opened.get_tensor(key) for role, key in entry.keys if role != "alpha"}
            check_tensors({key: tensors[role] for role, key in entry.keys if role != "alpha"})
            weight = file.base[path].cpu() if entry.decomposed and file.base is not None else None
            # in the form of the folder: a 1 x 1 projection has two or four dimensions
            down, up = factors_of(entry, tensors, weight)
            layers[path] = LoraLayer(down, up, float(entry.down[0]) if entry.alpha is None else entry.alpha)
    return layers
