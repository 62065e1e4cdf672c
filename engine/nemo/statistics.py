"""Mean and standard deviation of every neuron over ordinary captions: what its z-score is measured against."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import refuse
from ..files import check_tensors, named, read_artefact, save_artefact
from ..progress import Progress, silent

KIND, VERSION = "vitrine-nemo-statistics", 1
FEW = 500
"""Below this many captions the standard deviations are rough; the authors took 50,000."""


@dataclass(frozen=True)
class NeuronStatistics:
    """Per site: mean and unbiased standard deviation of a_i over captions.

    Attributes:
        means, stds: address -> (width,) float32.
        count: number of captions.
        fingerprint: of the model they were measured on.
    """

    means: dict[str, torch.Tensor]
    stds: dict[str, torch.Tensor]
    count: int
    fingerprint: str = ""

    def z(self, address: str, activation: torch.Tensor) -> torch.Tensor:
        """|a - mu| / sigma of (B, width) activations (NeMo, Eq. 3). A neuron that never varies scores by 1e-12.

        Raises:
            VitrineError: no statistics for this address, or of another width.
        """
        if address not in self.means:
            raise refuse("statistics", address, sorted(self.means), "gather them with the same scope")
        if self.means[address].shape != activation.shape[-1:]:
            given = (address, tuple(self.means[address].shape))
            raise refuse("statistics", given, f"width {activation.shape[-1]}", "they belong to another model")
        mean, std = (v[address].to(activation) for v in (self.means, self.stds))
        return (activation - mean).abs() / std.clamp_min(1e-12)

    def save(self, path: str | Path) -> Path:
        """One safetensors file, whole or not at all."""
        tensors = {f"mean/{a}": v for a, v in self.means.items()} | {f"std/{a}": v for a, v in self.stds.items()}
        return save_artefact(path, tensors, KIND, VERSION, {"count": self.count, "fingerprint": self.fingerprint})

    @classmethod
    def load(cls, path: str | Path) -> NeuronStatistics:
        """Read such a file.

        Raises:
            VitrineError: missing, not safetensors, or of another kind.
        """
        with named(path, "statistics file", "a file NEMO Statistics wrote", "gather statistics anew"):
            tensors, header = read_artefact(path, KIND, VERSION)
            means = {k[5:]: v for k, v in tensors.items() if k.startswith("mean/")}
            stds = {k[4:]: v for k, v in tensors.items() if k.startswith("std/")}
            _check_pairs(means, stds)
            return cls(means, stds, int(header["count"]), str(header["fingerprint"]))


def _check_pairs(means: dict[str, torch.Tensor], stds: dict[str, torch.Tensor]) -> None:
    """Each mean has its deviation, both finite rows of one width."""
    check_tensors(means)
    check_tensors(stds)
    if not means or set(means) != set(stds):
        raise ValueError(f"{len(means)} means and {len(stds)} deviations")
    for address, mean in means.items():
        if mean.ndim != 1 or not len(mean) or mean.shape != stds[address].shape:
            raise ValueError(f"{address}: mean {tuple(mean.shape)}, deviation {tuple(stds[address].shape)}")


class RunningStatistics:
    """Welford's streaming mean and sum of squares in float64, a batch at a time (Chan et al. 1983)."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self.addresses, self.count = list(addresses), 0
        self._mean: dict[str, torch.Tensor] = {}
        self._squares: dict[str, torch.Tensor] = {}

    def add(self, activations: list[torch.Tensor]) -> None:
        """One (B, width) tensor for each address."""
        batch = len(activations[0])
        total = self.count + batch
        for address, values in zip(self.addresses, activations, strict=True):
            values = values.double().cpu()
            mean = values.mean(0)
            squares = (values - mean).square().sum(0)
            old = self._mean.setdefault(address, torch.zeros_like(mean))
            shift = mean - old
            self._squares[address] = (
                self._squares.get(address, 0) + squares + shift.square() * (self.count * batch / total)
            )
            self._mean[address] = old + shift * (batch / total)
        self.count = total

    def finish(self, fingerprint: str = "") -> NeuronStatistics:
        """Unbiased standard deviations.

        Raises:
            VitrineError: fewer than two captions.
        """
        if self.count < 2:
            raise refuse("captions", self.count, "2 at least, 500 or more to be useful", "give a longer prompt list")
        means = {a: v.float() for a, v in self._mean.items()}
        stds = {a: (v / (self.count - 1)).sqrt().float() for a, v in self._squares.items()}
        return NeuronStatistics(means, stds, self.count, fingerprint)


def gather(
    batches: Iterable[list[torch.Tensor]], addresses: Iterable[str], fingerprint: str = "", total: int = 0,
    progress: Progress = silent,
) -> NeuronStatistics:  # fmt: skip
    """Statistics from batches of activations as :func:`vitrine.engine.nemo.value_activations` gives them."""
    running = RunningStatistics(addresses)
    for activations in batches:
        running.add(activations)
        progress(running.count, total or running.count, None)
    return running.finish(fingerprint)


def import_official(path: str | Path, addresses: list[str]) -> NeuronStatistics:
    """The authors' .pt file: a tuple (list of means, list of stds), read with ``weights_only=True``.

    Raises:
        VitrineError: other content, or another number of layers than ``addresses``.
    """
    with named(path, "official statistics", "a .pt with two lists of tensors", "download it again"):
        return _read_official(path, addresses)


def _read_official(path: str | Path, addresses: list[str]) -> NeuronStatistics:
    means, stds = torch.load(path, map_location="cpu", weights_only=True)
    if len(means) != len(addresses) or len(stds) != len(addresses):
        raise refuse("official statistics", f"{len(means)} layers", f"{len(addresses)} layers", "use SD1.x, down+mid")
    pairs = list(zip(addresses, means, stds, strict=True))
    both = {a: m.float() for a, m, _ in pairs}, {a: s.float() for a, _, s in pairs}
    _check_pairs(*both)
    return NeuronStatistics(*both, 50_000, "SD1.4")
