"""Reads LoRA files of any key format: headers and factors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ...errors import VitrineError, printable, refuse
from ...io.files import check_regular, check_tensors, named
from ...io.folders import has_ending
from ...io.lora_layer import LoraLayer
from .adapter_factors import factors_of
from .adapters import LARGEST_PRODUCT, Entry, entry_of
from .base_models import named_base, shaped_base, sized_bases
from .base_weights import BaseWeights
from .layer_names import among_factors, dropped_part, other_kind, parse, remedy_of
from .lora_settings import LoraRules, check_alpha, settings_of
from .numbered_keys import DIALECT, names_of_numbers

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class LoraFile:
    """The header of a LoRA file.

    Attributes:
        path, name: the file, and the model's name (see :func:`name_of`).
        dialect: the format of its keys.
        entries: layer path -> :class:`Entry`, for the UNet only.
        text_layers: number of text encoder layers, which a space leaves out.
        dropped: names of other parts that a space leaves out.
        dtypes: of the factors, as safetensors calls them (F16, BF16, ..).
        said_base, shaped_base: the base model by header, and by names and widths of layers; empty if unknown.
        base: weights of the base model, for a DoRA.
    """

    path: Path
    name: str
    dialect: str
    entries: dict[str, Entry] = field(repr=False)
    text_layers: int
    dropped: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    said_base: str = ""
    shaped_base: str = ""
    base: BaseWeights | None = field(default=None, repr=False, compare=False)

    @property
    def base_model(self) -> str:
        """The base model's name, by layers, else by the header."""
        return self.shaped_base or self.said_base or "not known"

    @property
    def ranks(self) -> list[int]:
        """The distinct ranks, ascending."""
        return sorted({entry.down[0] for entry in self.entries.values()})


def telling_parts(path: Path) -> tuple[str, ...]:
    """The parts of a file's path that can distinguish models, without those that every export has."""
    parts = [*path.parent.parts, path.stem]
    if path.stem in ("adapter_model", "pytorch_lora_weights"):
        parts.pop()
        while len(parts) > 1 and parts[-1] in ("unet", "transformer", "default"):
            parts.pop()
    return tuple(parts)


def name_of(path: Path) -> str:
    """A model's name: the file's, or the folder's if all files have the same name."""
    return printable(telling_parts(path)[-1])


def read_header(path: str | Path, layers_per_block: int = 2, base: BaseWeights | None = None) -> LoraFile:
    """Keys, shapes and alphas of one file, without its tensors.

    Args:
        base: weights of the base model, which a DoRA needs.
    """
    from safetensors import safe_open

    path = Path(path)
    if not has_ending(path, ".safetensors"):
        raise refuse("LoRA file", path.name, "a .safetensors file", "pickles are not read; convert it once")
    with named(path, "LoRA file", "a whole safetensors file", "download it again"):
        check_regular(path)
        with safe_open(str(path), "pt") as opened:
            keys = list(opened.keys())
            slices = {k: opened.get_slice(k) for k in keys}
            shapes = {k: tuple(part.get_shape()) for k, part in slices.items()}
            alphas = {k: _alpha(opened, k, shapes[k]) for k in keys if k.endswith(".alpha")}
            metadata = dict(opened.metadata() or {})
        settings = settings_of(path, metadata, keys)
        named_keys = names_of_numbers(path.name, shapes, metadata)
        spelled = {named_keys.get(key, key): shape for key, shape in shapes.items()}
        file = _header_of(path, spelled, alphas, settings, layers_per_block, base)
        if named_keys:
            file = _with_own_keys(file, {name: key for key, name in named_keys.items()})
        used = {key for e in file.entries.values() for role, key in e.keys if role != "alpha"}
        kinds = {slices[key].get_dtype() for key in used}
        by_shape = shaped_base({p: e.outer for p, e in file.entries.items()})
        said = named_base(metadata, settings.values)
        return replace(file, dtypes=tuple(sorted(kinds)), said_base=said, shaped_base=by_shape)


def _with_own_keys(file: LoraFile, keys: Mapping[str, str]) -> LoraFile:
    """A file whose keys were spelled out by their numbers, with the keys that its tensors have."""
    entries = {
        path: replace(entry, keys=tuple((role, keys[key]) for role, key in entry.keys))
        for path, entry in file.entries.items()
    }
    return replace(file, entries=entries, dialect=DIALECT)


def _alpha(opened: Any, key: str, shape: tuple[int, ...]) -> float:
    if math.prod(shape) != 1:
        raise ValueError(f"{key} of shape {shape}")
    return check_alpha(float(opened.get_tensor(key)))


def _header_of(
    path: Path,
    shapes: Shapes,
    alphas: dict[str, float],
    settings: LoraRules,
    layers: int,
    base: BaseWeights | None,
) -> LoraFile:
    """What the header says; files of one trainer have one table of layers, which is made once."""
    if not settings.values and base is None:
        try:
            alike = _header_like(tuple(shapes.items()), tuple(alphas.items()), layers)
            return replace(alike, path=path, name=name_of(path))
        except VitrineError:
            pass  # the message has to name this file
    return _header(path, shapes, alphas, settings, layers, base)


@lru_cache(maxsize=16)
def _header_like(shapes: tuple, alphas: tuple, layers: int) -> LoraFile:
    return _header(Path("file"), dict(shapes), dict(alphas), LoraRules({}), layers, None)


def _header(
    path: Path,
    shapes: Shapes,
    alphas: dict[str, float],
    settings: LoraRules,
    layers: int,
    base: BaseWeights | None,
) -> LoraFile:
    foreign = next((kind for kind in map(other_kind, shapes) if kind), None)
    if foreign:
        shown = f"{path.name} has {foreign}"
        raise refuse("LoRA file", shown, "LoRA, LoCon, LoHa, LoKr or full difference", remedy_of(foreign))
    keys: dict[str, dict[str, str]] = {}
    dialects: Counter[str] = Counter()
    text, text_ups, others = set(), list[str](), list[str]()
    for key in shapes:
        # a norm layer's difference has one axis
        meaning = None if key.endswith(".diff") and len(shapes[key]) < 2 else parse(key, layers)
        if meaning is None:
            others.append(key)
            continue
        if not meaning.unet:
            text.add(meaning.path)
            text_ups += [key] if meaning.role == "up" else []
            continue
        dialects[meaning.dialect] += meaning.role != "alpha"
        first = keys.setdefault(meaning.path, {}).setdefault(meaning.role, key)
        if first != key:
            shown = f"{path.name}: {meaning.path} twice, as {first} and {key}"
            raise refuse("LoRA file", shown, "one adapter, in one spelling", "save its adapters as separate files")
    unknown = next((key for key in others if among_factors(key, keys, layers)), None)
    if unknown:
        shown = f"{path.name}: {unknown}, which is unknown, among the factors of its layer"
        raise refuse("LoRA file", shown, "LoRA, LoCon, LoHa, LoKr or full difference", "merge it and extract a LoRA")
    dropped = set(map(dropped_part, others))
    entries = {}
    for layer, roles in sorted(keys.items()):
        if "singular" in roles and 0 in shapes[roles["singular"]]:
            continue  # AdaLoRA has pruned all of its ranks
        alpha = alphas[roles["alpha"]] if "alpha" in roles else None
        entries[layer] = entry_of(path.name, layer, roles, shapes, alpha, settings, base)
    if not entries:
        content = "a whole model or other tensors" if dropped else "nothing"
        if text:
            content = f"{len(text)} text encoder layers{_zero_layers(path, text_ups)}"
        shown = f"{path.name} without UNet layers: it has {content}"
        raise refuse("LoRA file", shown, "a UNet LoRA", "choose another file")
    dialect = dialects.most_common(1)[0][0]
    return LoraFile(path, name_of(path), dialect, entries, len(text), tuple(sorted(dropped)), base=base)


def _zero_layers(path: Path, ups: Sequence[str]) -> str:
    """How many of a file's layers change nothing, as the end of a sentence."""
    from safetensors import safe_open

    if not path.is_file():  # a header without its file, see _header_like
        return ""
    with safe_open(str(path), "pt") as opened:
        zero = sum(not bool(opened.get_tensor(key).float().any()) for key in ups)
    return f", {zero} of them zero" if zero else ""


# --- tensors ------------------------------------------------------------------------------------------------------
def read_lora(
    file: str | Path | LoraFile,
    layers_per_block: int = 2,
    base: BaseWeights | None = None,
    only: Collection[str] | None = None,
    sizes: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, LoraLayer]:
    """The UNet factors of a file in float32; alpha is the rank if the file has none.

    LoHa, LoKr, full differences and, with ``base``, DoRAs become factors with the same product (see ``adapters.py``).
    Args:
        only: the layers to read.
        sizes: known (out, in) of layers, for example of a space; other sizes are refused.
    """
    file = file if isinstance(file, LoraFile) else read_header(file, layers_per_block, base)
    for path, entry in file.entries.items():
        if sizes and tuple(sizes.get(path, entry.outer)) != entry.outer:
            shown = f"{file.path.name}: {path} of {entry.outer} (out, in)"
            raise refuse("LoRA layer", shown, f"{tuple(sizes[path])}", "choose a LoRA of the same base model")
    _refuse_to_swell(file, [e for p, e in file.entries.items() if only is None or p in only], sizes or base)
    layers = {}
    errors = named(file.path, "LoRA file", "a whole safetensors file", "download it again")
    with errors, _tensors_of(file.path, only is None) as tensor_of:
        for path, entry in file.entries.items():
            if only is not None and path not in only:
                continue
            tensors = {role: tensor_of(key) for role, key in entry.keys if role != "alpha"}
            weight = file.base[path].cpu() if entry.decomposed and file.base is not None else None
            # in the folder's form: a 1 x 1 projection has two or four axes
            down, up = factors_of(entry, tensors, weight)
            layer = LoraLayer(down, up, float(entry.down[0]) if entry.alpha is None else entry.alpha)
            largest = _largest_product(layer)
            if not largest <= LARGEST_PRODUCT or not all(value.is_floating_point() for value in tensors.values()):
                check_tensors({key: tensors[role] for role, key in entry.keys if role != "alpha"})
                shown = f"{file.path.name}: numbers of up to {largest:.3g} in {path}"
                raise refuse("LoRA file", shown, "finite weights", "download it again")
            layers[path] = layer
    return layers


_SMALL = 2**26
"""Bytes of a file that is read in one go: three times as fast as tensor by tensor."""


@contextmanager
def _tensors_of(path: Path, every: bool) -> Iterator[Callable[[str], torch.Tensor]]:
    """Reads a file's tensors by their keys, all at once where all are wanted and the file is small."""
    from safetensors import safe_open
    from safetensors.torch import load

    if every and path.stat().st_size <= _SMALL:
        yield load(path.read_bytes()).__getitem__
        return
    with safe_open(str(path), "pt") as opened:
        yield opened.get_tensor


_MOST_SWOLLEN, _SWELLS = 2**29, 1024
"""Bytes that products of a file's factors may always take; and multiples of the file's size for a
known base model. Full LoKr of Flux, factor 16: 1,000 times."""


def _refuse_to_swell(file: LoraFile, entries: Sequence[Entry], known: object) -> None:
    """Raises before allocating memory: a small file of Kronecker factors may expand to a whole model."""
    products = [e for e in entries if e.kind not in ("LoRA", "AdaLoRA", "difference")]
    if not products:
        return
    kept = sum(math.prod(e.down) + math.prod(e.up) for e in products)
    needed = 4 * kept + 12 * max(math.prod(e.outer) for e in products)  # one product in float64 and float32
    most = _MOST_SWOLLEN
    if known or sized_bases({p: e.outer for p, e in file.entries.items()}):
        most = max(most, _SWELLS * file.path.stat().st_size)
    if needed > most:
        shown = f"{file.path.name}, whose {products[0].kind} takes {needed / 1e9:.1f} GB"
        accepted = f"at most {most / 1e9:.1f} GB for a file of its size, or of an unknown base model"
        raise refuse("LoRA file", shown, accepted, "merge it and extract a LoRA, or name the base model's weights")


def _largest_product(layer: LoraLayer) -> float:
    """Upper bound of a layer's update per rank; NaN if a factor has a NaN."""
    sides = [abs(layer.scale)]
    for factor in (layer.down, layer.up):
        low, high = factor.aminmax()
        sides.append(max(-float(low), float(high)))
    return math.prod(sides)
