"""The flow portraits fine-tuned at twice their side: a short LoRA training, with scaled rotary positions.

Trained on renders of 256 px by flow matching, with timesteps shifted for the size as in sampling. A run has a folder
with its state, from which it resumes bit for bit: a batch depends only on seed and step.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...engine.diffusion.schedule import append_dims
from ...engine.errors import refuse
from ...engine.families.packing import grid_ids, pack
from ...engine.io.files import read_safetensors, save_safetensors
from ...engine.jobs.run import Run, run_steps
from ...engine.jobs.training import learning_rate, set_rate
from ...engine.portraits.captions import caption
from ...engine.portraits.flow import FlowPortraits, load_flow_portraits
from ...engine.portraits.render import render
from ...engine.portraits.scenes import sample_scenes
from ...engine.resolution import ResolutionTransferConfig
from ...engine.resolution.transfer import apply
from ...engine.runtime.progress import Progress, silent
from ...engine.settings.config import Config
from .positions import TRAINED

SIDE, FIRST = 256, 8_500_000
"""Image side, and the first scene of the training images, which no prompt uses."""
LAYERS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "net.0.proj",
          "net.2", "proj_mlp", "proj_out")  # fmt: skip
_TIME_MEAN, _WARM, _EMPTY, _CHUNK = 0.4, 5, 0.1, 8


@dataclass(frozen=True)
class TuneConfig(Config):
    """Settings of one run.

    Attributes:
        positions: static mode of rotary positions, in training and sampling.
        rank, batch, lr: of the LoRA, batch size, highest learning rate of AdamW, which falls to zero at the end.
        steps, pictures: updates, and training images, rendered and encoded once.
    """

    positions: str = "rope_yarn"
    rank: int = 16
    batch: int = 4
    lr: float = 1e-3
    steps: int = 200
    pictures: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.rank, self.batch, self.steps, self.pictures) < 1 or not self.lr > 0:
            numbers = (self.rank, self.batch, self.steps, self.pictures, self.lr)
            raise refuse("rank, batch, steps, pictures, lr", numbers, "1 or more, lr above 0", "see TuneConfig")
        if self.positions not in ("keep", "rope_pi", "rope_ntk", "rope_yarn"):
            raise refuse(
                "positions", self.positions, "keep, rope_pi, rope_ntk, rope_yarn", "training is of static ones"
            )


@dataclass(frozen=True)
class _Pictures:
    """(N, tokens, channels) latents and (N + 1, T, C) text states, with the empty prompt last."""

    latents: torch.Tensor
    text: torch.Tensor


@torch.no_grad()
def _pictures(model: FlowPortraits, count: int, path: Path, progress: Progress) -> _Pictures:
    """Renders of :data:`SIDE` pixels through the model's autoencoder, computed once and stored in ``path``."""
    if path.is_file() and len((table := read_safetensors(path)[0])["latents"]) == count:
        return _Pictures(table["latents"].float(), table["text"].float())
    scenes, parts = sample_scenes(range(FIRST, FIRST + count)), []
    for start in range(0, count, _CHUNK):
        images = render(scenes[start : start + _CHUNK], SIDE, details=True).images
        parts.append(pack(model.vae.encode(images * 2 - 1).latent_dist.mean))
        progress(min(count, start + _CHUNK), count, None)
    latents, text = torch.cat(parts).half(), model.encode([*caption(scenes), ""]).half()
    save_safetensors(path, {"latents": latents, "text": text}, {})
    return _Pictures(latents.float(), text.float())  # as a later call reads them


class _Tuning:
    """The trainable copy, its optimiser and its state on disk."""

    def __init__(self, model: FlowPortraits, config: TuneConfig, data: _Pictures, folder: Path) -> None:
        from peft import LoraConfig

        net = copy.deepcopy(model.transformer).requires_grad_(False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            net.add_adapter(LoraConfig(r=config.rank, lora_alpha=config.rank, target_modules=list(LAYERS)))
        self.model, self.config, self.data = replace(model, transformer=net), config, data
        self.weights = {name: p for name, p in net.named_parameters() if p.requires_grad}
        self.adam = torch.optim.AdamW(self.weights.values(), config.lr, betas=(0.9, 0.99), weight_decay=0.0)
        self.done, self.losses, self.device = 0, list[float](), next(net.parameters()).device
        self._ids = grid_ids(torch.empty(1, 1, SIDE // 8, SIDE // 8)).to(self.device)
        inputs = {"network": model.transformer, "text states and pictures": data, "settings": config}
        self.run = Run(folder, "tuning at twice the side", inputs)
        state = self.run.load({"adamw": self.adam})
        if state is not None:
            self.done, self.losses = state.facts["step"], state.facts["losses"]
            for name, parameter in self.weights.items():
                parameter.data.copy_(state.tensors["lora"][name])

    def step(self) -> None:
        """One update; images, noise and timesteps are sampled from seed and step."""
        config, data = self.config, self.data
        g = torch.Generator().manual_seed(1_000_003 * config.seed + self.done)
        rows = torch.randint(len(data.latents), (config.batch,), generator=g)
        empty = torch.rand(config.batch, generator=g) < _EMPTY
        t = torch.sigmoid(_TIME_MEAN + torch.randn(config.batch, generator=g))
        ratio = SIDE / TRAINED
        t = ratio * t / (1 + (ratio - 1) * t)  # Esser et al. 2024, Eq. 23: equally noisy for its size as in training
        drawn = data.latents[rows], data.text[torch.where(empty, len(data.text) - 1, rows)]
        noise = torch.randn(drawn[0].shape, generator=g)
        x0, text, noise, t = (tensor.to(self.device) for tensor in (*drawn, noise, t))
        s = append_dims(t, 3)
        output = self.model.transformer(
            hidden_states=(1 - s) * x0 + s * noise, encoder_hidden_states=text,
            pooled_projections=self.model.condition(text).pooled, timestep=t, img_ids=self._ids,
            txt_ids=torch.zeros(text.shape[1], 3, device=self.device),
        ).sample  # fmt: skip
        loss = (output - (noise - x0)).square().mean()
        set_rate(self.adam, learning_rate(config.lr, "linear", self.done, config.steps, warmup=_WARM))
        self.adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        self.adam.step()
        self.done += 1
        self.losses.append(round(float(loss.detach()), 5))

    def save(self) -> None:
        """Writes the state atomically."""
        self.run.save({"lora": self.weights}, {"adamw": self.adam}, {"step": self.done, "losses": self.losses})


def transfer_of(config: TuneConfig, size: tuple[int, int] = (SIDE, SIDE)) -> ResolutionTransferConfig:
    """The transfer applied in training and sampling."""
    return ResolutionTransferConfig(size, (TRAINED, TRAINED), pos_embed=config.positions)


def tune(
    folder: str | Path, config: TuneConfig | None = None, until: int | None = None, progress: Progress = silent,
    device: torch.device | None = None,
) -> FlowPortraits:  # fmt: skip
    """Trains or resumes; returns the model with its LoRA, for ``positions.draw`` in that mode.

    Args:
        folder: of several runs, which share ``pictures.safetensors`` and have a subfolder each.
        until: stop after this step, with the state saved.
        device: of training and of the returned model; None is the CPU. Images are encoded on the CPU.
    """
    config, folder = config or TuneConfig(), Path(folder)
    model = load_flow_portraits()
    data = _pictures(model, config.pictures, folder / "pictures.safetensors", silent)
    model.transformer.to(device or "cpu")
    tuning = _Tuning(model, config, data, folder / f"{config.positions}-{config.seed}")
    with tuning.run, torch.enable_grad(), apply(tuning.model.pipeline(), transfer_of(config)):
        tuning.model.transformer.train()
        run_steps(
            tuning.step, lambda: tuning.done, config.steps, until=until, save=tuning.save, save_every=25,
            progress=progress,
        )  # fmt: skip
    tuning.model.transformer.eval()
    return tuning.model
