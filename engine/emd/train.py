"""Train a one-step student: a generator and a LoRA score network beside one frozen teacher.

Xie et al. 2024 (EM Distillation). ``step`` reads like the algorithm: student score, E-step, M-step, average.
Under ``accelerate launch`` the processes share each batch: random numbers are drawn for the whole batch in each, so
that a run does not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ..condition import Condition
from ..denoiser import Denoiser
from ..errors import refuse
from ..noise import seeded_noise
from ..progress import Progress, silent
from ..training import MovingAverage, Tensors, finite, load_state, run_steps, save_state, set_rate
from .chain import ChainEnd, e_step
from .config import EStepConfig
from .contract import StudentContract, read_student
from .export import export, export_full, from_kohya
from .grids import write_grid
from .losses import bias, calibrate_gz, draw_times, levels, m_step_loss, score_gap, score_loss, z_drifts
from .onestep import one_step
from .roles import GENERATOR, SCORE, Roles
from .train_config import DTYPES, EMDTrainConfig


class Trainer:
    """One run, resumable to the bit from ``folder/state.safetensors``.

    Args:
        teacher: a Denoiser over a diffusers UNet; adapters are added to it.
        conditions: N rows to draw from, one draw a training row.
        null: the empty prompt, one row; needed when guidance is not 1.
        shape: latent size (C, H, W).
        contract: what the export says beside the settings of this run.
        decode: latents (B, C, H, W) to pictures (B, 3, H, W) in [0, 1], for ``grid_every``.

    Raises:
        VitrineError: grids without ``decode``, a batch the processes cannot share, or another run in the folder.
    """

    def __init__(
        self, teacher: Denoiser, conditions: Condition, shape: tuple[int, ...], config: EMDTrainConfig,
        folder: str | Path, null: Condition | None = None, contract: StudentContract | None = None,
        decode: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        from accelerate import Accelerator

        self.config, self.folder, self.shape, self.decode = config, Path(folder), tuple(shape), decode
        self.conditions, self.given = conditions, contract or StudentContract()
        self.count = len(conditions.text) if conditions.text is not None else 1
        self.accelerator = Accelerator(cpu=not torch.accelerator.is_available())  # else CPU processes form no group
        self.device = self.accelerator.device
        self.null = None if null is None else null.to(self.device)
        self._check()
        made = Roles(
            teacher, config.rank, config.seed, config.student == "full", DTYPES[config.dtype], config.checkpointing
        )
        self.roles = made.to(self.device)
        self.random = torch.Generator().manual_seed(config.seed)
        self.adams = {GENERATOR: self._adam(GENERATOR, config.lr_generator), SCORE: self._adam(SCORE, config.lr_score)}
        self.average = MovingAverage(self.roles.parameters(GENERATOR))
        self.chain, self.done, self.skipped, self.meter = config.chain, 0, 0, dict[str, float]()
        if not self._resume() and config.auto_gz and config.chain != EStepConfig.diff_instruct():
            self.chain = config.chain.with_gz(*self._calibrate())

    def _check(self) -> None:
        count = self.accelerator.num_processes
        if self.config.batch % count:
            raise refuse("batch", self.config.batch, f"a multiple of {count}, the processes", "they share each batch")
        if self.config.grid_every and self.decode is None:
            raise refuse("grid_every", self.config.grid_every, "0 without decode", "pass decode=, latents to pictures")

    def _adam(self, name: str, lr: float) -> torch.optim.Adam:
        return torch.optim.Adam(self.roles.parameters(name).values(), lr=lr, betas=(0.0, 0.99))

    @property
    def contract(self) -> StudentContract:
        """The student's contract as this run makes it."""
        values = self.given.to_dict() | {
            "timestep": self.config.timestep, "trained_guidance": self.config.guidance, "shape": list(self.shape),
            "steps": self.chain.steps, "ge": self.chain.ge, "gz": self.chain.gz,
        }  # fmt: skip
        return StudentContract.from_dict(values)

    def start_from(self, student: str | Path, score: str | Path | None = None) -> None:
        """Begin with the weights of an exported LoRA (kohya names) and of the score adapter trained beside it.

        Does nothing in a run that has begun already; its weights come from its state.

        Raises:
            VitrineError: a full student, or adapters of another rank or other layers.
        """
        if self.done:
            return
        if self.config.student == "full":
            raise refuse("start", "a LoRA", "a run with student = lora", "start a full student from its base model")
        for name, path in ((GENERATOR, student), (SCORE, score)):
            if path is not None:
                own = self.roles.parameters(name)
                for key, value in from_kohya(read_student(path)[1], own, name).items():
                    own[key].data.copy_(value)
        self.average = MovingAverage(self.roles.parameters(GENERATOR))

    def generate(self, z: torch.Tensor, cond: Condition) -> torch.Tensor:
        """g(z, c) with the live weights: (B, C, H, W) float32."""
        return one_step(self.roles.generator, z, cond, self.contract)

    @torch.no_grad()
    def samples(self, count: int = 8) -> torch.Tensor:
        """(count, 3, H, W) pictures in [0, 1] of the averaged generator: seeds 0, 1, ... and the first conditions.

        Raises:
            VitrineError: no ``decode``.
        """
        if self.decode is None:
            raise refuse("decode", None, "a function of latents", "pass decode= to the Trainer")
        z = seeded_noise(list(range(count)), self.shape).to(self.device)
        cond = self.conditions.take(torch.arange(count) % self.count).to(self.device)
        with self.roles.holding(GENERATOR, self.average.values):
            return self.decode(self.generate(z, cond)).float().clamp(0, 1).cpu()

    def run(self, progress: Progress = silent, until: int | None = None) -> tuple[Path, ...]:
        """Train to the end (or to ``until``) and export. Saved every ``save_every`` steps and when stopped.

        Returns:
            The generator's files, written by the first process: a LoRA in kohya and in diffusers names, or a UNet.
        """
        total = self.config.steps
        run_steps(
            self.step, lambda: self.done, min(total, until or total), total,
            save=self.save, save_every=self.config.save_every, progress=progress, preview=self._grid,
        )  # fmt: skip
        return self._export()

    def _export(self) -> tuple[Path, ...]:
        write_all = export_full if self.config.student == "full" else export
        files: list[tuple[Path, ...]] = [()]
        if self.accelerator.is_main_process:
            export(self.folder, dict(self.roles.parameters(SCORE)), SCORE, self.contract)
            files = [write_all(self.folder, self.average.values, GENERATOR, self.contract)]
        self.accelerator.wait_for_everyone()
        return files[0]

    def _grid(self) -> torch.Tensor | None:
        """Every ``grid_every`` steps: write OUT/grids/step_N.png and return its pictures."""
        if not self.config.grid_every or self.done % self.config.grid_every or not self.accelerator.is_main_process:
            return None
        pictures = self.samples()
        write_grid(self.folder / "grids" / f"step_{self.done}.png", pictures)
        return pictures

    def step(self) -> None:
        """One pass of the algorithm box."""
        self._set_rates()
        cond, z, t = self._draw()
        alpha, sigma = levels(self.roles.base.schedule, t, z)
        for _ in range(self.config.score_updates):
            self._score_update(cond, z)  # A. student score, on uncorrected samples
        self.roles.learn(None)
        gap = score_gap(self.roles.teacher, self.roles.score, t, cond, self.null, self.config.guidance)
        end = e_step(  # B. E-step: all weights frozen, z the only leaf
            lambda u: self.generate(u, cond), gap, z, self._normal(z), alpha, sigma, self.chain, self._normal
        )
        self._read_meter(end, gap, cond, alpha, sigma)
        self._generator_update(end, cond, alpha, sigma)  # C. M-step
        self.average.update(self.roles.parameters(GENERATOR), self.config.ema)  # D. average
        self.done += 1

    def _set_rates(self) -> None:
        config = self.config
        falling = config.decay * config.steps
        share = min(1.0, (config.steps - self.done) / falling) if falling else 1.0
        for name, rate in ((GENERATOR, config.lr_generator), (SCORE, config.lr_score)):
            set_rate(self.adams[name], rate * share)

    def _generator_update(self, end: ChainEnd, cond: Condition, alpha: torch.Tensor, sigma: torch.Tensor) -> None:
        keep = torch.isfinite(end.r.flatten(1)).all(1) & torch.isfinite(end.z.flatten(1)).all(1)
        if not bool(keep.all()):  # rows whose chain is not finite are left out and counted
            self.skipped += int((~keep).sum())
            rows = keep.nonzero().flatten()
            cond, alpha, sigma = cond.take(rows), alpha[rows], sigma[rows]
            end = ChainEnd(*(None if v is None else v[rows] for v in end))  # type: ignore[arg-type]
        if not self._somewhere(keep):
            return
        self.roles.learn(GENERATOR)
        loss = None
        if bool(keep.any()):
            loss = m_step_loss(self.generate(end.z, cond), end, alpha, sigma, self.config.weight)
        self._update(GENERATOR, loss)

    def _score_update(self, cond: Condition, z: torch.Tensor) -> None:
        self.roles.learn(SCORE)
        with torch.no_grad():
            y = self.generate(z, cond)
        t = self._mine(draw_times(self.roles.base.schedule, self.config.batch, self.random, 0.0, 1.0))
        noise = self._normal(z)
        self._update(SCORE, score_loss(self.roles.score, y, noise, t, cond))

    def _update(self, name: str, loss: torch.Tensor | None) -> None:
        """One Adam step; one whose gradient is not finite is skipped and counted. No loss: no row here is finite."""
        adam, parameters = self.adams[name], list(self.roles.parameters(name).values())
        adam.zero_grad()
        if loss is not None:
            self.accelerator.backward(loss)
        if self.accelerator.num_processes > 1:
            for p in parameters:
                p.grad = self.accelerator.reduce(torch.zeros_like(p) if p.grad is None else p.grad, "mean")
        if not finite(p.grad for p in parameters):
            self.skipped += 1
        else:
            adam.step()
        adam.zero_grad()

    def _draw(self) -> tuple[Condition, torch.Tensor, torch.Tensor]:
        rows = torch.randint(self.count, (self.config.batch,), generator=self.random)
        z = torch.randn(self.config.batch, *self.shape, generator=self.random)
        t = draw_times(self.roles.base.schedule, self.config.batch, self.random)
        rows, z, t = (self._mine(v) for v in (rows, z, t))
        return self.conditions.take(rows).to(self.device), z, t

    def _normal(self, like: torch.Tensor) -> torch.Tensor:
        """This process's rows of standard normal noise for the whole batch."""
        shape = (self.config.batch, *like.shape[1:])
        return self._mine(torch.randn(shape, generator=self.random, dtype=like.dtype))

    def _mine(self, batch: torch.Tensor) -> torch.Tensor:
        """This process's rows of something drawn for the whole batch, on its device."""
        own = batch[self.accelerator.process_index :: self.accelerator.num_processes]
        return own.contiguous().to(self.device)

    def _somewhere(self, flags: torch.Tensor) -> bool:
        """True if one is set in any process: all of them must take part in an update, or none."""
        if self.accelerator.num_processes == 1:
            return bool(flags.any())
        return bool(self.accelerator.reduce(flags.sum(), "sum") > 0)

    def _calibrate(self) -> tuple[float, float]:
        """gz and clip from the z drift at the start; the two scores coincide there: five score updates come first."""
        for _ in range(5):
            cond, z, t = self._draw()
            self._score_update(cond, z)
        self.roles.learn(None)
        found = []
        for _ in range(4):
            cond, z, t = self._draw()
            alpha, sigma = levels(self.roles.base.schedule, t, z)
            gap = score_gap(self.roles.teacher, self.roles.score, t, cond, self.null, self.config.guidance)
            net: Callable = lambda u, c=cond: self.generate(u, c)  # noqa: E731
            found.append(z_drifts(net, gap, z, self._normal(z), alpha, sigma))
        return calibrate_gz(self.accelerator.gather(torch.cat(found)))

    def _read_meter(
        self, end: ChainEnd, gap: Callable, cond: Condition, alpha: torch.Tensor, sigma: torch.Tensor
    ) -> None:
        if self.config.meter_every and self.done % self.config.meter_every == 0:
            with torch.no_grad():
                last = gap(alpha * self.generate(end.z, cond) + sigma * end.eps).delta
            self.meter = bias(end.eps - end.noise, end.eps, last)

    def save(self) -> None:
        """The whole state: adapters, average, both optimisers, counters, random state."""
        if not self.accelerator.is_main_process:
            return
        weights: Tensors = {k: p for name in self.adams for k, p in self.roles.parameters(name).items()}
        tensors: dict[str, Tensors] = {
            "weight": weights,
            "average": self.average.values,
            "random": {"state": self.random.get_state()},
        }
        facts = {"done": self.done, "skipped": self.skipped, "chain": self.chain.to_dict(), "meter": self.meter}
        save_state(self.folder, tensors, self.adams, facts | {"config": self.config.to_dict()})

    def _resume(self) -> bool:
        state = load_state(self.folder, self.adams, device=str(self.device))
        if state is None:
            return False
        facts = state.facts
        if not self.config.continues(EMDTrainConfig.from_dict(facts["config"])):
            raise refuse("folder", self.folder.name, "a run with these settings", "choose another folder")
        self.random.set_state(state.tensors["random"]["state"].cpu())
        self.average.values = state.tensors["average"]
        for name in self.adams:
            for key, parameter in self.roles.parameters(name).items():
                parameter.data.copy_(state.tensors["weight"][key])
        self.done, self.skipped, self.meter = facts["done"], facts["skipped"], facts["meter"]
        self.chain = EStepConfig.from_dict(facts["chain"])
        return True
