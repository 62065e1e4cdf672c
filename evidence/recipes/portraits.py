"""How the portraits model was made: renders -> attribute classifier -> autoencoder -> latents -> UNet and text encoder.

Every phase writes a resumable state: what is finished is skipped and what was interrupted resumes, bit for bit, because
the batch of a step depends on (seed, step) only. One CPU core will do; a GPU makes it minutes.

Run ``python -m vitrine.evidence.recipes portraits``; on CPU cores processes share the rows of each batch::

    torchrun --nproc-per-node 2 -m vitrine.evidence.recipes portraits

On two cores two processes of one thread are a third faster than one of two (0.24 against 0.34 seconds a step).
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...engine.diffusion.schedule import append_dims
from ...engine.io.files import save_safetensors, write_json
from ...engine.jobs.run import state_facts
from ...engine.portraits.dataset import PORTRAITS, Dataset
from ...engine.portraits.models import Portraits, build_models, save_portraits
from ...engine.portraits.preview import write_preview
from ...engine.runtime.processes import accelerator as accelerator_for
from ...engine.runtime.processes import launched
from ...engine.runtime.progress import Progress, silent
from ..portraits.avataaars import LAYERS, avataaars
from ..portraits.classifier import AttributeClassifier, classifier_loss
from .phase import OutOfTime, Phase, own_rows, run_of
from .settings import TrainConfig
from .training_set import TrainingSet, build_training_set

if TYPE_CHECKING:
    from accelerate import Accelerator

RENDER, CLASSIFIER, AUTOENCODER, UNET = "pictures", "attribute classifier", "autoencoder", "UNet"
STAGES = RENDER, CLASSIFIER, AUTOENCODER, UNET
"""What is done, in order, as the console names it."""


def train_classifier(
    config: TrainConfig,
    accelerator: Accelerator,
    dataset: Dataset,
    data: TrainingSet,
    deadline: float,
    progress: Progress,
) -> AttributeClassifier:
    """Phase 1. Renders with a little blur, noise and brightness change, so that it reads decoded samples as well."""
    torch.manual_seed(config.seed)
    net = AttributeClassifier(dataset).to(accelerator.device)
    inputs = pictures_of(dataset)
    phase = Phase("readout", config, net, config.readout_steps, config.advanced.readout_lr, inputs=inputs)

    def loss_of_step() -> torch.Tensor:
        g = phase.generator(1, accelerator.device)
        pick = torch.randint(len(data), (config.advanced.readout_batch,), generator=g, device=accelerator.device)
        images = data.images[pick].float() / 255
        images = images + 0.03 * torch.rand(len(pick), 1, 1, 1, generator=g, device=images.device) * torch.randn(
            images.shape, generator=g, device=images.device
        )
        soft = nn.functional.avg_pool2d(images, 3, 1, 1, count_include_pad=False)
        mix = 0.6 * torch.rand(len(pick), 1, 1, 1, generator=g, device=images.device)
        seen, pick = own_rows(accelerator, images + mix * (soft - images), pick)
        return classifier_loss(net(seen), data.attributes[pick], data.keypoints[pick], dataset)

    phase.run(accelerator, loss_of_step, deadline, progress)
    phase.use_average()
    return net.eval()


def train_vae(
    config: TrainConfig,
    accelerator: Accelerator,
    model: Portraits,
    data: TrainingSet,
    deadline: float,
    progress: Progress,
) -> None:
    """Phase 2. L1 + 2 MSE + a trace of KL, as in the latent-diffusion autoencoders without their adversary."""
    vae = model.vae.to(accelerator.device).train()
    inputs = pictures_of(model.dataset)
    phase = Phase("vae", config, vae, config.vae_steps, config.advanced.vae_lr, inputs=inputs)
    run = torch.compile(reconstruct) if config.compile else reconstruct

    def loss_of_step() -> torch.Tensor:
        g = phase.generator(2, accelerator.device)
        pick = torch.randint(len(data), (config.advanced.vae_batch,), generator=g, device=accelerator.device)
        images = data.images[pick].float() / 127.5 - 1
        noise = torch.randn(len(pick), 4, 16, 16, generator=g, device=images.device)
        images, noise = own_rows(accelerator, images, noise)
        output, kl = run(vae, images, noise)
        error = output.float() - images
        return error.abs().mean() + 2 * error.square().mean() + config.advanced.kl_weight * kl

    phase.run(accelerator, loss_of_step, deadline, progress)
    phase.use_average()
    vae.eval()


def reconstruct(vae: Any, images: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A picture through the autoencoder with its posterior's noise, and the mean KL divergence of the posterior."""
    moments = vae.quant_conv(vae.encoder(images)).float()
    mean, log_variance = moments.chunk(2, 1)
    log_variance = log_variance.clamp(-30, 20)
    kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).flatten(1).sum(1).mean()
    return vae.decoder(vae.post_quant_conv(mean + (0.5 * log_variance).exp() * noise)), kl


@torch.no_grad()
def encode_all(model: Portraits, data: TrainingSet, batch: int = 128) -> torch.Tensor:
    """(N, 4, 16, 16) posterior means, scaled to unit deviation; writes the scale into the VAE's config."""
    means = []
    for chunk in data.images.split(batch):  # small batches: large ones spend their time on fresh memory pages
        means.append(model.vae.encode(chunk.float() / 127.5 - 1).latent_dist.mean)
    latents = torch.cat(means)
    model.vae.register_to_config(scaling_factor=round(float(1 / latents.std()), 5))
    return latents * model.vae.config.scaling_factor


def face_map(strength: float, side: int = 16) -> torch.Tensor:
    """(side, side) weights of mean 1: 1 + ``strength`` times bumps over the face, both cheeks, both ends of a brim."""
    y, x = torch.meshgrid(*[(torch.arange(side) + 0.5) * 2 / side - 1] * 2, indexing="ij")

    def bump(at_x: float, at_y: float, wide: float, high: float) -> torch.Tensor:
        return torch.exp(-0.5 * (((x.abs() - at_x) / wide) ** 2 + ((y - at_y) / high) ** 2))

    bumps = bump(0, 0.18, 0.33, 0.30) + 2 * bump(0.29, 0.20, 0.13, 0.13) + 2 * bump(0.60, -0.25, 0.16, 0.12)
    weight = 1 + strength * bumps
    return weight / weight.mean()


class TextToNoise(nn.Module):
    """UNet and text encoder as one trainable module: (noisy latents, t, token ids) -> predicted noise."""

    def __init__(self, model: Portraits) -> None:
        super().__init__()
        self.unet, self.text_encoder = model.unet, model.text_encoder

    def forward(self, x: torch.Tensor, t: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.unet(x, t, self.text_encoder(ids).last_hidden_state).sample


def train_unet(
    config: TrainConfig,
    accelerator: Accelerator,
    model: Portraits,
    data: TrainingSet,
    deadline: float,
    progress: Progress,
) -> None:
    """Phase 3. DDPM noise prediction (Ho et al. 2020, Eq. 14); injected pictures keep their share to the end.

    The error is weighted by 1 / sqrt(SNR) (debiased estimation, Yu et al. 2023), limited above, and by a fixed map.
    Neither moves the optimum, which is pointwise; both spend the steps where the caption decides something small. With
    plain weights, or min-SNR's, everything was learned within 2,500 steps but left and right, which stayed at chance.
    """
    device = accelerator.device
    both = TextToNoise(model).to(device).train()
    inputs = {"autoencoder": model.vae, **pictures_of(model.dataset)}
    phase = Phase("unet", config, both, config.unet_steps, config.advanced.unet_lr, inputs=inputs)
    if phase.done:
        phase.use_average()
        both.eval()
        return
    latents = encode_all(model, data)
    abar = model.scheduler.alphas_cumprod.to(device)
    where, when = (
        face_map(config.advanced.face_weight).to(device),
        ((1 - abar) / abar).sqrt().clamp(max=config.advanced.snr_weight_limit),
    )
    empty = data.empty_ids.to(device)
    run = torch.compile(both) if config.compile else both

    def loss_of_step() -> torch.Tensor:
        g = phase.generator(3, device)
        pick = data.pick(config.advanced.unet_batch, config.advanced.plant_share, g)
        x0, ids = latents[pick], data.ids_for(pick, g)
        dropped = torch.rand(len(pick), generator=g, device=device) < config.advanced.caption_dropout
        ids = torch.where(dropped[:, None], empty, ids)
        t = torch.randint(1000, (len(pick),), generator=g, device=device)
        noise = torch.randn(x0.shape, generator=g, device=device)
        x0, ids, t, noise = own_rows(accelerator, x0, ids, t, noise)
        a = append_dims(abar[t], 4)
        # Ho et al. 2020, Eq. 14
        error = (run(a.sqrt() * x0 + (1 - a).sqrt() * noise, t, ids).float() - noise).square()
        return (error * where * append_dims(when[t], 4)).mean()

    phase.run(accelerator, loss_of_step, deadline, progress)
    phase.use_average()
    both.eval()


def pictures_of(dataset: Dataset) -> dict[str, Any]:
    """What a phase's pictures depend on besides the code, for its resume check."""
    return {} if dataset.made_of is None else {"pictures": dataset.made_of}


def main(
    config: TrainConfig, progress: Callable[[str], Progress] = lambda name: silent, dataset: Dataset = PORTRAITS
) -> Path:
    """Run all phases; the finished model is in ``OUT/NAME``, with the dataset's name. Returns that folder.

    Raises:
        OutOfTime: If ``max_seconds`` is used up; an unfinished UNet is exported to ``OUT/NAME-unfinished``.
    """
    accelerator = accelerator_for("no", config.device == "cpu")  # so small a network gains nothing in 16 bit
    with run_of(f"train {dataset.name}", config, accelerator):
        return _trained(config, accelerator, progress, dataset)


def _trained(
    config: TrainConfig, accelerator: Accelerator, progress: Callable[[str], Progress], dataset: Dataset
) -> Path:
    deadline = time.monotonic() + config.max_seconds
    out = Path(config.out)
    model = build_models(config.seed, out / "tokenizer", dataset)
    data = build_training_set(config.pictures, model.tokenizer, accelerator.device, progress(RENDER), dataset=dataset)
    net = train_classifier(config, accelerator, dataset, data, deadline, progress(CLASSIFIER))
    train_vae(config, accelerator, model, data, deadline, progress(AUTOENCODER))
    try:
        train_unet(config, accelerator, model, data, deadline, progress(UNET))
    except OutOfTime:
        if accelerator.is_main_process:
            save_portraits(model, out / f"{dataset.name}-unfinished")
        raise
    folder = out / dataset.name
    if accelerator.is_main_process:
        save_portraits(model, folder)
        write_preview(folder, model)
        half = {k: v.half() for k, v in net.state_dict().items()}
        save_safetensors(folder / "readout" / "readout.safetensors", half)
        write_json(folder / "training.json", _record(config, out, accelerator.device))
    return folder


def _record(config: TrainConfig, out: Path, device: torch.device) -> dict[str, Any]:
    """The record of a run: settings, steps, seconds, last losses, machine."""
    phases = {}
    for name in ("readout", "vae", "unet"):
        facts = state_facts(out / name)
        seconds, last = round(facts["seconds"], 1), facts["losses"][-1][1]
        phases[name] = {"steps": facts["step"], "seconds": seconds, "last_loss": last}
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    usual, advanced = config.to_dict(), config.advanced.to_dict()
    settings = {k: v for k, v in (usual | advanced).items() if k not in ("out", "device", "advanced")}
    settings["max_seconds"] = "inf" if math.isinf(config.max_seconds) else config.max_seconds
    return {"settings": settings, "phases": phases, "device": machine, "torch": torch.__version__}


def train_avataaars(
    layers: str | Path, config: TrainConfig, progress: Callable[[str], Progress] = lambda name: silent
) -> Path:
    """:func:`main` on the faces of a file of layers; returns the model's folder, with its layers."""
    folder = main(config, progress, avataaars(Path(layers)))
    if launched().index == 0:  # the others may be here before the first has written the model
        shutil.copyfile(layers, folder / LAYERS)
    return folder
