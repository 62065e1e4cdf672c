"""How the flow portraits are made: renders -> autoencoder -> cached latents -> transformer and text encoder.

As in ``portraits``, every phase resumes from its state bit for bit: a batch depends on (seed, step) only. The pictures
are drawn for the autoencoder alone; what the transformer learns from is a file of latents and token ids. The
shipped model's decoder was then trained further; that recipe is in commit b54c2ddf.

``python -m vitrine.evidence.recipes flow --out FOLDER`` on a CPU, or with
``--device cuda --dtype bfloat16 --flow-batch 256`` on a GPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...engine.diffusion.schedule import append_dims
from ...engine.families.packing import grid_ids, pack
from ...engine.io.files import write_json
from ...engine.jobs.run import Run
from ...engine.portraits.flow import (
    LATENT_SHAPE,
    SIDE,
    FlowPortraits,
    build_flow_models,
    standardise,
)
from ...engine.portraits.models import save_portraits
from ...engine.portraits.preview import write_preview
from ...engine.runtime.processes import accelerator as accelerator_for
from ...engine.runtime.progress import Progress, silent
from .phase import OutOfTime, Phase, own_rows, record_of, run_of
from .portraits import face_map, reconstruct
from .settings import FlowTrainConfig
from .training_set import TrainingSet, build_training_set, load_training_set, save_training_set

if TYPE_CHECKING:
    from accelerate import Accelerator

PICTURES, LATENTS = "pictures.safetensors", "latents.safetensors"
RENDER, AUTOENCODER, ENCODE, TRANSFORMER = "pictures", "autoencoder", "latents", "transformer"
STAGES = RENDER, AUTOENCODER, ENCODE, TRANSFORMER
"""What is done, in order, as the console names it."""


def picture_error(error: torch.Tensor, edge_weight: float) -> torch.Tensor:
    """L1 + 2 MSE of (B, 3, H, W) differences, and L1 of the differences between neighbours."""
    edges = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
    return error.abs().mean() + 2 * error.square().mean() + edge_weight * edges


def train_vae(
    config: FlowTrainConfig,
    accelerator: Accelerator,
    model: FlowPortraits,
    data: TrainingSet | None,
    deadline: float,
    progress: Progress,
) -> None:
    """Phase 1. :func:`picture_error` and a little KL. A finished one needs no ``data``."""
    vae, advanced = model.vae.to(accelerator.device).train(), config.advanced
    phase = Phase("vae", config, vae, config.vae_steps, advanced.vae_lr)
    run = torch.compile(reconstruct) if config.compile else reconstruct

    def loss_of_step() -> torch.Tensor:
        assert data is not None
        g = phase.generator(2, accelerator.device)
        pick = torch.randint(len(data), (advanced.vae_batch,), generator=g, device=accelerator.device)
        images = data.images[pick].float() / 127.5 - 1
        noise = torch.randn(len(pick), *LATENT_SHAPE, generator=g, device=images.device)
        images, noise = own_rows(accelerator, images, noise)
        output, kl = run(vae, images, noise)
        return picture_error(output.float() - images, advanced.edge_weight) + advanced.kl_weight * kl

    if not phase.done:
        phase.run(accelerator, loss_of_step, deadline, progress)
    phase.use_average()
    vae.eval()


@dataclass(frozen=True)
class Latents:
    """What the transformer learns from: a :class:`~.training_set.TrainingSet` with latents in place of pictures.

    Attributes:
        data: its ``images`` are empty, (N + P, 0).
        packed: (N + P, 64, 64) tokens of mean 0 and deviation 1 in every latent channel.
        mean, deviation: (16,) of the latents before that, to be folded into the autoencoder.
    """

    data: TrainingSet
    packed: torch.Tensor
    mean: torch.Tensor
    deviation: torch.Tensor


@torch.no_grad()
def posterior_means(vae: Any, data: TrainingSet, progress: Progress, batch: int = 32) -> torch.Tensor:
    """(N + P, 16, 16, 16) latents of all pictures."""
    means = []
    for chunk in data.images.split(batch):
        means.append(vae.encode(chunk.float() / 127.5 - 1).latent_dist.mean)
        progress(len(means) * batch, len(data), None)
    return torch.cat(means)


@torch.no_grad()
def encode_all(vae: Any, data: TrainingSet, run: Run, progress: Progress, batch: int = 32) -> Latents:
    """Posterior means of all pictures, kept in the run's file with the token ids."""
    latents = posterior_means(vae, data, progress, batch)
    mean, deviation = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    packed = pack((latents - append_dims(mean, 3)) / append_dims(deviation, 3))
    bare = replace(data, images=data.images.new_empty(len(data), 0))
    save_training_set(run, bare, packed=packed.half(), mean=mean, deviation=deviation)
    return read_latents(run, data.images.device)


def read_latents(run: Run, device: torch.device) -> Latents:
    """What :func:`encode_all` wrote."""
    data, table = load_training_set(run, device)
    return Latents(data, table["packed"].float(), table["mean"], table["deviation"])


class TextToVelocity(nn.Module):
    """Transformer and text encoder as one trainable module: (tokens, time in [0, 1], token ids) -> velocity."""

    def __init__(self, model: FlowPortraits) -> None:
        super().__init__()
        self.transformer, self.text_encoder = model.transformer, model.text_encoder
        self.register_buffer("img_ids", grid_ids(torch.empty(1, *LATENT_SHAPE)), persistent=False)

    def forward(self, x: torch.Tensor, t: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        text = self.text_encoder(ids).last_hidden_state
        pooled = x.new_zeros(len(x), self.transformer.config.pooled_projection_dim)
        return self.transformer(
            hidden_states=x,
            encoder_hidden_states=text,
            pooled_projections=pooled,
            timestep=t,
            img_ids=self.img_ids,
            txt_ids=x.new_zeros(ids.shape[1], 3),
        ).sample


def train_flow(
    config: FlowTrainConfig,
    accelerator: Accelerator,
    both: TextToVelocity,
    latents: Latents,
    deadline: float,
    progress: Progress,
) -> None:
    """Phase 2. Rectified flow with logit-normal times (Esser et al. 2024, Eq. 13 and 19); plants keep their share.

    The error counts more over the face, the cheeks and the ends of a brim, as for the 64 px model: it does not move the
    optimum, which is pointwise.
    """
    device, advanced, data = accelerator.device, config.advanced, latents.data
    phase = Phase(
        "flow", config, both.to(device).train(), config.flow_steps, advanced.flow_lr, inputs={"latents": latents.packed}
    )
    where = pack(face_map(advanced.face_weight, SIDE // 8).expand(1, 16, -1, -1)).to(device)
    run = torch.compile(both) if config.compile else both

    def loss_of_step() -> torch.Tensor:
        g = phase.generator(3, device)
        pick = data.pick(advanced.flow_batch, advanced.plant_share, g)
        x0, ids = latents.packed[pick], data.ids_for(pick, g)
        dropped = torch.rand(len(pick), generator=g, device=device) < advanced.caption_dropout
        ids = torch.where(dropped[:, None], data.empty_ids, ids)
        t = torch.sigmoid(advanced.time_mean + torch.randn(len(pick), generator=g, device=device))
        noise = torch.randn(x0.shape, generator=g, device=device)
        x0, ids, t, noise = own_rows(accelerator, x0, ids, t, noise)
        s = append_dims(t, 3)
        # Esser et al. 2024, Eq. 13: z_t = (1 - t) x0 + t eps; the velocity is eps - x0
        return ((run((1 - s) * x0 + s * noise, t, ids).float() - (noise - x0)).square() * where).mean()

    try:
        if not phase.done:
            phase.run(accelerator, loss_of_step, deadline, progress)
    finally:
        phase.use_average()
        both.eval()


def main(config: FlowTrainConfig, progress: Callable[[str], Progress] = lambda name: silent) -> Path:
    """Run all phases; the finished model is in ``OUT/flow-portraits``. Returns that folder.

    Raises:
        OutOfTime: If ``max_seconds`` is used up; an unfinished transformer is exported to ``OUT/unfinished``.
    """
    accelerator = accelerator_of(config)
    with run_of("train flow", config, accelerator):
        return _trained(config, accelerator, progress)


def _trained(config: FlowTrainConfig, accelerator: Accelerator, progress: Callable[[str], Progress]) -> Path:
    deadline, out = time.monotonic() + config.max_seconds, Path(config.out)
    model = build_flow_models(config.seed, out / "tokenizer")
    latents = prepare(config, accelerator, model, deadline, progress)
    standardise(model.vae, latents.mean, latents.deviation)
    try:
        train_flow(config, accelerator, TextToVelocity(model), latents, deadline, progress(TRANSFORMER))
    except OutOfTime:
        if accelerator.is_main_process:
            export(config, model, out / "unfinished", accelerator.device)
        raise
    folder = out / "flow-portraits"
    if accelerator.is_main_process:
        export(config, model, folder, accelerator.device)
    return folder


def accelerator_of(config: FlowTrainConfig) -> Accelerator:
    """Device and precision of the run."""
    made: Accelerator = accelerator_for("bf16" if config.dtype == "bfloat16" else "no", config.device == "cpu")
    return made


def prepare(
    config: FlowTrainConfig,
    accelerator: Accelerator,
    model: FlowPortraits,
    deadline: float,
    progress: Callable[[str], Progress],
) -> Latents:
    """Pictures, autoencoder, latents; pictures are drawn only where something still needs them."""
    out, device = Path(config.out), accelerator.device
    known = (out / LATENTS).is_file()
    data = None if known else pictures(config, model, device, progress)
    train_vae(config, accelerator, model, data, deadline, progress(AUTOENCODER))
    run = Run(out / LATENTS, "latents of the training pictures", {**drawn_by(config), "autoencoder": model.vae})
    if data is None:
        return read_latents(run, device)
    latents = encode_all(model.vae, data, run, progress(ENCODE))
    (out / PICTURES).unlink()
    return latents


def drawn_by(config: FlowTrainConfig) -> dict[str, object]:
    """The settings that the training pictures depend on."""
    return {"settings": {"pictures": config.pictures, "colourings": config.advanced.colourings, "side": SIDE}}


def pictures(
    config: FlowTrainConfig,
    model: FlowPortraits,
    device: torch.device,
    progress: Callable[[str], Progress],
) -> TrainingSet:
    """The training pictures, drawn and kept in the run's folder unless they stand there."""
    path = Path(config.out) / PICTURES
    run = Run(path, "training pictures", {**drawn_by(config), "tokenizer": model.tokenizer})
    if not path.is_file():
        drawn = build_training_set(
            config.pictures,
            model.tokenizer,
            device,
            progress(RENDER),
            size=SIDE,
            details=True,
            colourings=config.advanced.colourings,
        )
        save_training_set(run, drawn)
    return load_training_set(run, device)[0]


def export(config: FlowTrainConfig, model: FlowPortraits, folder: Path, device: torch.device) -> None:
    """The model as a FluxPipeline folder with the record of its training."""
    save_portraits(model, folder)
    write_preview(folder, model)
    phases = {name: record_of(Path(config.out) / name) for name in ("vae", "flow")}
    settings = {k: v for k, v in (config.to_dict() | config.advanced.to_dict()).items() if k not in ("out", "advanced")}
    settings["max_seconds"] = "inf" if math.isinf(config.max_seconds) else config.max_seconds
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    record = {"settings": settings, "phases": phases, "device": machine, "torch": torch.__version__}
    write_json(folder / "training.json", record)
