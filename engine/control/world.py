"""The portraits sibling: a PixArt-shaped model told size, crop and flip, trained under two weights of the size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..denoiser import Condition
from ..diffusers_calls import call_of
from ..portraits.sibling import FOLDER, SiblingData, build_transformer, load_transformer, save_transformer
from ..progress import Progress, silent
from ..schedule import NoiseSchedule
from .embedder import ControlEmbedder
from .files import ControlMetadata, load_control, save_control
from .inject import Injection, control_width, injected
from .schedule import GammaConfig
from .spec import ControlSpec
from .train import Batch, ControlTrainConfig, ControlTrainer

PAPER = "On improved Conditioning Mechanisms (Berrada et al., NeurIPS 2024)"
WEIGHTS = {"power-cosine": GammaConfig("power_cos", 2.0), "constant": GammaConfig("constant")}
"""The two models: the paper's curve against SDXL's constant weight."""


class SiblingTrainer(ControlTrainer):
    """The recipe on latents encoded beforehand, with losses weighted by 1 / sqrt(SNR) as the portraits UNet's were."""

    def __init__(
        self, transformer: Any, embedder: ControlEmbedder, data: SiblingData, null: torch.Tensor,
        schedule: NoiseSchedule, config: ControlTrainConfig, folder: str | Path, decay_from: int | None = None,
    ) -> None:  # fmt: skip
        self.data, self.decay_from = data, config.steps * 3 // 4 if decay_from is None else decay_from
        self._values = embedder.spec.rows({n: data.controls[n] for n in embedder.spec.names})
        raw = call_of(transformer)
        metadata = ControlMetadata("PixArtTransformer2DModel", embedder.dim, base_model="vitrine portraits sibling")

        def call(x: torch.Tensor, t: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            return raw(x, t, Condition(text))

        super().__init__(
            injected(transformer, call), embedder, [], null, schedule, config, folder,
            dict(transformer.named_parameters()), metadata=metadata,
        )  # fmt: skip

    def draw(self, step: int) -> Batch:
        """Rows by number; all from the step's own seed."""
        random, count = torch.Generator().manual_seed(self._seed(step)), self.config.batch
        rows = torch.randint(len(self.data.latents), (count,), generator=random)
        text = self.data.text[rows].float()
        silent = torch.rand(count, generator=random) < self.config.drop_semantics
        text = torch.where(silent[:, None, None], self.null, text)
        x0 = self.data.latents[rows].float()
        noise = torch.randn(x0.shape, generator=random)
        t = torch.randint(self.schedule.steps, (count,), generator=random)
        drop = torch.rand(count, generator=random) < self.config.drop_control
        return Batch(x0, noise, t, text, self._values[rows], drop)

    def loss(self, batch: Batch) -> torch.Tensor:
        """Weighted noise prediction, Eq. 1 inside; the rate falls to zero over the last quarter."""
        rate = min(1.0, (self.done + 1) / 100)
        if self.done > self.decay_from:
            rate *= 1 - (self.done - self.decay_from) / max(1, self.config.steps - self.decay_from)
        for group in self.adam.param_groups:
            group["lr"] = self.config.lr * rate
        added = self.embedder(batch.values, self.config.gamma.u(batch.t), self.config.gamma, batch.drop)
        x = self.schedule.add_noise(batch.x0, batch.noise, batch.t)
        found = self.network(x, batch.t.float(), batch.semantics, added)
        signal, noise = self.schedule.scales(batch.t)
        weight = (noise / signal).clamp(max=4.0).float()
        return ((found - batch.noise).square().flatten(1).mean(1) * weight).mean()


def new_sibling(seed: int = 0) -> tuple[Any, ControlEmbedder]:
    """Transformer and embedder with seeded random weights."""
    transformer = build_transformer(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 1)
        return transformer, ControlEmbedder(ControlSpec(), control_width(transformer))


def train_sibling(
    weight: str, folder: str | Path, pictures: int, steps: int, batch: int, until: int | None = None,
    progress: Callable[[str], Progress] = lambda name: silent,
) -> Path:  # fmt: skip
    """Data, training, export to ``folder/weight``; goes on where it was stopped."""
    from ..portraits import load_portraits
    from ..portraits.sibling import sibling_data

    portraits = load_portraits()
    data = sibling_data(portraits, pictures, progress=progress("pictures"))
    with torch.no_grad():
        null = portraits.encode([""])[0].clone()
    config = ControlTrainConfig(steps, batch, 1.5e-3, (0.9, 0.95), 0.999, gamma=WEIGHTS[weight], save_every=250)
    transformer, embedder = new_sibling()
    schedule = NoiseSchedule.from_diffusers(portraits.scheduler)
    transformer.train()
    trainer = SiblingTrainer(transformer, embedder, data, null, schedule, config, Path(folder) / f"{weight}.run")
    bar, last = progress("training"), min(steps, until or steps)
    while trainer.done < last:
        trainer.step()
        if trainer.done % config.save_every == 0 or trainer.done == last:
            trainer.save()
        bar(trainer.done, steps, None)
    return export_sibling(trainer, transformer, Path(folder), weight).parent


def export_sibling(trainer: ControlTrainer, transformer: Any, folder: Path, name: str) -> Path:
    """The averaged transformer and its control file, ``folder/name/``."""
    own = {k[5:]: v for k, v in trainer.ema.items() if k.startswith("base.")}
    kept = {k: v.clone() for k, v in transformer.state_dict().items()}
    transformer.load_state_dict(kept | own)
    save_transformer(transformer, folder / name)
    transformer.load_state_dict(kept)
    mine = {k[5:]: v.half() for k, v in trainer.ema.items() if k.startswith("ctrl.")}
    facts = ControlMetadata(
        "PixArtTransformer2DModel", trainer.embedder.dim, trainer.embedder.spec, trainer.config.gamma,
        "vitrine portraits sibling", prediction="eps", steps=trainer.done, crop=(0.7, 1.0), licence="Apache-2.0",
    )  # fmt: skip
    return save_control(folder / name / "control.safetensors", mine, facts, {})


def load_sibling(name: str = "power-cosine") -> tuple[Any, ControlEmbedder, GammaConfig]:
    """Transformer, embedder and the curve it was trained with."""
    transformer = load_transformer(name)
    folder = Path(name) if Path(name).is_dir() else FOLDER / name
    checkpoint = load_control(folder / "control.safetensors")
    return transformer, checkpoint.embedder, checkpoint.metadata.gamma


NEUTRAL: dict[str, float] = {
    "flip": 0.0, "crop_top": 0.0, "crop_left": 0.0, "aspect": 1.0, "height": 64.0, "width": 64.0,
}  # fmt: skip
STEPS, GUIDANCE = 20, 2.0


@dataclass(frozen=True)
class Sibling:
    """A sibling with the portraits model's text encoder and VAE: draws under given controls."""

    portraits: Any
    transformer: Any
    embedder: ControlEmbedder
    gamma: GammaConfig

    @classmethod
    def open(cls, name: str, portraits: Any = None) -> Sibling:
        """A shipped one by name."""
        from ..portraits import load_portraits

        return cls(portraits or load_portraits(), *load_sibling(name))

    @torch.no_grad()
    def draw(
        self, prompts: list[str], seeds: list[int], controls: dict[str, float] | None = None, *, steps: int = STEPS,
        guidance: float = GUIDANCE, batch: int = 32, silent_controls: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """(N, 3, 64, 64) in [0, 1]; ``controls`` over ``NEUTRAL``; ``silent_controls`` drops them in both branches."""
        from ..portraits.sampling import decode

        values = self.embedder.spec.rows(NEUTRAL | (controls or {}))
        out = []
        for start in range(0, len(prompts), batch):
            part = slice(start, start + batch)
            latents = self._latents(prompts[part], seeds[part], values, steps, guidance, silent_controls)
            out.append(decode(self.portraits, latents))
        return torch.cat(out)

    def _latents(
        self, prompts: list[str], seeds: list[int], values: torch.Tensor, steps: int, guidance: float, quiet: bool
    ) -> torch.Tensor:
        from ..portraits.sampling import seeded_noise

        count, scheduler = len(prompts), self.portraits.scheduler
        text = self.portraits.encode(prompts)
        both = torch.cat([text, self.portraits.encode([""]).expand_as(text)])
        drop = torch.arange(2 * count) >= (0 if quiet else count)
        x, call = seeded_noise(seeds), call_of(self.transformer)
        scheduler.set_timesteps(steps)
        with Injection(self.transformer, self.embedder, values.expand(2 * count, -1), self.gamma, drop):
            for t in scheduler.timesteps:
                rows = torch.full((2 * count,), float(t))
                cond, null = call(torch.cat([x, x]), rows, Condition(both)).chunk(2)
                x = scheduler.step(null + guidance * (cond - null), t, x).prev_sample
        return x
