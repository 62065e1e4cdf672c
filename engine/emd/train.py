"""Train a one-step student: LoRA generator and LoRA score network on one frozen teacher.

Xie et al. 2024 (EM Distillation). ``step`` reads like the algorithm: student score, E-step, M-step, average.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..denoiser import Condition, Denoiser
from ..errors import refuse
from ..progress import Progress, silent
from .chain import ChainEnd, e_step, normal_from
from .config import EStepConfig
from .contract import StudentContract
from .export import export, write
from .losses import WEIGHTS, bias, calibrate_gz, draw_times, levels, m_step_loss, score_gap, score_loss, z_drifts
from .onestep import one_step
from .roles import GENERATOR, SCORE, Roles


@dataclass(frozen=True)
class EMDTrainConfig:
    """Settings of a run.

    Attributes:
        steps: generator updates. batch: rows of each.
        timestep: t*, where the generator starts from the teacher. rank: of both adapters.
        chain: the E-step; ``EStepConfig.diff_instruct()`` is the baseline. auto_gz: measure gz at the start.
        score_updates: score updates before each generator update.
        lr_generator, lr_score: Adam with betas (0, 0.99).
        guidance: of the teacher. weight: ``uniform`` or ``dmd``. ema: of the exported generator.
        save_every, meter_every: steps between saves, and between readings of the bias meter (0: never).
    """

    steps: int = 2000
    batch: int = 16
    timestep: float = 999.0
    rank: int = 16
    chain: EStepConfig = field(default_factory=EStepConfig)
    auto_gz: bool = True
    score_updates: int = 1
    lr_generator: float = 1e-4
    lr_score: float = 5e-4
    guidance: float = 1.0
    weight: str = "dmd"
    ema: float = 0.999
    seed: int = 0
    save_every: int = 100
    meter_every: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "rank", "score_updates", "save_every"):
            if getattr(self, name) < 1:
                raise refuse(name, getattr(self, name), "1 or more", "use a whole number")
        if not 0 <= self.ema < 1 or self.weight not in WEIGHTS:
            raise refuse("ema, weight", (self.ema, self.weight), f"0 <= ema < 1, {WEIGHTS}", "0.999 and dmd are usual")

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"chain": self.chain.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EMDTrainConfig:
        """The inverse of :meth:`to_dict`.

        Raises:
            VitrineError: an unknown setting.
        """
        unknown = set(values) - set(cls.__dataclass_fields__)
        if unknown:
            raise refuse("settings", sorted(unknown), sorted(cls.__dataclass_fields__), "remove them")
        chain = values.get("chain", {})
        return cls(**values | {"chain": chain if isinstance(chain, EStepConfig) else EStepConfig.from_dict(chain)})


class Trainer:
    """One run, resumable to the bit from ``folder/state.safetensors``.

    Args:
        teacher: a Denoiser over a diffusers UNet; adapters are added to it.
        conditions: N rows to draw from, one draw a training row.
        null: the empty prompt, one row; needed when guidance is not 1.
        shape: latent size (C, H, W).
        contract: what the export says beside the settings of this run.
    """

    def __init__(
        self, teacher: Denoiser, conditions: Condition, shape: tuple[int, ...], config: EMDTrainConfig,
        folder: str | Path, null: Condition | None = None, contract: StudentContract | None = None,
    ) -> None:  # fmt: skip
        from accelerate import Accelerator

        self.config, self.folder, self.shape, self.null = config, Path(folder), tuple(shape), null
        self.conditions, self.given = conditions, contract or StudentContract()
        self.count = len(conditions.text) if conditions.text is not None else 1
        self.accelerator = Accelerator()
        self.device = self.accelerator.device
        self.roles = Roles(teacher, config.rank, config.seed)
        self.random = torch.Generator().manual_seed(config.seed + self.accelerator.process_index)
        self.adams = {GENERATOR: self._adam(GENERATOR, config.lr_generator), SCORE: self._adam(SCORE, config.lr_score)}
        self.ema = {k: p.detach().clone() for k, p in self.roles.parameters(GENERATOR).items()}
        self.chain, self.done, self.skipped, self.meter = config.chain, 0, 0, dict[str, float]()
        if not self._resume() and config.auto_gz and config.chain != EStepConfig.diff_instruct():
            self.chain = config.chain.with_gz(*self._calibrate())

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

    def generate(self, z: torch.Tensor, cond: Condition) -> torch.Tensor:
        """g(z, c) with the live weights: (B, C, H, W) float32."""
        return one_step(self.roles.generator, z, cond, self.contract)

    def run(self, progress: Progress = silent, until: int | None = None) -> tuple[Path, Path]:
        """Train to the end (or to ``until``) and export. Saved every ``save_every`` steps and when stopped."""
        while self.done < min(self.config.steps, until or self.config.steps):
            self.step()
            if self.done % self.config.save_every == 0:
                self.save()
            try:
                progress(self.done, self.config.steps, None)
            except BaseException:  # stopped between two steps, so the state is whole; within one it would not be
                self.save()
                raise
        self.save()
        export(self.folder, dict(self.roles.parameters(SCORE)), SCORE, self.contract)
        return export(self.folder, self.ema, GENERATOR, self.contract)

    def step(self) -> None:
        """One pass of the algorithm box."""
        cond, z, t = self._draw()
        alpha, sigma = levels(self.roles.base.schedule, t, z)
        for _ in range(self.config.score_updates):
            self._score_update(cond, z)  # A. student score, on uncorrected samples
        self.roles.learn(None)
        gap = score_gap(self.roles.teacher, self.roles.score, t, cond, self.null, self.config.guidance)
        normal = normal_from(self.random)
        end = e_step(  # B. E-step: all weights frozen, z the only leaf
            lambda u: self.generate(u, cond), gap, z, normal(z), alpha, sigma, self.chain, normal
        )
        self._read_meter(end, gap, cond, alpha, sigma)
        self._generator_update(end, cond, alpha, sigma)  # C. M-step
        for key, parameter in self.roles.parameters(GENERATOR).items():  # D. average
            self.ema[key].lerp_(parameter.detach(), 1 - self.config.ema)
        self.done += 1

    def _generator_update(self, end: ChainEnd, cond: Condition, alpha: torch.Tensor, sigma: torch.Tensor) -> None:
        keep = torch.isfinite(end.r.flatten(1)).all(1) & torch.isfinite(end.z.flatten(1)).all(1)
        if not bool(keep.all()):  # rows whose chain is not finite are left out and counted
            self.skipped += int((~keep).sum())
            rows = keep.nonzero().flatten()
            cond, alpha, sigma = cond.take(rows), alpha[rows], sigma[rows]
            end = ChainEnd(*(None if v is None else v[rows] for v in end))  # type: ignore[arg-type]
        if not bool(keep.any()):
            return
        self.roles.learn(GENERATOR)
        y = self.generate(end.z, cond)
        self._update(GENERATOR, m_step_loss(y, end, alpha, sigma, self.config.weight))

    def _score_update(self, cond: Condition, z: torch.Tensor) -> None:
        self.roles.learn(SCORE)
        with torch.no_grad():
            y = self.generate(z, cond)
        t = draw_times(self.roles.base.schedule, len(z), self.random, 0.0, 1.0).to(self.device)
        noise = normal_from(self.random)(z)
        self._update(SCORE, score_loss(self.roles.score, y, noise, t, cond))

    def _update(self, name: str, loss: torch.Tensor) -> None:
        """One Adam step; one whose gradient is not finite is skipped and counted."""
        adam, parameters = self.adams[name], list(self.roles.parameters(name).values())
        adam.zero_grad()
        self.accelerator.backward(loss)
        for p in parameters:
            if p.grad is not None:
                p.grad = self.accelerator.reduce(p.grad, "mean")
        grads = [p.grad for p in parameters if p.grad is not None]
        if not all(bool(torch.isfinite(v).all()) for v in grads):
            self.skipped += 1
        else:
            adam.step()
        adam.zero_grad()

    def _draw(self) -> tuple[Condition, torch.Tensor, torch.Tensor]:
        rows = torch.randint(self.count, (self.config.batch,), generator=self.random)
        z = torch.randn(self.config.batch, *self.shape, generator=self.random).to(self.device)
        t = draw_times(self.roles.base.schedule, self.config.batch, self.random).to(self.device)
        return self.conditions.take(rows).to(self.device), z, t

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
            found.append(z_drifts(net, gap, z, normal_from(self.random)(z), alpha, sigma))
        return calibrate_gz(torch.cat(found))

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
        tensors = {f"ema/{k}": v.contiguous() for k, v in self.ema.items()} | {"random": self.random.get_state()}
        for name, adam in self.adams.items():
            tensors |= {f"weight/{k}": p.detach().contiguous() for k, p in self.roles.parameters(name).items()}
            for i, slot in adam.state_dict()["state"].items():
                tensors |= {f"adam/{name}/{i}/{k}": torch.as_tensor(v).contiguous() for k, v in slot.items()}
        facts = {"done": self.done, "skipped": self.skipped, "chain": self.chain.to_dict(), "meter": self.meter}
        meta = {"state": json.dumps(facts), "config": json.dumps(self.config.to_dict(), sort_keys=True)}
        write(self.folder / "state.safetensors", tensors, meta | {"version": "1", "saved": repr(time.time())})

    def _resume(self) -> bool:
        from safetensors import safe_open

        path = self.folder / "state.safetensors"
        if not path.is_file():
            return False
        with safe_open(str(path), "pt", device=str(self.device)) as file:
            meta, tensors = file.metadata(), {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
        if json.loads(meta["config"]) != json.loads(json.dumps(self.config.to_dict())):
            raise refuse("folder", str(path.parent.name), "a run with these settings", "choose another folder")
        self._load(tensors)
        facts = json.loads(meta["state"])
        self.done, self.skipped, self.meter = facts["done"], facts["skipped"], facts["meter"]
        self.chain = EStepConfig.from_dict(facts["chain"])
        return True

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        self.random.set_state(tensors["random"].cpu())
        self.ema = {k[4:]: v for k, v in tensors.items() if k.startswith("ema/")}
        for name, adam in self.adams.items():
            for key, parameter in self.roles.parameters(name).items():
                parameter.data.copy_(tensors[f"weight/{key}"])
            slots: dict[int, dict[str, torch.Tensor]] = {}
            for key, value in tensors.items():
                if key.startswith(f"adam/{name}/"):
                    _, _, i, part = key.split("/")
                    slots.setdefault(int(i), {})[part] = value
            adam.load_state_dict(adam.state_dict() | {"state": slots})
