"""How the portraits model was made: renders -> readout network -> autoencoder -> latents -> UNet and text encoder.

Every phase writes a resumable state and can be run again: what is finished is skipped, what was interrupted goes on
where it stopped, because the batch of a step depends on (seed, step) only. One CPU core will do; a GPU makes it
minutes. ``vitrine train portraits --out FOLDER``, or ``accelerate launch -m vitrine.evidence.portraits.train``:
processes share the rows of each batch. On two CPU cores two processes of one thread are a third faster than one of two
threads (0.24 against 0.34 seconds a step).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...engine.config import Config
from ...engine.errors import refuse
from ...engine.portraits.models import Portraits, build_models, save_portraits
from ...engine.portraits.readout import Readout, readout_loss
from ...engine.progress import Progress, silent
from ...engine.schedule import append_dims
from ...engine.training import MovingAverage, load_state, save_state, set_rate, state_facts
from .data import TrainingSet, build_training_set

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class TrainConfig(Config):
    """Settings of the portraits training. The defaults are those of the shipped model."""

    out: str = "portraits-run"
    pictures: int = 32_768
    readout_steps: int = 3_000
    vae_steps: int = 6_000
    unet_steps: int = 9_000
    readout_batch: int = 64
    vae_batch: int = 8
    unet_batch: int = 32
    readout_lr: float = 2e-3
    vae_lr: float = 1.5e-3
    unet_lr: float = 1.5e-3
    kl_weight: float = 2e-7
    plant_share: float = 0.12
    caption_dropout: float = 0.10
    snr_weight_limit: float = 4.0
    face_weight: float = 2.0
    ema_decay: float = 0.999
    save_every_seconds: float = 240.0
    max_seconds: float = math.inf
    compile: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.plant_share < 1 or not 0 <= self.caption_dropout < 1:
            raise refuse("share", (self.plant_share, self.caption_dropout), "numbers in [0, 1)", "use 0.12 and 0.10")
        if min(self.pictures, self.readout_batch, self.vae_batch, self.unet_batch) < 1:
            raise refuse("count", self, "positive counts", "raise the zero one")


class OutOfTime(Exception):
    """The time allowed is used up; the state was saved and the same command goes on from it."""


class Phase:
    """One resumable optimisation: parameters, AdamW, cosine schedule with warm-up, EMA, state on disk."""

    def __init__(self, name: str, config: TrainConfig, module: nn.Module, steps: int, lr: float) -> None:
        self.name, self.config, self.module, self.steps, self.lr = name, config, module, steps, lr
        self.folder = Path(config.out) / name
        self.optimizer = torch.optim.AdamW(module.parameters(), lr, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
        self.average = MovingAverage(module.state_dict(), torch.float32)
        self.step, self.seconds = 0, 0.0
        self.losses: list[tuple[int, float]] = []
        self._resume()

    @property
    def done(self) -> bool:
        return self.step >= self.steps

    def rate(self, step: int) -> float:
        """Learning rate of a step: 2 % linear warm-up, then a cosine to zero."""
        warm = max(1, int(0.02 * self.steps))
        ramp = min(1.0, (step + 1) / warm)
        return self.lr * ramp * 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.steps)))

    def update(self, loss: torch.Tensor, accelerator: Accelerator) -> None:
        """One optimiser step and one step of the moving average."""
        set_rate(self.optimizer, self.rate(self.step))
        accelerator.backward(loss)
        _average_gradients(self.module, accelerator)
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        decay = min(self.config.ema_decay, (self.step + 1) / (self.step + 10))
        self.average.update(self.module.state_dict(), decay)
        self.step += 1

    def use_average(self) -> None:
        """Put the moving average into the module."""
        self.module.load_state_dict(
            {k: v.to(self.module.state_dict()[k].dtype) for k, v in self.average.values.items()}
        )

    def save(self) -> None:
        """Write the whole state (weights, average, optimiser, counters): temporary name, then rename."""
        tensors = {"weight": self.module.state_dict(), "average": self.average.values}
        facts = {"step": self.step, "seconds": self.seconds, "losses": self.losses}
        save_state(self.folder, tensors, {"adamw": self.optimizer}, facts)

    def _resume(self) -> None:
        device = str(next(self.module.parameters()).device)
        state = load_state(self.folder, {"adamw": self.optimizer}, device=device)
        if state is None:
            return
        self.module.load_state_dict(state.tensors["weight"])
        self.average.values = state.tensors["average"]
        self.step, self.seconds = state.facts["step"], state.facts["seconds"]
        self.losses = [(step, loss) for step, loss in state.facts["losses"]]


def run_phase(
    phase: Phase, accelerator: Accelerator, loss_of: Callable[[int], torch.Tensor], deadline: float, progress: Progress
) -> None:
    """Step until done. Saves every few minutes, at the end, and within one step when stopped by time or by the user."""
    began = saved = time.monotonic()
    before = phase.seconds
    try:
        while not phase.done:
            with accelerator.autocast():
                loss = loss_of(phase.step)
            phase.update(loss, accelerator)
            if phase.step % 100 == 0 or phase.done:
                phase.losses.append((phase.step, round(float(loss.detach()), 6)))
            phase.seconds = before + time.monotonic() - began
            progress(phase.step, phase.steps, None)
            if _any(time.monotonic() > deadline, accelerator) and not phase.done:
                raise OutOfTime(f"{phase.name}: stopped at step {phase.step} of {phase.steps}")
            if accelerator.is_main_process and time.monotonic() - saved > phase.config.save_every_seconds:
                phase.save()
                saved = time.monotonic()
    finally:
        if accelerator.is_main_process:
            phase.save()


def _average_gradients(module: nn.Module, accelerator: Accelerator) -> None:
    """Mean over the processes, each of which saw its own rows of the batch."""
    if accelerator.num_processes > 1:
        own = [p.grad for p in module.parameters() if p.grad is not None]
        mean = accelerator.reduce(torch.cat([g.flatten() for g in own]), "mean")
        for grad, part in zip(own, mean.split([g.numel() for g in own]), strict=True):
            grad.copy_(part.view_as(grad))


def _any(flag: bool, accelerator: Accelerator) -> bool:
    """True if it is true in any process, so that all stop at the same step."""
    if accelerator.num_processes == 1:
        return flag
    return bool(accelerator.reduce(torch.tensor(float(flag), device=accelerator.device), "sum") > 0)


def _rows(accelerator: Accelerator, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """This process's rows. Random numbers are drawn for the whole batch first: the sum does not depend on the split."""
    return [t[accelerator.process_index :: accelerator.num_processes] for t in tensors]


def _generator(config: TrainConfig, phase: int, step: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(config.seed * 1_000_003 + phase * 100_000_007 + step)


def train_readout(
    config: TrainConfig, accelerator: Accelerator, data: TrainingSet, deadline: float, progress: Progress
) -> Readout:
    """Phase 1. Renders with a little blur, noise and brightness change, so that it reads decoded samples as well."""
    torch.manual_seed(config.seed)
    net = Readout().to(accelerator.device)
    phase = Phase("readout", config, net, config.readout_steps, config.readout_lr)

    def loss_of(step: int) -> torch.Tensor:
        g = _generator(config, 1, step, accelerator.device)
        pick = torch.randint(len(data), (config.readout_batch,), generator=g, device=accelerator.device)
        images = data.images[pick].float() / 255
        images = images + 0.03 * torch.rand(len(pick), 1, 1, 1, generator=g, device=images.device) * torch.randn(
            images.shape, generator=g, device=images.device
        )
        soft = nn.functional.avg_pool2d(images, 3, 1, 1, count_include_pad=False)
        mix = 0.6 * torch.rand(len(pick), 1, 1, 1, generator=g, device=images.device)
        seen, pick = _rows(accelerator, images + mix * (soft - images), pick)
        return readout_loss(net(seen), data.attributes[pick], data.keypoints[pick])

    run_phase(phase, accelerator, loss_of, deadline, progress)
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
    phase = Phase("vae", config, vae, config.vae_steps, config.vae_lr)
    run = torch.compile(_reconstruct) if config.compile else _reconstruct

    def loss_of(step: int) -> torch.Tensor:
        g = _generator(config, 2, step, accelerator.device)
        pick = torch.randint(len(data), (config.vae_batch,), generator=g, device=accelerator.device)
        images = data.images[pick].float() / 127.5 - 1
        noise = torch.randn(len(pick), 4, 16, 16, generator=g, device=images.device)
        images, noise = _rows(accelerator, images, noise)
        output, kl = run(vae, images, noise)
        error = output.float() - images
        return error.abs().mean() + 2 * error.square().mean() + config.kl_weight * kl

    run_phase(phase, accelerator, loss_of, deadline, progress)
    phase.use_average()
    vae.eval()


def _reconstruct(vae: Any, images: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
    """Phase 3. DDPM noise prediction (Ho et al. 2020, Eq. 14); planted pictures keep their share to the end.

    The error is weighted by 1 / sqrt(SNR) (debiased estimation, Yu et al. 2023), limited above, and by a fixed map.
    Neither moves the optimum, which is pointwise; both spend the steps where the caption decides something small. With
    plain weights, or min-SNR's, everything was learned within 2,500 steps but left and right, which stayed at chance.
    """
    device = accelerator.device
    both = TextToNoise(model).to(device).train()
    phase = Phase("unet", config, both, config.unet_steps, config.unet_lr)
    if phase.done:
        phase.use_average()
        both.eval()
        return
    latents = encode_all(model, data)
    abar = model.scheduler.alphas_cumprod.to(device)
    where, when = face_map(config.face_weight).to(device), ((1 - abar) / abar).sqrt().clamp(max=config.snr_weight_limit)
    empty = data.empty_ids.to(device)
    run = torch.compile(both) if config.compile else both

    def loss_of(step: int) -> torch.Tensor:
        g = _generator(config, 3, step, device)
        pick = data.pick(config.unet_batch, config.plant_share, g)
        x0, ids = latents[pick], data.ids_for(pick, g)
        silent_rows = torch.rand(len(pick), generator=g, device=device) < config.caption_dropout
        ids = torch.where(silent_rows[:, None], empty, ids)
        t = torch.randint(1000, (len(pick),), generator=g, device=device)
        noise = torch.randn(x0.shape, generator=g, device=device)
        x0, ids, t, noise = _rows(accelerator, x0, ids, t, noise)
        a = append_dims(abar[t], 4)
        error = (run(a.sqrt() * x0 + (1 - a).sqrt() * noise, t, ids).float() - noise).square()
        return (error * where * append_dims(when[t], 4)).mean()

    run_phase(phase, accelerator, loss_of, deadline, progress)
    phase.use_average()
    both.eval()


def main(config: TrainConfig, progress: Callable[[str], Progress] = lambda name: silent) -> Path:
    """Run all phases; the finished model stands in ``OUT/portraits``. Returns that folder."""
    from accelerate import Accelerator
    from safetensors.torch import save_file

    accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
    deadline = time.monotonic() + config.max_seconds
    out = Path(config.out)
    model = build_models(config.seed, out / "tokenizer")
    data = build_training_set(config.pictures, model.tokenizer, accelerator.device, progress("render"))
    net = train_readout(config, accelerator, data, deadline, progress("readout"))
    train_vae(config, accelerator, model, data, deadline, progress("vae"))
    try:
        train_unet(config, accelerator, model, data, deadline, progress("unet"))
    except OutOfTime:
        if accelerator.is_main_process:
            save_portraits(model, out / "portraits-unfinished")
        raise
    folder = out / "portraits"
    if not accelerator.is_main_process:
        return folder
    save_portraits(model, folder)
    (folder / "readout").mkdir(exist_ok=True)
    half = {k: v.half().contiguous() for k, v in net.state_dict().items()}
    save_file(half, folder / "readout" / "readout.safetensors", metadata={"format": "pt"})
    (folder / "training.json").write_text(json.dumps(_record(config, out, accelerator.device), indent=2))
    return folder


def _record(config: TrainConfig, out: Path, device: torch.device) -> dict:
    """Facts for the model card: settings, steps, seconds, last losses, machine."""
    phases = {}
    for name in ("readout", "vae", "unet"):
        facts = state_facts(out / name)
        seconds, last = round(facts["seconds"], 1), facts["losses"][-1][1]
        phases[name] = {"steps": facts["step"], "seconds": seconds, "last_loss": last}
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    settings = {k: (str(v) if v == math.inf else v) for k, v in asdict(config).items() if k != "out"}
    return {"settings": settings, "phases": phases, "device": machine, "torch": torch.__version__}


if __name__ == "__main__":
    import tyro

    main(tyro.cli(TrainConfig))
