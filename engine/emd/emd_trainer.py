"""Trains a one-step student: a generator and a score network, with a frozen teacher.

Xie et al. 2024 (EM Distillation). ``step`` follows the algorithm: student score, E-step, M-step, average.
Under ``accelerate launch`` the processes divide each batch: each samples the random numbers of the whole batch, so that
results do not depend on their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..diffusion.denoiser import Denoiser
from ..io.number_checks import integer
from ..jobs.digests import digest
from ..jobs.run import Run, other_inputs, run_steps
from ..jobs.stored_text import StoredText
from ..jobs.training import MovingAverage, Tensors, finite, learning_rate, mean_gradients, set_rate
from ..network.condition import Condition
from ..runtime.processes import accelerator, workers_of
from ..runtime.progress import Progress, silent
from .calibration import CalibratedRun, Calibration, CalibrationState, calibrated
from .chain import ChainEnd, EStepConfig, Joint, NoiseLevels, e_step
from .export import export, from_file
from .losses import m_step_loss, sample_times, score_difference, score_loss
from .networks import GENERATOR, SCORE, Roles
from .sampling import one_step
from .students import StudentPreset, read_student
from .train_config import DTYPES, EMDTrainConfig

Batch = tuple[Condition, torch.Tensor, torch.Tensor]
"""Conditions, z and timesteps of one process's batch rows."""


class BatchPart:
    """This process's part of each batch: every n-th row for n processes.

    Args:
        accelerator: accelerate's ``Accelerator``.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator, self.device = accelerator, accelerator.device

    def rows(self, batch: torch.Tensor) -> torch.Tensor:
        """This process's rows of a tensor (B, ...) sampled for the whole batch, on its device."""
        return batch[self._accelerator.process_index :: self._accelerator.num_processes].contiguous()

    def own(self, batch: torch.Tensor) -> torch.Tensor:
        """:meth:`rows`, moved to this process's device."""
        rows = self.rows(batch)
        wide = rows.dtype == torch.float64 and self.device.type != "cpu"  # accelerators may have no float64
        return rows.to(self.device, torch.float32 if wide else rows.dtype)

    def in_any(self, flag: bool) -> bool:
        """Whether the flag is set in any process, so that all or none take part in an update."""
        if self._accelerator.num_processes == 1:
            return flag
        present = torch.tensor(int(flag), device=self.device)
        return bool(self._accelerator.reduce(present, "sum") > 0)


class Trainer:
    """A training run, resumable bit for bit from ``folder/state.safetensors``.

    Args:
        teacher: a Denoiser over a diffusers UNet or transformer; adapters are added to it.
        conditions: N encoded prompts, in memory or on disk; each batch row samples one.
        shape: latent size (C, H, W).
        null: the empty prompt, one row; needed if guidance is not 1.
        preset: header entries of the export in addition to the settings of this run.

    Attributes:
        chain: the E-step with calibrated gz and clip.
        calibration: the calibration; None before it (:meth:`calibrate`), or without one.
        done, skipped: generator updates so far; updates and batch rows skipped because they were not finite.
    """

    def __init__(
        self,
        teacher: Denoiser,
        conditions: Condition | StoredText,
        shape: tuple[int, ...],
        config: EMDTrainConfig,
        folder: str | Path,
        null: Condition | None = None,
        preset: StudentPreset | None = None,
    ) -> None:
        config = self.config = config.beginning(teacher.schedule.last)
        self.folder, self.shape = Path(folder), tuple(shape)
        self.conditions, self.base_preset = conditions, preset or StudentPreset()
        self.condition_count, self.accelerator = conditions.count, accelerator()
        self.device, self.part = self.accelerator.device, BatchPart(self.accelerator)
        self.null = None if null is None else null.to(self.device)
        config.check(self.accelerator.num_processes)
        made_of = {"teacher": teacher, "latents": list(self.shape), "conditions": conditions, "empty prompt": null}
        self._run = Run(self.folder, "EMD training", made_of, workers=workers_of(self.accelerator))
        rare = config.advanced
        roles = Roles(teacher, config.rank, config.seed, DTYPES[rare.dtype], rare.checkpointing)
        self.roles = roles.to(self.device)
        self.random = torch.Generator().manual_seed(config.seed)
        rates = {GENERATOR: config.lr_generator, SCORE: config.lr_score}
        self.optimizers = {name: self._adam(name, rate) for name, rate in rates.items()}
        self.average = MovingAverage(self.roles.parameters(GENERATOR))
        self.chain, self.done, self.skipped = config.chain, 0, 0
        self.calibration: Calibration | None = None
        self._begun_from, self._start = "", ""
        self._calibrating: CalibrationState | None = None
        self._resumed = self._resume()
        if not self._resumed and rare.auto_gz and config.chain.gz:
            count = max(4, min(64 // config.batch, config.steps))  # 64 batch rows, fewer in a short run
            self._calibrating = CalibrationState(min(10, config.steps), count)

    def _adam(self, name: str, lr: float) -> torch.optim.Adam:
        return torch.optim.Adam(self.roles.parameters(name).values(), lr=lr, betas=(0.0, 0.99))

    @property
    def preset(self) -> StudentPreset:
        """The preset of the student that this run trains."""
        return replace(
            self.base_preset,
            timestep=self.config.timestep,
            trained_guidance=self.config.guidance,
            shape=self.shape,
            steps=self.chain.steps,
            ge=self.chain.ge,
            gz=self.chain.gz,
        )

    def start_from(self, student: str | Path, score: str | Path | None = None) -> None:
        """Starts from the weights of an exported LoRA and of the score adapter trained with it.

        A resumed run takes its weights from its state instead.
        """
        self._start = digest([Path(student), None if score is None else Path(score)])
        if self._resumed:
            self._refuse_another_start()
            return
        self._begun_from = self._start
        for name, path in ((GENERATOR, student), (SCORE, score)):
            if path is not None:
                tensors = read_student(path, any_names=True)[1]
                self.roles.set(name, from_file(tensors, self.roles.parameters(name), name))
        self.average = MovingAverage(self.roles.parameters(GENERATOR))

    def generate(self, z: torch.Tensor, cond: Condition) -> torch.Tensor:
        """g(z, c) with the current weights: (B, C, H, W) float32."""
        return one_step(self.roles.generator, z, cond, self.preset)

    def run(self, progress: Progress = silent, until: int | None = None) -> tuple[Path, ...]:
        """Trains to the end (or to ``until``) and exports; saves every ``save_every`` steps and when stopped.

        A run that is not calibrated is calibrated first, a part with its own total of ``progress``.

        Returns:
            The generator's LoRA files, ComfyUI's format first, written by the first process.
        """
        self._refuse_another_start()
        with self._run:
            self._calibrate(progress)
            run_steps(
                self.step,
                lambda: self.done,
                self.config.steps,
                until=until,
                save=self.save,
                save_every=self.config.advanced.save_every,
                progress=progress,
            )
            return self._export()

    def calibrate(self, progress: Progress = silent) -> Calibration | None:
        """Calibrates gz and clip of the chain where the settings ask for it; resumable, and done only once.

        It needs tens of forwards of 64 batch rows. :meth:`run` calls it; alone it has a stage and a bar of its own.
        """
        self._refuse_another_start()
        if self._calibrating is not None:
            with self._run:
                self._calibrate(progress)
        return self.calibration

    def _calibrate(self, progress: Progress) -> None:
        state = self._calibrating
        if state is None:
            return
        run = CalibratedRun(
            lambda: self._score_update(*self._sample_batch()[:2]),
            lambda count: [self._sample_batch() for _ in range(count)],
            self._starts,
            self.random,
            self._normal,
            self.accelerator.gather,
            self.save,
        )
        self.calibration = calibrated(self.config.chain, run, state, progress)
        self.chain = self.config.chain.with_gz(*self.calibration[:2])
        self._calibrating = None
        self.save()

    def _refuse_another_start(self) -> None:
        if self._begun_from != self._start:
            raise other_inputs(self.folder, ["another start: a student's LoRA, or the teacher"])

    def _export(self) -> tuple[Path, ...]:
        files: tuple[Path, ...] = ()
        if self.accelerator.is_main_process:
            export(self.folder, self.roles.parameters(SCORE), SCORE, self.preset, self.roles.part)
            files = export(self.folder, self.average.values, GENERATOR, self.preset, self.roles.part)
        self.accelerator.wait_for_everyone()
        return files

    def step(self) -> None:
        """One update of the paper's algorithm, after the calibration."""
        self.calibrate()
        self._set_rates()
        cond, z, t = self._sample_batch()
        self._score_update(cond, z)  # A. student score, on uncorrected samples
        for _ in range(self.config.score_updates - 1):
            self._score_update(*self._sample_batch()[:2])
        self._update(GENERATOR, self._generator_loss(cond, z, t))  # B. E-step, C. M-step
        self.average.update(self.roles.parameters(GENERATOR), self.config.advanced.ema)  # D. average
        self.done += 1

    def _generator_loss(self, cond: Condition, z: torch.Tensor, t: torch.Tensor) -> torch.Tensor | None:
        self.roles.train_only(None)
        rho = self._joint(cond, t, z)
        end = e_step(rho, z, self._normal(z), self.chain, self._normal)  # B. E-step: weights frozen, z is the only leaf
        return self._m_step(end, cond, rho.levels)  # C. M-step

    def _joint(self, cond: Condition, t: torch.Tensor, z: torch.Tensor) -> Joint:
        """The chains' density for these batch rows; the E-step uses the current weights, not their average."""
        difference = score_difference(self.roles.teacher, self.roles.score, t, cond, self.null, self.config.guidance)
        return Joint(lambda u: self.generate(u, cond), difference, NoiseLevels.at(self.roles.base.schedule, t, z))

    def _set_rates(self) -> None:
        config = self.config
        falling = config.advanced.decay * config.steps
        for name, rate in ((GENERATOR, config.lr_generator), (SCORE, config.lr_score)):
            set_rate(self.optimizers[name], learning_rate(rate, "linear", self.done, config.steps, falling=falling))

    def _m_step(self, end: ChainEnd, cond: Condition, levels: NoiseLevels) -> torch.Tensor | None:
        """The loss; None if no batch row of this process is finite."""
        finite_rows = torch.isfinite(end.r.flatten(1)).all(1) & torch.isfinite(end.z.flatten(1)).all(1)
        sound = finite_rows.cpu()
        if not bool(sound.all()):  # batch rows with a non-finite chain are skipped and counted
            self.skipped += int((~sound).sum())
            rows = sound.nonzero().flatten()
            cond, levels, end = cond.take(rows), levels.take(rows), end.take(rows)
        self.roles.train_only(GENERATOR)
        if not bool(sound.any()):
            return None
        return m_step_loss(self.generate(end.z, cond), end, levels, self.config.advanced.weight)

    def _score_update(self, cond: Condition, z: torch.Tensor) -> None:
        self.roles.train_only(SCORE)
        with torch.no_grad():
            y = self.generate(z, cond)
        t = self.part.own(sample_times(self.roles.base.schedule, self.config.batch, self.random, 0.0, 1.0))
        self._update(SCORE, score_loss(self.roles.score, y, self._normal(z), t, cond))

    def _update(self, name: str, loss: torch.Tensor | None) -> None:
        """One Adam step, or none (and counted) if the gradient is not finite.

        A loss of None is a batch without a finite row in this process; if there is none in any process, no step is
        taken.
        """
        adam, parameters = self.optimizers[name], list(self.roles.parameters(name).values())
        adam.zero_grad()
        if loss is not None:
            self.accelerator.backward(loss)
        if name == GENERATOR and not self.part.in_any(loss is not None):
            return
        if self.accelerator.num_processes > 1:
            mean_gradients(parameters, partial(self.accelerator.reduce, reduction="mean"))
        if not finite(p.grad for p in parameters):
            self.skipped += 1
        else:
            adam.step()
        adam.zero_grad()

    def _sample_batch(self) -> Batch:
        """Samples conditions, z and timesteps of this process's batch rows."""
        rows = torch.randint(self.condition_count, (self.config.batch,), generator=self.random)
        z = torch.randn(self.config.batch, *self.shape, generator=self.random)
        t = sample_times(self.roles.base.schedule, self.config.batch, self.random)
        cond = self.conditions.take(self.part.rows(rows)).to(self.device)
        return cond, self.part.own(z), self.part.own(t)

    def _normal(self, like: torch.Tensor) -> torch.Tensor:
        """This process's rows of standard normal noise for the whole batch."""
        shape = (self.config.batch, *like.shape[1:])
        return self.part.own(torch.randn(shape, generator=self.random, dtype=like.dtype))

    def _starts(self, batches: Sequence[Batch]) -> Iterator[tuple[Joint, torch.Tensor, torch.Tensor]]:
        self.roles.train_only(None)
        for cond, z, t in batches:
            yield self._joint(cond, t, z), z, self._normal(z)

    def save(self) -> None:
        """Saves adapters, average, both optimisers, counters and random state."""
        if not self.accelerator.is_main_process:
            return
        weights: Tensors = {k: p for name in self.optimizers for k, p in self.roles.parameters(name).items()}
        tensors: dict[str, Tensors] = {
            "weight": weights,
            "average": self.average.values,
            "random": {"state": self.random.get_state()},
        }
        facts = {"done": self.done, "skipped": self.skipped, "chain": self.chain.to_dict()}
        facts |= {"config": self.config.to_dict(), "start": self._begun_from}
        facts["calibrating"] = self._calibrating and self._calibrating.to_dict()
        facts["calibration"] = self.calibration
        self._run.save(tensors, self.optimizers, facts)

    def _resume(self) -> bool:
        state = self._run.load(self.optimizers, str(self.device))
        if state is None:
            return False
        facts = state.facts
        chain = EStepConfig.from_dict(facts["chain"])
        if changed := self.config.differences(EMDTrainConfig.from_dict(facts["config"]), chain):
            raise other_inputs(self.folder, changed)
        self._begun_from = facts["start"]
        self.random.set_state(state.tensors["random"]["state"].cpu())
        self.average.values = state.tensors["average"]
        for name in self.optimizers:
            self.roles.set(name, state.tensors["weight"])
        self.done, self.skipped = (integer(facts[name], name) for name in ("done", "skipped"))
        self.chain = chain
        if facts["calibrating"] is not None:
            self._calibrating = CalibrationState.from_dict(facts["calibrating"])
        if facts["calibration"] is not None:
            self.calibration = Calibration(*facts["calibration"])
        return True
