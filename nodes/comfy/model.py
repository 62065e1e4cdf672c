"""A ComfyUI MODEL as the engine's Denoiser, its fingerprint, and latents in and out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import comfy.model_management
import comfy.model_sampling
import comfy.sample
import torch

from ...engine.diffusion.denoiser import Denoiser
from ...engine.diffusion.schedule import append_dims
from ...engine.errors import refuse
from ...engine.families import record_of, refuse_unfit
from ...engine.network.condition import Condition
from ...engine.runtime.finite import require_finite
from ...engine.runtime.forward_hooks import hook_before
from ...engine.runtime.placement import refuse_without_gradients
from ...engine.tracing.fingerprint import ChangeDigest, fingerprint_of, text_values
from . import compat_comfyui as core
from .carried import latent_keys, own_tensors
from .contents import model_contents
from .forwards import clean_prediction, velocity
from .schedule import schedule_of

PREFIX = "diffusion_model."
"""What ComfyUI puts before the names of the network's weights."""


def backbone_of(model: Any) -> torch.nn.Module:
    """The network inside a MODEL, whose sites have addresses."""
    return model.model.diffusion_model


def denoiser_of(model: Any) -> Denoiser:
    """A Denoiser over a ComfyUI MODEL with its LoRAs, patches and wrappers applied.

    Each call loads the MODEL first: clones share one network with only one's weights in it, and whatever was loaded
    since the last call, such as a text encoder or another clone, may have taken this one out. So there is no order in
    which a node has to encode and load.

    ComfyUI turns every prediction into x0, so the convention here is ``x0`` (``flow`` for rectified flows). What the
    network learned is kept with it, for losses. Of models whose latents have a frame axis, still pictures
    (B, C, h, w) are taken too.
    """
    comfy.model_management.load_models_gpu([model])
    schedule = schedule_of(model)
    flow, frames = schedule.kind == "flow", has_frames(model)

    # A function that called itself would hold the clone in a reference cycle. Clones that the garbage collector frees
    # together leave ComfyUI a network without an owner, and from then on it collects all garbage at every load.
    def whole(x_t: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
        sigma = schedule.sigma(t).to(x_t.device, torch.float32)
        if flow:
            return velocity(model, x_t, sigma, cond)
        return clean_prediction(model, x_t * torch.sqrt(1 + append_dims(sigma, x_t.ndim) ** 2), sigma, cond)

    def call(x_t: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
        comfy.model_management.load_models_gpu([model])
        if torch.is_grad_enabled():
            allow_gradients(model)  # also what was loaded this moment
        still = frames and x_t.ndim == 4
        return whole(x_t[:, :, None], t, cond)[:, :, 0] if still else whole(x_t, t, cond)

    made_of = partial(model_contents, model)
    return Denoiser(backbone_of(model), schedule, "flow" if flow else "x0", call, _learned(model), made_of)


def _learned(model: Any) -> str:
    """What the network puts out before ComfyUI converts it."""
    sampling = model.get_model_object("model_sampling")
    kinds = {"V_PREDICTION": "v", "X0": "x0", "EPS": "eps", "CONST": "flow"}  # the first two are kinds of EPS there
    return next((k for name, k in kinds.items() if isinstance(sampling, getattr(comfy.model_sampling, name))), "")


# --- weights ------------------------------------------------------------------------------------------------------
def checkpoint_weights(model: Any) -> dict[str, torch.Tensor]:
    """Originals of the network's weights that carry a clone's LoRA at the moment, from ComfyUI's backup."""
    return {k.removeprefix(PREFIX): b.weight for k, b in model.backup.items() if k.startswith(PREFIX)}


def unpatched(model: Any) -> dict[str, torch.Tensor]:
    """Module path -> original, of the modules whose weight carries a clone's LoRA at the moment."""
    weights = checkpoint_weights(model).items()
    return {k.removesuffix(".weight"): v for k, v in weights if k.endswith(".weight")}


def fingerprint(model: Any) -> str:
    """Of the checkpoint itself: weights that carry a LoRA at the moment are read from ComfyUI's backup."""
    return fingerprint_of(backbone_of(model), unpatched(model))


def active_fingerprint(model: Any) -> str:
    """:func:`fingerprint`, and what this clone's LoRAs and patches add to its text values."""
    digest = ChangeDigest()
    for path in text_values(backbone_of(model)):
        for strength, patch, strength_model, *_ in model.patches.get(f"{PREFIX}{path}.weight", ()):
            if strength or strength_model != 1:
                digest.add(f"{path} {strength:.6g} {strength_model:.6g}", _tensors(getattr(patch, "weights", patch)))
    return digest.joined(fingerprint(model))


def _tensors(patch: Any) -> Iterator[torch.Tensor]:
    """Every tensor within a patch, however it is nested."""
    if isinstance(patch, torch.Tensor):
        yield patch
    elif isinstance(patch, (list, tuple)):
        for part in patch:
            yield from _tensors(part)


def allow_gradients(model: Any) -> None:
    """Let autograd run through the backbone, towards its inputs; call it outside inference mode.

    ComfyUI loads models in inference mode, and autograd refuses such tensors. Each is replaced by an equal one, which
    ComfyUI's own training node does too; one at a time, so that memory does not double.
    """
    refuse_unfit(backbone_of(model), "gradients")
    own_tensors(backbone_of(model))
    refuse_without_gradients(backbone_of(model))


@contextmanager
def differentiable() -> Iterator[None]:
    """For gradients towards a network's inputs, forward and backward: around both, outside inference mode.

    Core's rotary kernel has no derivative, its training path has; and Flux's blocks write over what was kept for the
    backward pass.
    """
    with core.training(), torch.autograd.graph.allow_mutation_on_saved_tensors():
        yield


# --- latents ------------------------------------------------------------------------------------------------------
def has_frames(model: Any) -> bool:
    """Whether a model's latents are (B, C, T, h, w), as Wan's and those of families with its kind of VAE."""
    return bool(model.get_model_object("latent_format").latent_dimensions == 3)


def encode(model: Any, vae: Any, image: torch.Tensor) -> torch.Tensor:
    """IMAGE (B, H, W, 3) in [0, 1] -> scaled latents on the model's device (posterior mean, as ComfyUI encodes)."""
    _check_size(vae, image)
    frames = getattr(vae, "latent_dim", 2) == 3 and not vae.not_video  # such a VAE takes a batch for one video
    rows = image[..., :3].split(1) if frames else [image[..., :3]]
    latents = torch.cat([vae.encode(row) for row in rows])
    return model.model.process_latent_in(latents).to(model.load_device).float()


def encode_samples(
    model: Any, vae: Any, image: torch.Tensor, draw: Callable[[tuple[int, ...]], torch.Tensor]
) -> torch.Tensor:
    """As :func:`encode`, but one sample of the VAE's posterior for each picture.

    Args:
        draw: gives standard normal numbers of the latents' shape.
    """
    _check_size(vae, image)
    posterior = getattr(vae.first_stage_model, "regularization", None)
    if posterior is None:
        shown = type(vae.first_stage_model).__name__
        raise refuse(
            "vae", shown, "one with a Gaussian posterior, as SD 1.x's and SDXL's", "protocol 'vitrine' needs none"
        )
    moments: list[torch.Tensor] = []
    handle = hook_before(posterior, lambda module, inputs: moments.append(inputs[0].detach()))
    try:
        means = vae.encode(image[..., :3]).float().cpu()
    finally:
        handle.remove()
    log_variance = (
        torch.cat(moments).float().cpu().chunk(2, 1)[1].clamp(-30, 20)
    )  # the bounds of DiagonalGaussianDistribution
    samples = means + torch.exp(0.5 * log_variance) * draw(tuple(means.shape))
    return model.model.process_latent_in(samples).to(model.load_device).float()


_PROBED = 64
"""Side of the picture by which a VAE's factor is measured."""


def pixels_per_latent(vae: Any) -> int:
    """Pixels in height and width for one of a latent.

    Core states it for every VAE but the tiny ones: it takes them all for 8, and Flux.2's has 16. Those are measured.
    """
    if type(vae.first_stage_model).__name__ != "TAESD":
        return int(vae.spacial_compression_encode())
    return int(_PROBED // vae.encode(torch.zeros(1, _PROBED, _PROBED, 3)).shape[-1])


def _check_size(vae: Any, image: torch.Tensor) -> None:
    factor = pixels_per_latent(vae)
    height, width = image.shape[1:3]
    if height % factor or width % factor:
        raise refuse("image size", f"{width} x {height}", f"multiples of {factor}", "resize or crop the picture first")


def is_sdxl(model: Any) -> bool:
    """Whether the network is SDXL's UNet."""
    record = record_of(backbone_of(model))
    variant = "" if record is None else record[1].variant(model.model)
    if not variant:
        raise refuse("protocol 'gdf'", type(model.model).__name__, "SD 1.x, SD 2.x, SDXL", "take protocol 'vitrine'")
    return variant != "SD"


def _channels(model: Any) -> int:
    return int(model.get_model_object("latent_format").latent_channels)


def scaled_latents(model: Any, latent: dict) -> torch.Tensor:
    """The samples of a LATENT of this model in the network's scale, on the model's device."""
    samples, channels = latents_to_sample(model, latent, False), _channels(model)
    if samples.shape[1] != channels:
        shown = f"{samples.shape[1]} channels {tuple(samples.shape)}"
        raise refuse("latent", shown, f"{channels}, this model's", "encode the picture with this model's VAE")
    scaled: torch.Tensor = model.model.process_latent_in(samples.to(model.load_device))
    return scaled


def blank_latents(model: Any, latent: dict) -> torch.Tensor:
    """Zeros (B, C, h, w) of a LATENT's size with the model's own channels, on its device."""
    samples = latents_to_sample(model, latent, False)
    # Empty Latent Image assumes a factor of 8 and says so under these keys, in ComfyUI's spelling.
    ratios = (latent.get(f"downscale_ratio_{kind}") for kind in ("spacial", "temporal"))
    samples = comfy.sample.fix_empty_latent_channels(model, samples, *ratios)
    return torch.zeros(samples.shape, device=model.load_device)


def latents_to_sample(model: Any, latent: dict, sampled: bool = True) -> torch.Tensor:
    """The samples of a LATENT that a sampler starts from, with any number of channels where they are empty.

    Args:
        sampled: False where it is none that samples, but only predicts whole pictures.
    """
    samples: torch.Tensor = latent_keys(latent, sampled)["samples"]
    if samples.ndim == 5 and not has_frames(model):
        accepted = "pictures (B, C, h, w): this model has no frames"
        raise refuse("latent", f"a video {tuple(samples.shape)}", accepted, "connect Empty Latent Image")
    return samples


def picture_numbers(latent: dict) -> list[int]:
    """Which picture of its batch each row of a LATENT is: those of Latent From Batch keep their numbers."""
    return [int(n) for n in latent.get("batch_index") or range(len(latent["samples"]))]


def latent_of(model: Any, x0: torch.Tensor) -> dict:
    """Clean latents -> LATENT, unscaled as ComfyUI keeps it."""
    require_finite(x0, "latents")
    return {"samples": model.model.process_latent_out(x0.float()).to(comfy.model_management.intermediate_device())}


def decode(model: Any, vae: Any, x0: torch.Tensor) -> torch.Tensor:
    """Clean latents (B, C, [1,] h, w) -> IMAGE (B, H, W, 3) in [0, 1]."""
    framed = x0[:, :, None] if has_frames(model) and x0.ndim == 4 else x0
    images: torch.Tensor = vae.decode(model.model.process_latent_out(framed.float()))
    return images.reshape(-1, *images.shape[-3:])
