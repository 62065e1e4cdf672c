"""Training the finished flow model's decoder on, so that it draws sharply: the latents, and all else, stay as they are.

Errors of pixels alone make a decoder draw the mean of everything that its latents may stand for: strands, curls and the
edge of a beard come out as a blur. Here a small network judges patches as well (Rombach et al. 2022, Eq. 25; Esser
et al. 2021, Eq. 7), and the decoder learns on what it will be given: latents that the transformer has denoised.

``python -m vitrine.evidence.recipes decoder --out FOLDER``
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from ...engine.diffusion.schedule import append_dims
from ...engine.families.packing import pack, unpack
from ...engine.io.files import write_json
from ...engine.jobs.run import Run
from ...engine.portraits.flow import FLOW_WEIGHTS, LATENT_SHAPE, FlowPortraits, load_flow_portraits
from ...engine.portraits.models import save_portraits
from ...engine.portraits.preview import write_preview
from ...engine.runtime.progress import Progress, silent
from .flow import ENCODE, RENDER, TextToVelocity, accelerator_of, picture_error, pictures, posterior_means
from .phase import Phase, own_rows, record_of, run_of
from .settings import DecoderTrainConfig
from .training_set import TrainingSet

if TYPE_CHECKING:
    from accelerate import Accelerator
    from diffusers import AutoencoderKL

TOKENS = "tokens.safetensors"
DECODER = "decoder"
STAGES = RENDER, ENCODE, DECODER
"""What is done, in order, as the console names it."""


class PatchJudge(nn.Module):
    """Scores of overlapping patches (Isola et al. 2017, PatchGAN), and the features that lead to them."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        sizes = [(3, width, 2), (width, 2 * width, 2), (2 * width, 4 * width, 2), (4 * width, 4 * width, 1)]
        self.layers = nn.ModuleList(
            spectral_norm(nn.Conv2d(before, after, 2 + stride, stride, 1)) for before, after, stride in sizes
        )
        self.score = spectral_norm(nn.Conv2d(4 * width, 1, 1))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(B, 3, H, W) in [-1, 1] -> scores (B, 1, H / 8, W / 8) and each layer's features."""
        features = []
        for layer in self.layers:
            images = F.leaky_relu(layer(images), 0.2)
            features.append(images)
        return self.score(images), features


class Drawing(nn.Module):
    """The half of the autoencoder that draws, (B, 16, 16, 16) latents -> pictures in [-1, 1], and its judge."""

    def __init__(self, model: FlowPortraits, seed: int = 0) -> None:
        super().__init__()
        self.post_quant_conv, self.decoder = model.vae.post_quant_conv, model.vae.decoder
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.judge = PatchJudge()

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.post_quant_conv(latents))

    def losses(self, latents: torch.Tensor, target: torch.Tensor, config: DecoderTrainConfig) -> torch.Tensor:
        """The decoder's loss and the judge's hinge loss in one sum: neither moves the other's weights."""
        advanced = config.advanced
        drawn = self(latents)
        pixels = picture_error(drawn.float() - target, advanced.edge_weight)
        self.judge.requires_grad_(False)
        score, features = self.judge(drawn)
        with torch.no_grad():
            _, wanted = self.judge(target)
        alike = torch.stack([F.l1_loss(f, w) for f, w in zip(features, wanted, strict=True)]).mean()
        self.judge.requires_grad_(True)
        real, fake = self.judge(target)[0], self.judge(drawn.detach())[0]
        judged = F.relu(1 - real).mean() + F.relu(1 + fake).mean()
        weight = advanced.judge_weight * self._balance(pixels, -score.mean())
        return pixels + advanced.feature_weight * alike - weight * score.mean() + judged

    def _balance(self, pixels: torch.Tensor, judged: torch.Tensor) -> torch.Tensor:
        """Esser et al. 2021, Eq. 7: the ratio of both losses' gradients at the last layer."""
        last = self.decoder.conv_out.weight
        by_pixels, by_judge = (torch.autograd.grad(x, last, retain_graph=True)[0].norm() for x in (pixels, judged))
        return (by_pixels / (by_judge + 1e-6)).clamp(0, 1e4).detach()


@torch.no_grad()
def denoised(
    both: TextToVelocity, clean: torch.Tensor, ids: torch.Tensor, t: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    """What the transformer makes of noised tokens (B, 64, 64) in one step: z_t - t v, the clean latents' estimate."""
    s = append_dims(t, 3)
    noised = (1 - s) * clean + s * noise
    return noised - s * both(noised, t, ids)


def train_decoder(
    config: DecoderTrainConfig,
    accelerator: Accelerator,
    model: FlowPortraits,
    data: TrainingSet,
    packed: torch.Tensor,
    deadline: float,
    progress: Progress,
) -> None:
    """Half of a batch is latents as encoded, with a little noise; half is what the transformer denoised in one step."""
    device, advanced = accelerator.device, config.advanced
    drawing, both = Drawing(model, config.seed).to(device).train(), TextToVelocity(model).to(device).eval()
    whole = {"transformer": model.transformer, "text encoder": model.text_encoder, "autoencoder": model.vae}
    phase = Phase("decoder", config, drawing, config.steps, advanced.decoder_lr, (0.5, 0.99), whole)

    def loss_of_step() -> torch.Tensor:
        g = phase.generator(4, device)
        pick = torch.randint(len(data), (advanced.decoder_batch,), generator=g, device=device)
        clean, ids = packed[pick], data.ids_for(pick, g)
        noise = torch.randn(clean.shape, generator=g, device=device)
        t = advanced.denoised_until * torch.rand(len(pick), generator=g, device=device)
        target, clean, ids, noise, t = own_rows(
            accelerator, data.images[pick].float() / 127.5 - 1, clean, ids, noise, t
        )
        half = (len(clean) + 1) // 2
        tokens = clean + advanced.decoder_noise * noise
        tokens[:half] = denoised(both, clean[:half], ids[:half], t[:half], noise[:half])
        return drawing.losses(unpack(tokens, tokens.new_empty(len(tokens), *LATENT_SHAPE)), target, config)

    try:
        if not phase.done:
            phase.run(accelerator, loss_of_step, deadline, progress)
    finally:
        phase.use_average()
        drawing.eval()


def main(config: DecoderTrainConfig, progress: Callable[[str], Progress] = lambda name: silent) -> Path:
    """Draw the pictures, encode them, train. Returns ``OUT/flow-portraits``, the model with its new decoder.

    Its card is measured by ``python -m vitrine.evidence.recipes card OUT/flow-portraits``.

    Raises:
        OutOfTime: If ``max_seconds`` is used up.
    """
    accelerator, model = accelerator_of(config), load_flow_portraits(config.model or None)
    with run_of("train decoder", config, accelerator):
        return _trained(config, accelerator, model, progress)


def _trained(
    config: DecoderTrainConfig, accelerator: Accelerator, model: FlowPortraits, progress: Callable[[str], Progress]
) -> Path:
    deadline, out = time.monotonic() + config.max_seconds, Path(config.out)
    data = pictures(config, model, accelerator.device, progress)
    packed = encode_pictures(model.vae.to(accelerator.device), data, out / TOKENS, progress(ENCODE))
    train_decoder(config, accelerator, model, data, packed, deadline, progress(DECODER))
    folder = out / "flow-portraits"
    if accelerator.is_main_process:
        export(config, model, folder)
    return folder


def encode_pictures(vae: AutoencoderKL, data: TrainingSet, path: Path, progress: Progress) -> torch.Tensor:
    """(N + P, 64, 64) tokens: posterior means, packed, kept in ``path``. They are of mean 0 and deviation 1."""
    run = Run(path, "tokens of the training pictures", {"autoencoder": vae, "pictures": data})
    if not path.is_file():
        run.save({"tokens": {"packed": pack(posterior_means(vae, data, progress))}})
    state = run.load(device=str(data.images.device))
    assert state is not None
    return state.tensors["tokens"]["packed"]


def export(config: DecoderTrainConfig, model: FlowPortraits, folder: Path) -> None:
    """The model as a FluxPipeline folder; its record of training gains the decoder's phase."""
    record = json.loads(((model.folder or FLOW_WEIGHTS) / "training.json").read_text(encoding="utf-8"))
    save_portraits(model, folder)
    write_preview(folder, model)
    record["settings"]["decoder_batch"] = config.advanced.decoder_batch
    record["phases"]["decoder"] = record_of(Path(config.out) / "decoder")
    write_json(folder / "training.json", record)
