"""Mean and standard deviation of every neuron over ordinary captions, from which its z-score is computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import refuse
from ..io.files import check_tensors, named
from ..io.number_checks import integer
from ..io.pt_files import read_pt
from ..jobs.run import Run
from ..runtime.progress import Progress, silent
from ..settings.one_line import one_line
from ..tracing.fingerprint import active_fingerprint_of, same_weights, short
from .sites import value_sites

OFFICIAL = "SD1.4"
"""In place of a fingerprint in the authors' published statistics, which say of their model no more than this."""
OFFICIAL_SHAPES = tuple((width, 768) for width in (320, 320, 640, 640, 1280, 1280, 1280))
"""(width, text width) of SD1.x's value projections, down and mid."""


@one_line
@dataclass(frozen=True)
class NeuronStatistics:
    """Per site: mean and unbiased standard deviation of a_i over captions.

    Attributes:
        means, stds: address -> (width,) float32.
        count: number of captions; below 500 the deviations are rough (the authors took 50,000).
        fingerprint: of the model they were measured on, adapters included; empty if unknown.
    """

    means: dict[str, torch.Tensor]
    stds: dict[str, torch.Tensor]
    count: int
    fingerprint: str = ""

    def z(self, address: str, activation: torch.Tensor) -> torch.Tensor:
        """|z| of (B, width) activations. The deviation of a neuron that never varies counts as 1e-12."""
        if address not in self.means:
            raise refuse("statistics", address, sorted(self.means), "gather them with the same scope")
        if self.means[address].shape != activation.shape[-1:]:
            shown = (address, tuple(self.means[address].shape))
            raise refuse("statistics", shown, f"width {activation.shape[-1]}", "they belong to another model")
        mean, std = (v[address].to(activation) for v in (self.means, self.stds))
        # NeMo, Eq. 3: z = (a - mu) / sigma
        return (activation - mean).abs() / std.clamp_min(1e-12)

    def check(self, backbone: nn.Module, fingerprint: str = "") -> None:
        """Refuses statistics that cannot belong to this model; both libraries ask here before a search.

        The authors' published statistics have no fingerprint: they pass for any model of SD1.x's shape.

        Args:
            fingerprint: of the model, where its modules carry patches at the moment.
        """
        if self.fingerprint == "" or (self.fingerprint == OFFICIAL and _is_sd1(backbone)):
            return
        fingerprint = fingerprint or active_fingerprint_of(backbone)
        if same_weights(self.fingerprint, fingerprint):
            return
        shown, accepted = f"model {short(self.fingerprint)}", f"this model, {short(fingerprint)}"
        raise refuse(
            "statistics", shown, accepted, "gather them on this model, adapters and all (Calibrate Copy Detection)"
        )


def _is_sd1(backbone: nn.Module) -> bool:
    projections: list[Any] = [backbone.get_submodule(site.path) for site in value_sites(backbone)]
    return tuple(tuple(projection.weight.shape) for projection in projections) == OFFICIAL_SHAPES


_LARGEST = 1e12


def check_pairs(means: dict[str, torch.Tensor], stds: dict[str, torch.Tensor]) -> None:
    """Refuses means and deviations that are not pairs of finite vectors of one width."""
    check_tensors(means)
    check_tensors(stds)
    if not means or set(means) != set(stds):
        raise ValueError(f"{len(means)} means and {len(stds)} deviations")
    for address, mean in means.items():
        if mean.ndim != 1 or not len(mean) or mean.shape != stds[address].shape:
            raise ValueError(f"{address}: mean {tuple(mean.shape)}, deviation {tuple(stds[address].shape)}")
        if bool((stds[address] < 0).any()):
            raise ValueError(f"{address}: a deviation below 0")
        if float(mean.abs().max()) > _LARGEST or float(stds[address].max()) > _LARGEST:
            raise ValueError(f"{address}: numbers beyond {_LARGEST:g}, which no activation has")


class RunningStatistics:
    """Streaming mean and sum of squared deviations in float64, a batch or another such sum at a time."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self.addresses, self.count = list(addresses), 0
        self._mean: dict[str, torch.Tensor] = {}
        self._squares: dict[str, torch.Tensor] = {}

    def add(self, activations: list[torch.Tensor]) -> None:
        """Takes in B captions: one (B, width) tensor for each address."""
        widths = [values.shape[1] for values in activations]
        joined = torch.cat([values.float() for values in activations], 1).cpu()  # one wait for the device
        batch = RunningStatistics(self.addresses)
        batch.count = len(joined)
        for address, values in zip(self.addresses, joined.double().split(widths, 1), strict=True):
            mean = values.mean(0)
            batch._mean[address], batch._squares[address] = mean, (values - mean).square().sum(0)
        self.join([batch])

    def join(self, parts: Sequence[RunningStatistics]) -> None:
        """Takes in what others have gathered of further captions, in their order."""
        for part in parts:
            if not part.count:
                continue
            if not self.count:
                self.count, self._mean, self._squares = part.count, dict(part._mean), dict(part._squares)
                continue
            total = self.count + part.count
            for address in self.addresses:
                # Chan et al. 1983: S = S_a + S_b + (mean_b - mean_a)^2 n_a n_b / n
                shift = part._mean[address] - self._mean[address]
                between = shift.square() * (self.count * part.count / total)
                self._squares[address] = self._squares[address] + part._squares[address] + between
                self._mean[address] = self._mean[address] + shift * (part.count / total)
            self.count = total

    def keep(self, run: Run) -> None:
        """Writes the sums so far, whole or not at all."""
        run.save({"mean": self._mean, "squares": self._squares}, facts={"count": self.count})

    def resume(self, run: Run) -> None:
        """Takes up the sums that :meth:`keep` wrote; nothing happens where there are none."""
        state = run.load()
        if state is not None:
            self.count = integer(state.facts["count"], "captions")
            parts = (state.tensors[part] for part in ("mean", "squares"))
            self._mean, self._squares = ({a: part[a] for a in self.addresses} for part in parts)

    def finish(self, fingerprint: str = "") -> NeuronStatistics:
        """The statistics so far, with unbiased standard deviations."""
        if self.count < 2:
            raise refuse("captions", self.count, "2 at least, 500 or more to be useful", "give a longer prompt list")
        means = {a: v.float() for a, v in self._mean.items()}
        stds = {a: (v / (self.count - 1)).sqrt().float() for a, v in self._squares.items()}
        return NeuronStatistics(means, stds, self.count, fingerprint)


def gather(
    batches: Iterable[list[torch.Tensor]],
    addresses: Iterable[str],
    fingerprint: str = "",
    total: int = 0,
    progress: Progress = silent,
) -> NeuronStatistics:
    """Statistics from batches of activations, as :func:`vitrine.engine.nemo.value_activations` gives them.

    Args:
        total: number of captions, for ``progress``; 0 if unknown.
    """
    running = RunningStatistics(addresses)
    for activations in batches:
        running.add(activations)
        progress(running.count, total or running.count, None)
    return running.finish(fingerprint)


def published_statistics(path: str | Path, backbone: nn.Module) -> NeuronStatistics:
    """The authors' statistics of SD 1.4, from their ``.pt`` file, for a network of SD 1.x's shape."""
    statistics = import_official(path, [site.address for site in value_sites(backbone)])
    statistics.check(backbone)
    return statistics


def import_official(path: str | Path, addresses: list[str]) -> NeuronStatistics:
    """The authors' .pt file: a tuple (list of means, list of stds), read with ``weights_only=True``."""
    with named(path, "official statistics", "a .pt with two lists of tensors", "download it again"):
        return _read_official(path, addresses)


def _read_official(path: str | Path, addresses: list[str]) -> NeuronStatistics:
    means, stds = read_pt(path)
    if len(means) != len(addresses) or len(stds) != len(addresses):
        raise refuse("official statistics", f"{len(means)} layers", f"{len(addresses)} layers", "use SD1.x, down+mid")
    means, stds = ({a: v.float() for a, v in zip(addresses, table, strict=True)} for table in (means, stds))
    check_pairs(means, stds)
    return NeuronStatistics(means, stds, 50_000, OFFICIAL)
