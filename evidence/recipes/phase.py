"""One phase of the portraits training: a resumable optimisation that any number of processes share."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...engine.jobs.run import Run, state_facts
from ...engine.jobs.training import MovingAverage, learning_rate, mean_gradients, set_rate
from ...engine.runtime.processes import workers_of
from ...engine.runtime.progress import Progress
from ...engine.settings.config import Config
from .settings import FlowTrainConfig, TrainConfig

if TYPE_CHECKING:
    from accelerate import Accelerator


class OutOfTime(Exception):
    """The time allowed is used up; the state was saved, and the same command resumes from it."""


class Phase:
    """Module, AdamW, cosine schedule with warm-up, moving average, and their state on disk."""

    def __init__(
        self,
        name: str,
        config: TrainConfig | FlowTrainConfig,
        module: nn.Module,
        steps: int,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        inputs: dict[str, Any] | None = None,
    ) -> None:
        self.name, self.config, self.module, self.steps, self.lr = name, config, module, steps, lr
        self.folder = Path(config.out) / name
        self.optimizer = torch.optim.AdamW(module.parameters(), lr, betas=betas, weight_decay=0.01, fused=True)
        self.average = MovingAverage(module.state_dict(), torch.float32)
        self.step, self.seconds = 0, 0.0
        self.losses: list[tuple[int, float]] = []
        settings = {"settings": essential(config) | essential(config.advanced) | {"lr": lr, "betas": list(betas)}}
        made_of = {"network": module, **settings, **(inputs or {})}
        self._run = Run(self.folder, f"training of the {name}", made_of)
        self._resume()

    @property
    def done(self) -> bool:
        """True once all steps are taken."""
        return self.step >= self.steps

    def rate(self, step: int) -> float:
        """Learning rate of a step: 2 % linear warm-up, then a cosine to zero."""
        return learning_rate(self.lr, "cosine", step, self.steps, warmup=max(1, int(0.02 * self.steps)))

    def generator(self, number: int, device: torch.device) -> torch.Generator:
        """Random numbers of the current step; ``number`` tells the phases apart."""
        return torch.Generator(device).manual_seed(self.config.seed * 1_000_003 + number * 100_000_007 + self.step)

    def update(self, loss: torch.Tensor, accelerator: Accelerator) -> None:
        """One optimiser step and one step of the moving average."""
        set_rate(self.optimizer, self.rate(self.step))
        accelerator.backward(loss)
        if accelerator.num_processes > 1:  # each saw its own rows of the batch
            mean_gradients(self.module.parameters(), partial(accelerator.reduce, reduction="mean"))
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        decay = min(self.config.advanced.ema_decay, (self.step + 1) / (self.step + 10))
        self.average.update(self.module.state_dict(), decay)
        self.step += 1

    def use_average(self) -> None:
        """Put the moving average into the module."""
        weights = self.module.state_dict()
        self.module.load_state_dict({k: v.to(weights[k].dtype) for k, v in self.average.values.items()})

    def save(self) -> None:
        """Write weights, average, optimiser and counters, whole or not at all."""
        tensors = {"weight": self.module.state_dict(), "average": self.average.values}
        facts = {"step": self.step, "seconds": self.seconds, "losses": self.losses}
        self._run.save(tensors, {"adamw": self.optimizer}, facts)

    def _resume(self) -> None:
        device = str(next(self.module.parameters()).device)
        state = self._run.load({"adamw": self.optimizer}, device)
        if state is None:
            return
        self.module.load_state_dict(state.tensors["weight"])
        self.average.values = {k: v.to(self.average.values[k].dtype) for k, v in state.tensors["average"].items()}
        self.step, self.seconds = state.facts["step"], state.facts["seconds"]
        self.losses = [(step, loss) for step, loss in state.facts["losses"]]

    def run(
        self, accelerator: Accelerator, loss_of_step: Callable[[], torch.Tensor], deadline: float, progress: Progress
    ) -> None:
        """Step until done. Saves every few minutes, at the end, and when stopped by the deadline or by the user.

        Raises:
            OutOfTime: If ``time.monotonic()`` passes ``deadline`` before the last step.
        """
        began = saved = time.monotonic()
        before = self.seconds
        try:
            while not self.done:
                with accelerator.autocast():
                    loss = loss_of_step()
                self.update(loss, accelerator)
                if self.step % 100 == 0 or self.done:
                    self.losses.append((self.step, round(float(loss.detach()), 6)))
                self.seconds = before + time.monotonic() - began
                progress(self.step, self.steps, None)
                if _any(time.monotonic() > deadline, accelerator) and not self.done:
                    raise OutOfTime(f"{self.name}: stopped at step {self.step} of {self.steps}")
                if accelerator.is_main_process and time.monotonic() - saved > self.config.advanced.save_every_seconds:
                    self.save()
                    saved = time.monotonic()
        finally:
            if accelerator.is_main_process:
                self.save()


_NOT_IN_NUMBERS = ("out", "max_seconds", "device", "compile", "card_samples", "advanced", "save_every_seconds")


def essential(config: Config) -> dict[str, Any]:
    """The settings that numbers depend on. A phase may be given other steps: those that are done stay."""
    return {k: v for k, v in config.to_dict().items() if k not in _NOT_IN_NUMBERS and not k.endswith("steps")}


def run_of(job: str, config: TrainConfig | FlowTrainConfig, accelerator: Accelerator) -> Run:
    """The owner of a training's folder; what phases and pictures were made of is written next to each of them."""
    return Run(config.out, job, {"settings": essential(config)}, (), workers_of(accelerator))


def record_of(folder: Path) -> dict[str, int | float | None]:
    """Steps, seconds and last loss of a phase, for the model's record, from the state in its folder."""
    facts = state_facts(folder)
    last = [loss for _, loss in facts["losses"][-5:]]
    mean = round(sum(last) / len(last), 5) if last else None
    return {"steps": facts["step"], "seconds": round(facts["seconds"], 1), "last_loss": mean}


def own_rows(accelerator: Accelerator, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """This process's rows. Random numbers are drawn for the whole batch first: the sum does not depend on the split."""
    return [t[accelerator.process_index :: accelerator.num_processes] for t in tensors]


def _any(flag: bool, accelerator: Accelerator) -> bool:
    """True if it is true in any process, so that all stop at the same step."""
    if accelerator.num_processes == 1:
        return flag
    return bool(accelerator.reduce(torch.tensor(float(flag), device=accelerator.device), "sum") > 0)
