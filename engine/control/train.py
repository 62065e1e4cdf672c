"""Train control embeddings, alone on a frozen network or with it (Berrada et al. 2024, 2.1 and appendix C).

gamma stands inside the loss: it is part of the model, not a trick of sampling.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import refuse
from ..progress import Progress, silent
from ..schedule import NoiseSchedule, append_dims
from ..training import MovingAverage, Tensors, finite, load_state, run_steps, save_state
from .embedder import ControlEmbedder
from .files import ControlMetadata, save_control
from .gamma import GammaConfig
from .inject import Network
from .records import AugmentConfig, ControlRecord, augment

PREDICTIONS = ("eps", "v", "x0", "flow")


@dataclass(frozen=True)
class ControlTrainConfig:
    """Settings of a run. The paper does not print its dropout and averaging rates; these are ours.

    Attributes:
        steps, batch: updates, and rows of each.
        lr, betas: of Adam. ema: rate of the exported average.
        drop_control, drop_semantics: probability that a row is trained without, drawn independently.
        prediction: what the network gives: eps (the paper), v, x0, flow.
        gamma, augment: the curve, and how pictures are changed.
        save_every: steps between saves.

    Raises:
        VitrineError: numbers outside their range, an unknown prediction.
    """

    steps: int = 1000
    batch: int = 16
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    ema: float = 0.999
    drop_control: float = 0.1
    drop_semantics: float = 0.1
    prediction: str = "eps"
    gamma: GammaConfig = field(default_factory=GammaConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    seed: int = 0
    save_every: int = 500

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "save_every"):
            if getattr(self, name) < 1:
                raise refuse(name, getattr(self, name), "1 or more", "use a whole number")
        for name in ("drop_control", "drop_semantics"):
            if not 0 <= getattr(self, name) <= 1:
                raise refuse(name, getattr(self, name), "0 to 1", "0.1 is the default")
        if not 0 <= self.ema < 1 or not self.lr > 0 or self.prediction not in PREDICTIONS:
            given = (self.ema, self.lr, self.prediction)
            raise refuse("ema, lr, prediction", given, f"0 <= ema < 1, lr > 0, {PREDICTIONS}", "see the defaults")

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        parts = {"gamma": self.gamma.to_dict(), "augment": self.augment.to_dict(), "betas": list(self.betas)}
        return asdict(self) | parts

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ControlTrainConfig:
        """The inverse of :meth:`to_dict`.

        Raises:
            VitrineError: an unknown setting.
        """
        unknown = set(values) - set(cls.__dataclass_fields__)
        if unknown:
            raise refuse("settings", sorted(unknown), sorted(cls.__dataclass_fields__), "remove them")
        made: dict[str, Any] = dict(values)
        made |= {k: c.from_dict(made[k]) for k, c in (("gamma", GammaConfig), ("augment", AugmentConfig)) if k in made}
        return cls(**made | ({"betas": tuple(made["betas"])} if "betas" in made else {}))


class Batch(NamedTuple):
    """Rows of one update: x0 and noise (B, C, H, W), t (B,), semantics (B, ...), values (B, F), drop (B,) bool."""

    x0: torch.Tensor
    noise: torch.Tensor
    t: torch.Tensor
    semantics: torch.Tensor
    values: torch.Tensor
    drop: torch.Tensor


class ControlTrainer:
    """One run, resumable to the bit from ``folder/state.safetensors``.

    Three modes by what ``parameters`` holds: nothing (embedder alone on a frozen network; make it with ``zero_init``),
    the LoRA's, or all of the network's.

    Args:
        embedder: made from the same seed in every process.
        network: (x_t, t, semantics, c_emb) -> prediction, for diffusers backbones as :func:`inject.injected` makes it.
        records: read by number; an iterable is listed once.
        null_semantics: one record's semantics for "nothing", put into dropped rows.
        schedule: of the training, relabelled for another resolution where wanted (Eq. 3).
        parameters: name -> parameter of the network to train beside the embedder.
        encode: (B, C, size, size) pictures -> x0, a frozen autoencoder for latent models.
        metadata: what the export says beside the settings of this run.
    """

    def __init__(
        self, network: Network, embedder: ControlEmbedder, records: Iterable[ControlRecord],
        null_semantics: torch.Tensor, schedule: NoiseSchedule, config: ControlTrainConfig, folder: str | Path,
        parameters: Mapping[str, nn.Parameter] | None = None,
        encode: Callable[[torch.Tensor], torch.Tensor] | None = None, metadata: ControlMetadata | None = None,
    ) -> None:  # fmt: skip
        from accelerate import Accelerator

        if (config.prediction == "flow") != (schedule.kind == "flow"):
            raise refuse("prediction, schedule", (config.prediction, schedule.kind), "flow with flow", "match them")
        self.accelerator = Accelerator()
        self.device = self.accelerator.device
        self.network, self.embedder, self.schedule = network, embedder.to(self.device), schedule
        indexed = hasattr(records, "__getitem__") and hasattr(records, "__len__")
        self.records: Sequence[ControlRecord] = records if indexed else list(records)  # type: ignore[assignment]
        self.null, self.config, self.folder = null_semantics, config, Path(folder)
        self.encode = encode or (lambda images: images)
        self.metadata = metadata or ControlMetadata("", embedder.dim)
        self.beside = dict(parameters or {})
        mine = {f"ctrl.{k}": p for k, p in self.embedder.named_parameters()}
        self.parameters = mine | {_prefixed(k): p for k, p in self.beside.items()}
        self.adam = torch.optim.Adam(self.parameters.values(), lr=config.lr, betas=config.betas)
        self.average = MovingAverage(self.parameters)
        self.done, self.skipped = 0, 0
        self._resume()

    def run(self, progress: Progress = silent, until: int | None = None) -> Path:
        """Train to the end (or to ``until``) and export; saved every ``save_every`` steps and when stopped."""
        total = self.config.steps
        run_steps(
            self.step, lambda: self.done, min(total, until or total), total,
            save=self.save, save_every=self.config.save_every, progress=progress,
        )  # fmt: skip
        self.export("control_raw", {k: p.detach() for k, p in self.parameters.items()})
        return self.export("control", self.average.values)

    def step(self) -> float:
        """One update; the loss."""
        seed = self._seed(self.done)
        # A network's own dropout draws from the global state; seeding it here makes a resumed run the same run.
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            loss = self.loss(self.draw(self.done))
        self._update(loss)
        self.average.update(self.parameters, self.config.ema)
        self.done += 1
        return float(loss.detach())

    def draw(self, step: int) -> Batch:
        """The rows of an update, a function of the settings' seed, the step and the process alone."""
        random, count = torch.Generator().manual_seed(self._seed(step)), self.config.batch
        rows = torch.randint(len(self.records), (count,), generator=random).tolist()
        records = [self.records[i] for i in rows]
        pairs = [augment(r, self.config.augment, random) for r in records]
        names = self.embedder.spec.names
        values = torch.cat([self.embedder.spec.rows({n: c[n] for n in names if n in c}) for _, c in pairs])
        drop = torch.rand(count, generator=random) < self.config.drop_control
        silent_rows = torch.rand(count, generator=random) < self.config.drop_semantics
        semantics = torch.stack([self.null if s else r.semantics for s, r in zip(silent_rows, records, strict=True)])
        with torch.no_grad():
            x0 = self.encode(torch.stack([image for image, _ in pairs]).to(self.device))
        noise = torch.randn(x0.shape, generator=random).to(x0)
        if self.schedule.kind == "flow":
            t = torch.rand(count, generator=random, dtype=torch.float64) * self.schedule.steps
        else:
            t = torch.randint(self.schedule.steps, (count,), generator=random)
        return Batch(x0, noise, t, semantics.to(self.device), values, drop)

    def loss(self, batch: Batch) -> torch.Tensor:
        """Mean square error of the prediction, with Eq. 1 inside."""
        added = self.embedder(batch.values, self.config.gamma.u(batch.t), self.config.gamma, batch.drop)
        x = self.schedule.add_noise(batch.x0, batch.noise, batch.t)
        found = self.network(x, batch.t.to(self.device, torch.float32), batch.semantics, added)
        return (found.float() - self._target(batch).float()).square().mean()

    def _target(self, batch: Batch) -> torch.Tensor:
        if self.config.prediction in ("eps", "x0"):
            return batch.noise if self.config.prediction == "eps" else batch.x0
        if self.config.prediction == "flow":
            return batch.noise - batch.x0
        signal, level = (append_dims(s.to(batch.x0), 4) for s in self.schedule.scales(batch.t))
        return signal * batch.noise - level * batch.x0

    def _seed(self, step: int) -> int:
        text = f"{self.config.seed} {self.accelerator.process_index} {step}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    def _update(self, loss: torch.Tensor) -> None:
        """One Adam step; one whose gradient is not finite is skipped and counted."""
        self.adam.zero_grad()
        self.accelerator.backward(loss)
        for p in self.parameters.values():
            if p.grad is not None:
                p.grad = self.accelerator.reduce(p.grad, "mean")
        if finite(p.grad for p in self.parameters.values()):
            self.adam.step()
        else:
            self.skipped += 1
        self.adam.zero_grad()

    def export(self, name: str, weights: Mapping[str, torch.Tensor]) -> Path:
        """``folder/<name>.safetensors`` with the metadata of this run; written by the main process."""
        config, path = self.config, self.folder / f"{name}.safetensors"
        if not self.accelerator.is_main_process:
            return path
        facts = replace(
            self.metadata, dim=self.embedder.dim, spec=self.embedder.spec, gamma=config.gamma, steps=self.done,
            prediction=config.prediction, crop=config.augment.crop,
        )  # fmt: skip
        mine = {k[5:]: v for k, v in weights.items() if k.startswith("ctrl.")}
        extra = {k: v for k, v in weights.items() if not k.startswith("ctrl.")}
        return save_control(path, mine, facts, extra)

    # --- state --------------------------------------------------------------------------------------------------
    def _identity(self) -> dict[str, Any]:
        table = hashlib.sha256(self.schedule.log_sigmas.numpy().tobytes()).hexdigest()[:16]
        facts = {"schedule": [self.schedule.kind, self.schedule.steps, table], "trained": sorted(self.parameters)}
        return self.config.to_dict() | facts | self.embedder.spec.to_dict()

    def save(self) -> None:
        """The whole state: weights, average, optimiser, counters. Random state is the step's number."""
        if self.accelerator.is_main_process:
            facts = {"done": self.done, "skipped": self.skipped, "identity": self._identity()}
            tensors: dict[str, Tensors] = {"weight": self.parameters, "average": self.average.values}
            save_state(self.folder, tensors, {"adam": self.adam}, facts)

    def _resume(self) -> None:
        state = load_state(self.folder, {"adam": self.adam}, self._identity())
        if state is None:
            return
        for key, parameter in self.parameters.items():
            parameter.data.copy_(state.tensors["weight"][key])
            self.average.values[key].copy_(state.tensors["average"][key])
        self.done, self.skipped = state.facts["done"], state.facts["skipped"]


def _prefixed(name: str) -> str:
    return f"{'lora' if '.lora_' in name else 'base'}.{name}"
