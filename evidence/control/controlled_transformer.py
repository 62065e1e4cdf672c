"""The portraits transformer with a control embedder inside: loading, sampling, training, exporting.

The only module of the portraits that depends on a method: evidence that needs a model with size, crop and flip
conditions uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...engine.control import (
    ControlEmbedder,
    ControlMetadata,
    GammaConfig,
    Injection,
    injected,
    load_control,
    save_control,
    time_embedding,
)
from ...engine.control.control_trainer import Batch, ControlTrainConfig, ControlTrainer, TrainSetup
from ...engine.diffusion.denoiser import Denoiser
from ...engine.diffusion.noise import seeded_noise
from ...engine.diffusion.sampling import sample
from ...engine.diffusion.schedule import NoiseSchedule
from ...engine.families import call_of
from ...engine.jobs.training import learning_rate, set_rate
from ...engine.network.condition import Condition
from ...engine.portraits.models import Portraits, load_portraits
from ...engine.portraits.shipped import load_transformer, transformer_folder
from ..portraits.sampling import decode
from ..portraits.transformer import TransformerData, save_transformer

NEUTRAL: dict[str, float] = {
    "flip": 0.0,
    "crop_top": 0.0,
    "crop_left": 0.0,
    "aspect": 1.0,
    "height": 64.0,
    "width": 64.0,
}
SIDE, STEPS, GUIDANCE = 64, 20, 2.0
BASE_MODEL = "vitrine portraits transformer"


# --- sampling ----------------------------------------------------------------------------------------------------
@dataclass
class ControlledTransformer:
    """The portraits transformer with its control embedder, and the portraits model's text encoder and VAE.

    It has a pipeline's ``transformer``, ``scheduler`` and ``vae``, so ``resolution.apply`` accepts it.

    Attributes:
        scheduler: the portraits model's, or the one in the transformer's folder.
        side: of the training images, in pixels.
    """

    portraits: Portraits
    transformer: Any
    embedder: ControlEmbedder
    gamma: GammaConfig
    scheduler: Any
    side: int = SIDE

    @classmethod
    def open(cls, name: str, portraits: Portraits | None = None) -> ControlledTransformer:
        """Loads a shipped one by name, or one from a folder."""
        from diffusers import DDIMScheduler

        portraits, folder = portraits or load_portraits(), transformer_folder(name)
        has_scheduler = (folder / "scheduler_config.json").is_file()
        scheduler = DDIMScheduler.from_pretrained(folder) if has_scheduler else portraits.scheduler
        side = load_control(folder / "control.safetensors").metadata.schedule.get("s_now", SIDE)
        return cls(portraits, *load_controlled(name), scheduler, int(side))

    @property
    def vae(self) -> Any:
        """The portraits model's."""
        return self.portraits.vae

    @property
    def device(self) -> torch.device:
        """The transformer's device; text encoder and autoencoder may be on another."""
        return next(self.transformer.parameters()).device

    def to(self, device: torch.device) -> ControlledTransformer:
        """Move all parts, in place."""
        for part in (self.transformer, self.embedder, self.portraits.text_encoder, self.portraits.vae):
            part.to(device)
        return self

    @torch.no_grad()
    def draw(
        self,
        prompts: list[str],
        seeds: list[int],
        controls: dict[str, float] | None = None,
        *,
        steps: int = STEPS,
        guidance: float = GUIDANCE,
        batch: int = 32,
        silent_controls: bool = False,
        side: int | None = None,
    ) -> torch.Tensor:
        """Samples images (N, 3, side, side) in [0, 1].

        Args:
            controls: overrides of ``NEUTRAL``, whose size is the sampled size.
            guidance: 1 takes one evaluation per step.
            silent_controls: drop the controls in both branches.
            side: in pixels; None is the training size.
        """
        side = side or self.side
        controls = NEUTRAL | {"height": float(side), "width": float(side)} | (controls or {})
        values, images = self.embedder.spec.rows(controls), []
        for start in range(0, len(prompts), batch):
            rows = slice(start, start + batch)
            noise = seeded_noise(seeds[rows], (4, side // 4, side // 4)).to(self.device)
            latents = self._latents(prompts[rows], noise, values, steps, guidance, silent_controls)
            images.append(decode(self.portraits, latents).cpu())
        return torch.cat(images)

    def _latents(
        self, prompts: list[str], noise: torch.Tensor, values: torch.Tensor, steps: int, guidance: float, dropped: bool
    ) -> torch.Tensor:
        rows = len(prompts) * (1 if guidance == 1 else 2)  # the second half has the empty prompt
        drop = torch.arange(rows) >= (0 if dropped else len(prompts))
        cond, null = (Condition(self.portraits.encode(texts).to(self.device)) for texts in (prompts, [""]))
        denoiser = Denoiser.from_diffusers(self.transformer, self.scheduler)
        with Injection(self.transformer, self.embedder, values.expand(rows, -1), self.gamma, drop):
            return sample(denoiser, noise, self.scheduler, steps, cond, null=null, guidance=guidance)


def load_controlled(name: str | Path = "power-cosine") -> tuple[Any, ControlEmbedder, GammaConfig]:
    """Transformer, embedder and training curve, by name or folder."""
    checkpoint = load_control(transformer_folder(name) / "control.safetensors")
    return load_transformer(name), checkpoint.embedder, checkpoint.metadata.gamma


# --- training -----------------------------------------------------------------------------------------------------
class TransformerTrainer(ControlTrainer):
    """The recipe on latents encoded beforehand, with losses weighted by 1 / sqrt(SNR) as for the portraits UNet.

    Args:
        model: trained in place; its current scheduler gives the noise schedule.
        decay_from: step from which the learning rate falls to zero at the end; by default the last quarter.
            ``config.steps`` keeps it constant.
        warmup: steps of linear warm-up.
    """

    def __init__(
        self,
        model: ControlledTransformer,
        data: TransformerData,
        config: ControlTrainConfig,
        folder: str | Path,
        decay_from: int | None = None,
        warmup: int = 100,
    ) -> None:
        model.transformer.train().requires_grad_(True)
        embedder = model.embedder.float().train().requires_grad_(True)
        self.transformer, self.data, self.warmup = model.transformer, data, warmup
        self.decay_from = config.steps * 3 // 4 if decay_from is None else decay_from
        self._values = embedder.spec.rows({name: data.controls[name] for name in embedder.spec.names})
        with torch.no_grad():
            null = model.portraits.encode([""])[0].to(model.device, copy=True)
        trainee = TrainSetup(
            injected(model.transformer, text_call(model.transformer)),
            embedder,
            NoiseSchedule.from_diffusers(model.scheduler),
            null,
            dict(model.transformer.named_parameters()),
        )
        metadata = ControlMetadata(time_embedding(model.transformer)[0], embedder.dim, base_model=BASE_MODEL)
        made_of = {"pictures": data, "decay": [self.decay_from, warmup], "lesson": type(self).__name__}
        super().__init__(trainee, [], config, folder, metadata, model.device, made_of)

    def sample_batch(self, step: int) -> Batch:
        """Samples the batch from the step's seed, always on the CPU."""
        random, count = torch.Generator().manual_seed(self._seed(step)), self.config.batch
        rows = torch.randint(len(self.data.latents), (count,), generator=random)
        text = self.data.text[rows].to(self.device, torch.float32)
        unsaid = torch.rand(count, generator=random) < self.config.advanced.drop_semantics
        text = torch.where(unsaid[:, None, None].to(self.device), self.null, text)
        x0 = self.data.latents[rows].to(self.device, torch.float32)
        noise = torch.randn(x0.shape, generator=random).to(self.device)
        t = torch.randint(self.schedule.steps, (count,), generator=random)
        drop = torch.rand(count, generator=random) < self.config.advanced.drop_control
        drop = drop | unsaid if self.config.advanced.drop_together else drop
        return Batch(x0, noise, t, text, self._values[rows], drop)

    def loss(self, batch: Batch) -> torch.Tensor:
        """Weighted mean square error of the predicted noise, with Eq. 1 inside."""
        self.set_learning_rate()
        added = self.embedder(batch.values, self.config.gamma.u(batch.t), self.config.gamma, batch.drop)
        x = self.schedule.add_noise(batch.x0, batch.noise, batch.t)
        prediction = self.network(x, batch.t.to(self.device, torch.float32), batch.semantics, added)
        signal, noise = self.schedule.scales(batch.t)
        weight = (noise / signal).clamp(max=4.0).to(prediction)
        return ((prediction - batch.noise).square().flatten(1).mean(1) * weight).mean()

    def set_learning_rate(self) -> None:
        """Sets the learning rate of this step: warm-up, constant, decay."""
        steps, falling = self.config.steps, self.config.steps - self.decay_from
        rate = learning_rate(self.config.lr, "linear", self.done, steps, warmup=self.warmup, falling=falling)
        set_rate(self.adam, rate)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Uses the averaged weights of transformer and embedder while the block is open."""
        trained = {k: p.detach().clone() for k, p in self.parameters.items()}
        try:
            for key, parameter in self.parameters.items():
                parameter.data.copy_(self.average.values[key])
            yield
        finally:
            for key, parameter in self.parameters.items():
                parameter.data.copy_(trained[key])


def export_transformer(
    trainer: TransformerTrainer,
    folder: Path,
    name: str,
    schedule: Mapping[str, Any] | None = None,
    pos_embed: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the averaged transformer and its control file to ``folder/name/``; returns the control file.

    Args:
        schedule, pos_embed: entries of :class:`ControlMetadata`, for a model of another image size.
    """
    with trainer.averaged():
        save_transformer(trainer.transformer, folder / name)
        weights = {k: v.detach().half() for k, v in trainer.embedder.state_dict().items()}
    metadata = ControlMetadata(
        time_embedding(trainer.transformer)[0],
        trainer.embedder.dim,
        trainer.embedder.spec,
        trainer.config.gamma,
        BASE_MODEL,
        prediction="eps",
        steps=trainer.done,
        crop=(0.7, 1.0),
        licence="Apache-2.0",
        schedule=schedule or {},
        pos_embed=pos_embed or {},
    )
    return save_control(folder / name / "control.safetensors", weights, metadata)


def text_call(transformer: Any) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """(x_t, t, text states) -> prediction."""
    call = call_of(transformer)
    return lambda x, t, text: call(x, t, Condition(text))
