"""DatasetDDPM's label-scarce head, used by GDF for Horse-21: majority vote of ten small MLPs.

:func:`vitrine.engine.activations.segmentation.fit_probe` is far cheaper and sufficient for masks in a graph. This head
is for scores comparable with GDF's Table 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import refuse
from ..runtime.progress import Progress, silent
from ..settings.config import Config
from .segmentation import IGNORE

_PATIENCE = 50
_WARM_EPOCHS = 3
"""Losses are monitored from this epoch on (counted from 0), as in the published trainer."""


@dataclass(frozen=True)
class VoteSettings(Config):
    """Training of the voters; the defaults are the paper's.

    Attributes:
        voters: number of networks, with seeds ``seed``, ``seed`` + 1 ...
        epochs: at most; a voter stops when its loss has had no new minimum for 50 steps, counted from the
            fifth epoch on.
        batch: pixels per step.
        rate: Adam's learning rate.
        seed: of the first voter.
    """

    voters: int = 10
    epochs: int = 100
    batch: int = 64
    rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.voters, self.epochs) < 1 or self.batch < 2 or self.rate <= 0:
            raise refuse("vote settings", self, "voters, epochs >= 1; batch >= 2; rate > 0", "use the defaults")


def voter(width: int, classes: int) -> nn.Sequential:
    """One voter: width-128-32-classes, ReLU then BatchNorm; 256-128 inside from 30 classes on; weights N(0, 0.02)."""
    first, second = (128, 32) if classes < 30 else (256, 128)
    net = nn.Sequential(
        nn.Linear(width, first), nn.ReLU(), nn.BatchNorm1d(first),
        nn.Linear(first, second), nn.ReLU(), nn.BatchNorm1d(second),
        nn.Linear(second, classes),
    )  # fmt: skip
    for layer in net:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, 0.0, 0.02)
            nn.init.zeros_(layer.bias)
    return net


def fit_voters(
    cells: torch.Tensor,
    labels: torch.Tensor,
    classes: int,
    settings: VoteSettings | None = None,
    progress: Progress = silent,
) -> list[nn.Sequential]:
    """Trains the voters, each from its own seed.

    Args:
        cells: (N, C) features of labelled pixels.
        labels: (N,) their classes, 255 if unknown.
    """
    settings = settings or VoteSettings()
    known = labels != IGNORE
    if cells.ndim != 2 or labels.shape != cells.shape[:1] or int(known.sum()) < 2:
        shapes = (tuple(cells.shape), tuple(labels.shape))
        raise refuse("cells, labels", shapes, "(N, C) and (N,) with two known labels", "one label per pixel")
    if int(labels[known].max()) >= classes or int(labels.min()) < 0:
        raise refuse("labels", labels[known].unique().tolist(), f"0 .. {classes - 1}, or {IGNORE}", "raise classes")
    voters = []
    for n in range(settings.voters):
        voters.append(_train(cells[known].float(), labels[known].long(), classes, settings, settings.seed + n))
        progress(n + 1, settings.voters, None)
    return voters


def _train(cells: torch.Tensor, labels: torch.Tensor, classes: int, settings: VoteSettings, seed: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(seed)
        net = voter(cells.shape[1], classes).to(cells.device)
        optimizer = torch.optim.Adam(net.parameters(), settings.rate)
        cells, labels, best, waited = cells.clone(), labels.clone(), float("inf"), 0
        steps = max(1, len(cells) // settings.batch)  # the incomplete last batch of an epoch is dropped
        for epoch in range(settings.epochs):
            for picked in torch.randperm(len(cells)).split(settings.batch)[:steps]:
                value = _step(net, optimizer, cells[picked], labels[picked])
                if epoch <= _WARM_EPOCHS:
                    continue
                best, waited = (value, 0) if value < best else (best, waited + 1)
                if waited > _PATIENCE:
                    return net.eval().requires_grad_(False)
    return net.eval().requires_grad_(False)


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, cells: torch.Tensor, labels: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(net(cells), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def vote(voters: Sequence[nn.Module], cells: torch.Tensor) -> torch.Tensor:
    """(N,) the class that most voters choose for each of (N, C) cells; the smaller index if votes are tied."""
    ballots = torch.stack([v(cells.float()).argmax(1) for v in voters], dim=-1)
    return ballots.mode(dim=-1).values


def published_iou(predicted: torch.Tensor, true: torch.Tensor, classes: int) -> float:
    """mIoU as in the published label-scarce scores, over (B, H, W) class indices.

    It is lower than :func:`.segmentation.mean_iou` in two ways: predictions on unknown pixels count as wrong, and
    a class that is neither present nor predicted counts as 0.
    """
    scores = []
    for k in range(classes):
        ours, truth = predicted == k, true == k
        scores.append(float((ours & truth).sum()) / (float((ours | truth).sum()) + 1e-8))
    return sum(scores) / classes
