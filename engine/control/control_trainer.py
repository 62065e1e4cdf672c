"""Trains control embeddings, on a frozen network or together with it (Berrada et al. 2024, 2.1 and appendix C).

gamma is part of the loss: it belongs to the model, not only to sampling.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from torch import nn

from ..diffusion.denoiser import PREDICTIONS, training_target
from ..diffusion.schedule import NoiseSchedule, append_dims
from ..errors import refuse
from ..io.number_checks import integer
from ..jobs.digests import digest
from ..jobs.run import Run, run_steps
from ..jobs.training import MovingAverage, Tensors, finite, mean_gradients
from ..runtime.placement import refuse_offloaded
from ..runtime.processes import accelerator, workers_of
from ..runtime.progress import Progress, silent
from ..settings.option import Option, Options
from .checkpoint import ControlMetadata, save_control
from .embedder import ControlEmbedder
from .embedding_hook import Network
from .gamma import GammaConfig
from .records import AugmentConfig, ControlRecord, augment

Probability = Annotated[float, Option("Probability that a batch row is trained without it.", ge=0, le=1)]


@dataclass(frozen=True)
class AdvancedControlTrainConfig(Options):
    """Rarely changed training settings. The paper does not give its dropout and averaging rates.

    ``drop_control`` and ``drop_semantics`` are sampled independently.
    """

    betas: Annotated[tuple[float, float], Option("Of Adam.")] = (0.9, 0.999)
    ema: Annotated[float, Option("Decay of the exported average.", ge=0, lt=1)] = 0.999
    drop_control: Probability = 0.1
    drop_semantics: Probability = 0.1
    save_every: Annotated[int, Option("Steps between saves.", ge=1)] = 500
    drop_together: Annotated[
        bool,
        Option(
            "A sample without semantics has no size condition either. Eq. 2 needs (c, s), (0, s) and (0, 0), never (c, "
            "0); sampled independently at 0.1, the last would be 1 % of samples. Off for older "
            "runs and for appendix D's nesting, which needs (c, 0).",
        ),
    ] = True


@dataclass(frozen=True)
class ControlTrainConfig(Options):
    """Training settings: the gamma curve, image augmentation and, in ``advanced``, those rarely changed."""

    steps: Annotated[int, Option("Number of updates.", ge=1)] = 1000
    batch: Annotated[int, Option("Batch rows per update.", ge=1)] = 16
    lr: Annotated[float, Option("Learning rate of Adam.", gt=0)] = 1e-4
    prediction: Annotated[
        str,
        Option(
            "What the network predicts; eps in the paper.",
            choices=tuple(PREDICTIONS),
        ),
    ] = "eps"
    gamma: GammaConfig = field(default_factory=GammaConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    seed: Annotated[int, Option("Of the whole run.")] = 0
    advanced: AdvancedControlTrainConfig = field(default_factory=AdvancedControlTrainConfig)


@dataclass
class TrainSetup:
    """What a run trains, and what it needs to evaluate it.

    Attributes:
        network: (x_t, t, semantics, c_emb) -> prediction; :func:`.embedding_hook.injected` makes one.
        embedder: initialised from the same seed in every process.
        schedule: of the training, possibly relabelled for another resolution (Eq. 3).
        null_semantics: semantics of an empty prompt, for dropped rows.
        parameters: name -> network parameter to train in addition to the embedder: none (make the embedder with
            ``zero_init``), the LoRA's, or all.
        encode: (B, C, size, size) images -> x0, a frozen autoencoder for latent models; None: the images are x0.
    """

    network: Network
    embedder: ControlEmbedder
    schedule: NoiseSchedule
    null_semantics: torch.Tensor
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)
    encode: Callable[[torch.Tensor], torch.Tensor] | None = None


class Batch(NamedTuple):
    """One training batch: x0 and noise (B, C, H, W), t (B,), semantics (B, ...), values (B, F), drop (B,) bool."""

    x0: torch.Tensor
    noise: torch.Tensor
    t: torch.Tensor
    semantics: torch.Tensor
    values: torch.Tensor
    drop: torch.Tensor


class ControlTrainer:
    """A training run, resumable bit for bit from ``folder/state.safetensors``.

    Args:
        records: read by index; an iterable is listed once. All are digested at the start, unless the list has
            ``inputs`` (see :mod:`~vitrine.engine.jobs.digests`), which then identify them.
        metadata: header entries of the export in addition to the settings of this run.
        device: the network's device; None is accelerate's choice.
        inputs: further inputs that the run depends on.
    """

    def __init__(
        self,
        setup: TrainSetup,
        records: Iterable[ControlRecord],
        config: ControlTrainConfig,
        folder: str | Path,
        metadata: ControlMetadata | None = None,
        device: torch.device | None = None,
        inputs: Mapping[str, object] | None = None,
    ) -> None:
        schedule = setup.schedule
        if (config.prediction == "flow") != (schedule.kind == "flow"):
            raise refuse("prediction, schedule", (config.prediction, schedule.kind), "flow with flow", "match them")
        backbone = getattr(setup.network, "backbone", None)
        if backbone is not None:
            refuse_offloaded(backbone)
        self.accelerator = accelerator()
        self.device = device or self.accelerator.device
        self.network, self.schedule, self.null = setup.network, schedule, setup.null_semantics
        self.embedder = setup.embedder.to(self.device)
        indexed = hasattr(records, "__getitem__") and hasattr(records, "__len__")
        self.records: Sequence[ControlRecord] = records if indexed else list(records)  # type: ignore[assignment]
        self.config, self.folder = config, Path(folder)
        self.encode = setup.encode or (lambda images: images)
        self.metadata = metadata or ControlMetadata("", self.embedder.dim)
        self.parameters = {f"ctrl.{name}": p for name, p in self.embedder.named_parameters()}
        self.parameters |= {_prefixed(name): p for name, p in setup.parameters.items()}
        self.adam = torch.optim.Adam(self.parameters.values(), lr=config.lr, betas=config.advanced.betas)
        self.average = MovingAverage(self.parameters)
        self.done, self.skipped = 0, 0
        made_of = self._inputs(setup) | dict(inputs or {})
        workers = workers_of(self.accelerator)
        self._run = Run(self.folder, "control training", made_of, workers=workers)
        self._resume()

    def run(self, progress: Progress = silent, until: int | None = None) -> Path:
        """Trains to the end (or to ``until``) and exports; saves every ``save_every`` steps and when stopped."""
        self.train(progress, until)
        self.export("control_raw", {k: p.detach() for k, p in self.parameters.items()})
        path = self.export("control", self.average.values)
        self.accelerator.wait_for_everyone()
        return path

    def train(self, progress: Progress = silent, until: int | None = None, total: int | None = None) -> None:
        """Trains to the end (or to ``until``) without exporting.

        Args:
            total: total number of steps for ``progress``; None: all.
        """
        with self._run:
            run_steps(
                self.step,
                lambda: self.done,
                total or self.config.steps,
                until=until,
                save=self.save,
                save_every=self.config.advanced.save_every,
                progress=progress,
            )

    def step(self) -> float:
        """One update; returns the loss."""
        seed = self._seed(self.done)
        # The network's dropout uses the global generator; seeded here, a resumed run equals an uninterrupted one.
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            loss = self.loss(self.sample_batch(self.done))
        self._update(loss)
        self.average.update(self.parameters, self.config.advanced.ema)
        self.done += 1
        return float(loss.detach())

    def sample_batch(self, step: int) -> Batch:
        """Samples the batch of an update, a function of the seed, the step and the process alone."""
        random, count = torch.Generator().manual_seed(self._seed(step)), self.config.batch
        rows = torch.randint(len(self.records), (count,), generator=random).tolist()
        records = [self.records[i] for i in rows]
        pairs = [augment(r, self.config.augment, random) for r in records]
        spec, advanced = self.embedder.spec, self.config.advanced
        values = torch.cat([spec.rows({n: c[n] for n in spec.names if n in c}) for _, c in pairs])
        drop = torch.rand(count, generator=random) < advanced.drop_control
        unsaid = torch.rand(count, generator=random) < advanced.drop_semantics
        drop = drop | unsaid if advanced.drop_together else drop
        semantics = torch.stack([self.null if s else r.semantics for s, r in zip(unsaid, records, strict=True)])
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
        prediction = self.network(x, batch.t.to(self.device, torch.float32), batch.semantics, added)
        return (prediction.float() - self._target(batch).float()).square().mean()

    def _target(self, batch: Batch) -> torch.Tensor:
        signal, level = (append_dims(s.to(batch.x0), 4) for s in self.schedule.scales(batch.t))
        return training_target(self.config.prediction, batch.x0, batch.noise, signal, level)

    def _seed(self, step: int) -> int:
        text = f"{self.config.seed} {self.accelerator.process_index} {step}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    def _update(self, loss: torch.Tensor) -> None:
        """One Adam step; steps with a non-finite gradient are skipped and counted."""
        self.adam.zero_grad()
        self.accelerator.backward(loss)
        if self.accelerator.num_processes > 1:
            mean_gradients(self.parameters.values(), partial(self.accelerator.reduce, reduction="mean"))
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
        metadata = replace(
            self.metadata,
            dim=self.embedder.dim,
            spec=self.embedder.spec,
            gamma=config.gamma,
            steps=self.done,
            prediction=config.prediction,
            crop=config.augment.crop,
        )
        embedder = {k.removeprefix("ctrl."): v for k, v in weights.items() if k.startswith("ctrl.")}
        extra = {k: v for k, v in weights.items() if not k.startswith("ctrl.")}
        return save_control(path, embedder, metadata, extra)

    # --- state --------------------------------------------------------------------------------------------------
    def _inputs(self, setup: TrainSetup) -> dict[str, object]:
        """The inputs that the run depends on, without ``save_every``."""
        settings = replace(self.config, advanced=replace(self.config.advanced, save_every=1))
        records = getattr(self.records, "inputs", None)
        network = getattr(setup.network, "backbone", setup.network)
        return {
            "network": network,
            "embedder": self.embedder,
            "controls": self.embedder.spec,
            "noise schedule": self.schedule,
            "empty prompt": self.null,
            "autoencoder": setup.encode,
            "trained": sorted(self.parameters),
            "processes": self.accelerator.num_processes,
            "records": [digest(record) for record in self.records] if records is None else records,
            "settings": settings,
        }

    def save(self) -> None:
        """Saves weights, average, optimiser and counters. The random state is the step number."""
        if self.accelerator.is_main_process:
            facts = {"done": self.done, "skipped": self.skipped}
            tensors: dict[str, Tensors] = {"weight": self.parameters, "average": self.average.values}
            self._run.save(tensors, {"adam": self.adam}, facts)

    def _resume(self) -> None:
        state = self._run.load({"adam": self.adam})
        if state is None:
            return
        for key, parameter in self.parameters.items():
            parameter.data.copy_(state.tensors["weight"][key])
            self.average.values[key].copy_(state.tensors["average"][key])
        self.done, self.skipped = (integer(state.facts[name], name) for name in ("done", "skipped"))


def _prefixed(name: str) -> str:
    return f"{'lora' if '.lora_' in name else 'base'}.{name}"
