"""NEURONS: which value neurons to block, of which model, found how. A JSON file people can read and share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import printable, refuse
from ..io.files import named, parse_json, parse_table, save_table
from ..io.hub import Shared
from ..io.number_checks import integer
from ..io.tables import lines_of, read_text, rows_of
from ..network.site import ModuleSite
from ..settings.one_line import one_line
from ..tracing.fingerprint import fingerprint_of, same_weights, short, width_of

FORMAT, VERSION = "vitrine-neurons", 1
LEAST_FACTOR = -2.0
"""That a dose has."""


@one_line
@dataclass(frozen=True)
class NeuronSet(Shared):
    """Neurons by address, ascending and without repeats.

    Attributes:
        neurons: address -> indices of output channels of that value projection.
        fingerprint: of the model they belong to; empty if unknown (imported lists).
        info: what the search reports: prompt, settings, scores before and after, kept seeds, verdict.
        factor: the dose: what their activations are multiplied by unless another factor is asked for, -2..1. One
            number, or address -> one for each neuron, ascending, where sets of different doses were merged.
    """

    FILE = "neurons.json"
    TITLE = "Neurons that memorize"
    ABOUT = "Value neurons of one diffusion model, blocked while it samples (NeMo, arXiv:2406.02366)."
    FOLDER = "vitrine_neurons"

    neurons: dict[str, tuple[int, ...]]
    fingerprint: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    factor: float | dict[str, tuple[float, ...]] = 0.0

    def __post_init__(self) -> None:
        clean = {a: tuple(sorted(set(map(int, n)))) for a, n in self.neurons.items()}
        if any(i < 0 for n in clean.values() for i in n):
            raise refuse("neuron index", min(i for n in clean.values() for i in n), "0 or more", "correct the list")
        object.__setattr__(self, "neurons", {a: n for a, n in clean.items() if n})
        numbers = [f for a in self.neurons for f in self.factors(a)]
        if not all(LEAST_FACTOR <= f <= 1 for f in numbers):
            raise refuse("factor", sorted(set(numbers)), f"{LEAST_FACTOR:g} .. 1", "0 blocks")

    def factors(self, address: str) -> tuple[float, ...]:
        """What each of a layer's neurons is multiplied by, in their order."""
        count = len(self.neurons[address])
        if not isinstance(self.factor, Mapping):
            return (float(self.factor),) * count
        factors = tuple(map(float, self.factor.get(address, ())))
        if len(factors) != count:
            raise refuse("factors", f"{len(factors)} of {address}", f"{count}, one for each neuron", "correct the list")
        return factors

    def __len__(self) -> int:
        return sum(map(len, self.neurons.values()))

    def merged(self, *others: NeuronSet) -> NeuronSet:
        """Union of several sets of one model; their ``info`` is listed in the new one's.

        Each neuron keeps its factor; the lowest, where sets with different ones share it.
        """
        sets = (self, *others)
        models = [s.fingerprint for s in sets if s.fingerprint]
        if not all(same_weights(models[0], other) for other in models):
            raise refuse(
                "neuron sets",
                sorted(map(short, set(models))),
                "sets of one model",
                "find the neurons on the model you block",
            )
        union: dict[str, dict[int, float]] = {}
        for neurons in sets:
            for address, indices in neurons.neurons.items():
                layer = union.setdefault(address, {})
                for index, factor in zip(indices, neurons.factors(address), strict=True):
                    layer[index] = min(factor, layer.get(index, factor))
        merged = {a: tuple(sorted(layer)) for a, layer in union.items()}
        factors = {a: tuple(layer[i] for i in merged[a]) for a, layer in union.items()}
        return NeuronSet(merged, next(iter(models), ""), {"merged": [s.info for s in sets]}, _as_one(factors))

    def without(self, spared: Mapping[str, Iterable[int]]) -> NeuronSet:
        """The set less some of its neurons; what is said of the search stays."""
        strange = [f"{a} {i}" for a, indices in spared.items() for i in indices if i not in self.neurons.get(a, ())]
        if strange:
            listed = [f"{a} {i}" for a, indices in self.neurons.items() for i in indices]
            raise refuse("spared neuron", strange[0], listed, "take it off the list: it is not blocked")
        left, factors = {}, {}
        for address, indices in self.neurons.items():
            pairs = zip(indices, self.factors(address), strict=True)
            kept = {index: factor for index, factor in pairs if index not in set(spared.get(address, ()))}
            left[address], factors[address] = tuple(kept), tuple(kept.values())
        return NeuronSet(
            left, self.fingerprint, self.info, _as_one(factors) if isinstance(self.factor, Mapping) else self.factor
        )

    def check(self, backbone: nn.Module, sites: Iterable[ModuleSite], fingerprint: str = "") -> dict[str, ModuleSite]:
        """The sites to edit; refuses a set that cannot belong to this model.

        Args:
            sites: the model's value sites.
            fingerprint: of the model, where its modules carry patches at the moment.
        """
        fingerprint = fingerprint or fingerprint_of(backbone)
        if self.fingerprint and not same_weights(self.fingerprint, fingerprint):
            remedy = "find the neurons on this model (a LoRA or a fine-tune makes it another one only if baked in)"
            raise refuse(
                "neurons", f"made for model {short(self.fingerprint)}", f"this model, {short(fingerprint)}", remedy
            )
        table = {s.address: s for s in sites}
        for address, indices in self.neurons.items():
            if address not in table:
                raise refuse("neurons", address, sorted(table), "they belong to a model of another shape")
            width = width_of(backbone, table[address])
            if indices[-1] >= width:
                raise refuse("neuron", f"{address} #{indices[-1]}", f"0 .. {width - 1}", "another model's list")
        return {a: table[a] for a in self.neurons}

    def save(self, path: str | Path) -> Path:
        """Write JSON, whole or not at all."""
        table = {"format": FORMAT, "version": VERSION, "fingerprint": self.fingerprint, "info": self.info}
        return save_table(path, table | {"neurons": self.neurons, "factor": self.factor}, self._of_table)

    @classmethod
    def load(cls, path: str | Path) -> NeuronSet:
        """Read such a file."""
        accepted = f"a JSON file of {FORMAT} version {VERSION}"
        with named(path, "neurons file", accepted, "save it again, or download it again"):
            return cls._of_table(parse_table(Path(path).read_text(encoding="utf-8")))

    @classmethod
    def _of_table(cls, table: dict[str, Any]) -> NeuronSet:
        if table["format"] != FORMAT or table["version"] != VERSION:
            raise ValueError(f"format {table['format']!r} version {table['version']!r}")
        neurons = {_address(a): _indices(n) for a, n in table["neurons"].items()}
        return cls(neurons, printable(str(table["fingerprint"])), dict(table["info"]), _dose(table["factor"]))


def _as_one(factors: dict[str, tuple[float, ...]]) -> float | dict[str, tuple[float, ...]]:
    """One number where all are equal."""
    numbers = {factor for layer in factors.values() for factor in layer}
    return factors if len(numbers) > 1 else next(iter(numbers), 0.0)


def _dose(value: object) -> float | dict[str, tuple[float, ...]]:
    """The factor of a file: one number, or one for each neuron of each layer."""
    if isinstance(value, dict):
        return {_address(a): tuple(map(_factor, layer)) for a, layer in value.items()}
    return _factor(value)


def _factor(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not LEAST_FACTOR <= value <= 1:
        raise ValueError(f"a factor of {LEAST_FACTOR:g} .. 1 is wanted, not {str(value)[:60]}")
    return float(value)


def _address(text: str) -> str:
    if printable(text) != text or len(text) > 1000:
        raise ValueError(f"address {printable(text[:60])!r}")
    return text


_MOST = 1 << 24
"""Neurons of a layer."""


def _indices(value: object) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"a list of whole numbers is wanted, not {str(value)[:60]}")
    return tuple(integer(index, "neuron", 0, _MOST - 1) for index in value)


def parse_neurons(text: str) -> dict[str, tuple[int, ...]]:
    """Neurons from lines ``address index``, commas allowed: ``mid-vit-block0-cross-v 12, 40``."""
    neurons: dict[str, tuple[int, ...]] = {}
    for line in lines_of(text):
        address, *indices = line.replace(",", " ").split() or [""]
        if not indices or not all(i.isdecimal() and len(i) < 10 for i in indices):
            raise refuse("neurons", line, "a layer name and whole numbers", "e.g. mid-vit-block0-cross-v 12")
        neurons[address] = (*neurons.get(address, ()), *map(int, indices))
    return neurons


def import_csv(path: str | Path, addresses: list[str], column: str = "refined") -> list[tuple[str, NeuronSet]]:
    """The authors' result file: one (prompt, set) for each row; seven lists of indices by layer, separator ``;``.

    Args:
        column: ``refined`` or ``initial``, a word of the header of the column to read.
    """
    with named(path, "neuron CSV", "the authors' result file", "see the official repo"):
        return _read_csv(path, addresses, column)


def _read_csv(path: str | Path, addresses: list[str], column: str) -> list[tuple[str, NeuronSet]]:
    sets, rows = [], rows_of(read_text(path), ";")
    head = [h.strip().lower() for h in rows[0]] if rows else []
    at = next((i for i, h in enumerate(head) if column in h and "neuron" in h), None)
    if at is None:
        raise refuse("neuron CSV", head, f"a column with '{column}' and 'neuron' in its name", "see the official repo")
    for row in rows[1:]:
        lists = parse_json(row[at])
        if len(lists) != len(addresses):
            raise refuse("neuron CSV", f"{len(lists)} layers", f"{len(addresses)} layers", "use SD1.x, down+mid")
        neurons = {a: _indices(n) for a, n in zip(addresses, lists, strict=True)}
        sets.append((row[0], NeuronSet(neurons, "", {"source": Path(path).name})))
    return sets


def export_lists(neurons: Mapping[str, Iterable[int]], addresses: list[str]) -> str:
    """The same neurons as the official one-line form, ``[[221], [], ...]``."""
    return str([list(neurons.get(a, ())) for a in addresses])
