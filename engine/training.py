"""What resumable trainings share: the moving average of weights, the learning rate, and the state on disk.

A rate that is a function of the step number, and random numbers that are drawn from the step number or saved with the
state, make a run that was stopped and resumed equal, bit for bit, to one that was not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .errors import refuse
from .files import named, parse_table, read_safetensors, save_safetensors
from .progress import Progress

STATE = "state.safetensors"
Tensors = Mapping[str, torch.Tensor]


class MovingAverage:
    """Exponential moving average of named tensors, by ``torch.optim.swa_utils``.

    Attributes:
        values: name -> average, in the tensors' own dtype unless ``dtype`` says otherwise.
    """

    def __init__(self, tensors: Tensors, dtype: torch.dtype | None = None) -> None:
        self.values = {k: v.detach().clone().to(dtype or v.dtype) for k, v in tensors.items()}

    @torch.no_grad()
    def update(self, tensors: Tensors, decay: float) -> None:
        """average <- decay average + (1 - decay) tensor, for every floating-point tensor."""
        from torch.optim.swa_utils import get_ema_multi_avg_fn

        names = [k for k, v in tensors.items() if v.is_floating_point()]
        get_ema_multi_avg_fn(decay)([self.values[k] for k in names], [tensors[k].detach() for k in names], None)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate of the next step, in every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def finite(gradients: Iterable[torch.Tensor | None]) -> bool:
    """True if every gradient present is finite; the host waits for the device once."""
    sums = [g.detach().sum(dtype=torch.promote_types(g.dtype, torch.float32)) for g in gradients if g is not None]
    return not sums or bool(torch.isfinite(torch.stack(sums)).all())  # NaN and infinity outlast any addition


def mean_gradients(
    parameters: Iterable[torch.Tensor], reduce: Callable[[torch.Tensor], torch.Tensor], pieces: int = 2**25
) -> None:
    """Exchange the gradients of many parameters in a few calls: a LoRA has hundreds of small ones.

    A parameter without a gradient takes part with zeros.

    Args:
        reduce: the mean of a vector over all processes.
        pieces: numbers exchanged at once, at most (unless a single parameter has more): what this takes in memory.
    """
    batch: list[torch.Tensor] = []

    def exchange() -> None:
        flat = torch.cat([p.grad.flatten() for p in batch])  # type: ignore[union-attr]
        for p, mean in zip(batch, reduce(flat).split([p.numel() for p in batch]), strict=True):
            p.grad = mean.view_as(p)
        batch.clear()

    for p in parameters:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        other = bool(batch) and batch[0].grad.dtype != p.grad.dtype  # type: ignore[union-attr]
        if batch and (other or sum(q.numel() for q in batch) + p.numel() > pieces):
            exchange()
        batch.append(p)
    if batch:
        exchange()


class RunState(NamedTuple):
    """A saved run: groups of named tensors (``weight``, ``average`` ...) and facts that JSON can hold."""

    tensors: dict[str, dict[str, torch.Tensor]]
    facts: dict[str, Any]


def save_state(
    folder: str | Path,
    tensors: Mapping[str, Tensors],
    optimizers: Mapping[str, torch.optim.Optimizer],
    facts: Mapping[str, Any],
) -> Path:
    """Writes the state of a run to ``folder/state.safetensors``, whole or not at all.

    Args:
        tensors: group -> name -> tensor; a group's name has no slash.
        optimizers: by name.
        facts: step counters, settings: anything JSON can hold.
    """
    flat = {f"{group}/{name}": value for group, named_ in tensors.items() for name, value in named_.items()}
    for name, optimizer in optimizers.items():
        for number, slots in optimizer.state_dict()["state"].items():
            flat |= {f"optimizer/{name}/{number}/{key}": torch.as_tensor(value) for key, value in slots.items()}
    return save_safetensors(Path(folder) / STATE, flat, {"facts": json.dumps(facts)})


def load_state(
    folder: str | Path, optimizers: Mapping[str, torch.optim.Optimizer], identity: Any = None, device: str = "cpu"
) -> RunState | None:
    """Reads what :func:`save_state` wrote and restores each optimiser's slots; None if nothing was saved.

    Args:
        identity: the settings that make two runs the same, compared with ``facts["identity"]``; None accepts any.

    Raises:
        VitrineError: If the file is damaged, or the run had other settings.
    """
    path = Path(folder) / STATE
    if not path.is_file():
        return None
    with named(path, "training state", "a whole state.safetensors", "delete it to begin anew"):
        flat, metadata = read_safetensors(path, device)
        facts = parse_table(metadata["facts"])
    if identity is not None and facts.get("identity") != json.loads(json.dumps(identity)):
        raise refuse("folder", path.parent.name, "a run with these settings", "choose another folder")
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    slots: dict[str, dict[int, dict[str, torch.Tensor]]] = {name: {} for name in optimizers}
    for key, value in flat.items():
        group, _, name = key.partition("/")
        if group != "optimizer":
            tensors.setdefault(group, {})[name] = value
            continue
        optimizer_name, number, slot = name.rsplit("/", 2)
        slots[optimizer_name].setdefault(int(number), {})[slot] = value
    for name, optimizer in optimizers.items():
        optimizer.load_state_dict(optimizer.state_dict() | {"state": slots[name]})
    return RunState(tensors, facts)


def state_facts(folder: str | Path) -> dict[str, Any]:
    """The facts of a saved run, without its tensors."""
    from safetensors import safe_open

    with safe_open(str(Path(folder) / STATE), "pt") as file:
        return parse_table(file.metadata()["facts"])


def run_steps(
    step: Callable[[], Any], done: Callable[[], int], until: int, total: int,
    *, save: Callable[[], None], save_every: int, progress: Progress,
    preview: Callable[[], torch.Tensor | None] = lambda: None,
) -> None:  # fmt: skip
    """Steps until ``done() >= until``, saving every ``save_every`` steps, at the end, and when interrupted."""
    while done() < until:
        step()
        if done() % save_every == 0:
            save()
        try:
            progress(done(), total, preview())
        except BaseException:  # interrupted between two steps, where the state is consistent
            save()
            raise
    save()
