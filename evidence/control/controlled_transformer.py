"""The sibling with what it is told: opening, drawing, training further, exporting.

The one place of this world that knows a method: a sibling has a control embedder (``engine.control``) inside. Rooms
that need a model told size, crop and flip take it from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...engine.condition import Condition
from ...engine.control import (
    ControlEmbedder,
    ControlMetadata,
    GammaConfig,
    Injection,
    injected,
    load_control,
    save_control,
)
from ...engine.control.train import Batch, ControlTrainConfig, ControlTrainer
from ...engine.denoiser import Denoiser
from ...engine.families import call_of
from ...engine.noise import seeded_noise
from ...engine.portraits.models import Portraits, load_portraits
from ...engine.portraits.sampling import decode
from ...engine.portraits.shipped import load_transformer, transformer_folder
from ...engine.sampling import sample
from ...engine.schedule import NoiseSchedule
from ...engine.training import set_rate
from ..portraits.transformer import SiblingData, save_transformer

NEUTRAL: dict[str, float] = {
    "flip": 0.0, "crop_top": 0.0, "crop_left": 0.0, "aspect": 1.0, "height": 64.0, "width": 64.0,
}  # fmt: skip
SIDE, STEPS, GUIDANCE = 64, 20, 2.0


# --- training -----------------------------------------------------------------------------------------------------
class SiblingTrainer(ControlTrainer):
    """The recipe on latents encoded beforehand, with losses weighted by 1 / sqrt(SNR) as the portraits UNet's were.

    Args:
        decay_from: step from which the rate falls to zero at the end; by default the last quarter. ``config.steps``
            keeps it constant.
        warmup: steps over which the rate rises.
    """

    def __init__(
        self, transformer: Any, embedder: ControlEmbedder, data: SiblingData, null: torch.Tensor,
        schedule: NoiseSchedule, config: ControlTrainConfig, folder: str | Path, decay_from: int | None = None,
        warmup: int = 100,
    ) -> None:  # fmt: skip
        self.data, self.decay_from = data, config.steps * 3 // 4 if decay_from is None else decay_from
        self.warmup, self.transformer = warmup, transformer
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
        """Weighted noise prediction, Eq. 1 inside."""
        self.set_learning_rate()
        added = self.embedder(batch.values, self.config.gamma.u(batch.t), self.config.gamma, batch.drop)
        x = self.schedule.add_noise(batch.x0, batch.noise, batch.t)
        found = self.network(x, batch.t.float(), batch.semantics, added)
        signal, noise = self.schedule.scales(batch.t)
        weight = (noise / signal).clamp(max=4.0).float()
        return ((found - batch.noise).square().flatten(1).mean(1) * weight).mean()

    def set_learning_rate(self) -> None:
        """The rate of this step: it rises first and falls at the end."""
        rate = min(1.0, (self.done + 1) / self.warmup)
        if self.done > self.decay_from:
            rate *= 1 - (self.done - self.decay_from) / max(1, self.config.steps - self.decay_from)
        set_rate(self.adam, self.config.lr * rate)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, transformer and embedder have the averaged weights."""
        own = {k: p.detach().clone() for k, p in self.parameters.items()}
        try:
            for key, parameter in self.parameters.items():
                parameter.data.copy_(self.average.values[key])
            yield
        finally:
            for key, parameter in self.parameters.items():
                parameter.data.copy_(own[key])


def export_sibling(
    trainer: SiblingTrainer, folder: Path, name: str, schedule: Mapping[str, Any] | None = None,
    pos_embed: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """The averaged transformer and its control file in ``folder/name/``; returns the control file.

    Args:
        schedule, pos_embed: what :class:`ControlMetadata` says of them, for a model of another picture size.
    """
    with trainer.averaged():
        save_transformer(trainer.transformer, folder / name)
        mine = {k: v.detach().half() for k, v in trainer.embedder.state_dict().items()}
    facts = ControlMetadata(
        "PixArtTransformer2DModel", trainer.embedder.dim, trainer.embedder.spec, trainer.config.gamma,
        "vitrine portraits sibling", prediction="eps", steps=trainer.done, crop=(0.7, 1.0), licence="Apache-2.0",
        schedule=schedule or {}, pos_embed=pos_embed or {},
    )  # fmt: skip
    return save_control(folder / name / "control.safetensors", mine, facts, {})


def load_sibling(name: str | Path = "power-cosine") -> tuple[Any, ControlEmbedder, GammaConfig]:
    """Transformer, embedder and the curve it was trained with."""
    checkpoint = load_control(transformer_folder(name) / "control.safetensors")
    return load_transformer(name), checkpoint.embedder, checkpoint.metadata.gamma


# --- drawing ------------------------------------------------------------------------------------------------------
@dataclass
class Sibling:
    """A sibling with the portraits model's text encoder and VAE: draws under given controls.

    It has a pipeline's ``transformer``, ``scheduler`` and ``vae``, so ``resolution.apply`` takes it as one.

    Attributes:
        scheduler: the portraits model's, or the one in the sibling's folder.
        side: of the pictures it was trained on, in pixels.
    """

    portraits: Portraits
    transformer: Any
    embedder: ControlEmbedder
    gamma: GammaConfig
    scheduler: Any
    side: int = SIDE

    @classmethod
    def open(cls, name: str, portraits: Portraits | None = None) -> Sibling:
        """A shipped one by name, or one from a folder."""
        from diffusers import DDIMScheduler

        portraits, folder = portraits or load_portraits(), transformer_folder(name)
        own = (folder / "scheduler_config.json").is_file()
        scheduler = DDIMScheduler.from_pretrained(folder) if own else portraits.scheduler
        side = load_control(folder / "control.safetensors").metadata.schedule.get("s_now", SIDE)
        return cls(portraits, *load_sibling(name), scheduler, int(side))

    @property
    def vae(self) -> Any:
        """The portraits model's."""
        return self.portraits.vae

    @torch.no_grad()
    def draw(
        self, prompts: list[str], seeds: list[int], controls: dict[str, float] | None = None, *, steps: int = STEPS,
        guidance: float = GUIDANCE, batch: int = 32, silent_controls: bool = False, side: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """(N, 3, side, side) in [0, 1].

        Args:
            controls: over ``NEUTRAL``, in which the size told is the size drawn.
            guidance: 1 makes one evaluation a step.
            silent_controls: drop the controls in both branches.
            side: in pixels; None is the size trained on.
        """
        side = side or self.side
        told = NEUTRAL | {"height": float(side), "width": float(side)} | (controls or {})
        values, out = self.embedder.spec.rows(told), []
        for start in range(0, len(prompts), batch):
            part = slice(start, start + batch)
            noise = seeded_noise(seeds[part], (4, side // 4, side // 4))
            latents = self._latents(prompts[part], noise, values, steps, guidance, silent_controls)
            out.append(decode(self.portraits, latents))
        return torch.cat(out)

    def _latents(
        self, prompts: list[str], noise: torch.Tensor, values: torch.Tensor, steps: int, guidance: float, quiet: bool
    ) -> torch.Tensor:
        rows = len(prompts) * (1 if guidance == 1 else 2)  # the second half is that of the empty prompt
        drop = torch.arange(rows) >= (0 if quiet else len(prompts))
        cond, null = (Condition(self.portraits.encode(texts)) for texts in (prompts, [""]))
        denoiser = Denoiser.from_diffusers(self.transformer, self.scheduler)
        with Injection(self.transformer, self.embedder, values.expand(rows, -1), self.gamma, drop):
            return sample(denoiser, noise, self.scheduler, steps, cond, null=null, guidance=guidance)
