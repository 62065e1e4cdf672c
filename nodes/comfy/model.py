"""The only file that knows ComfyUI's insides: MODEL -> Denoiser, conditioning, latents, recording, progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.model_sampling
import comfy.patcher_extension
import comfy.utils
import torch

from ...engine.activations import Activations, StepRecord, tap_steps
from ...engine.addresses import sites_of
from ...engine.condition import Condition
from ...engine.denoiser import Denoiser
from ...engine.errors import refuse
from ...engine.fingerprint import fingerprint_of
from ...engine.schedule import NoiseSchedule, append_dims

_KEY = "vitrine"


def backbone_of(model: Any) -> torch.nn.Module:
    """The network inside a MODEL, whose places have addresses."""
    return model.model.diffusion_model


def denoiser_of(model: Any) -> Denoiser:
    """A Denoiser over a ComfyUI MODEL with its LoRAs and wrappers applied.

    ComfyUI turns every prediction into x0, so the convention here is ``x0`` (``flow`` for rectified flows).
    """
    comfy.model_management.load_models_gpu([model])
    schedule = schedule_of(model)

    def call(x_t: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
        sigma = schedule.sigma(t).to(x_t.device, torch.float32)
        wide = append_dims(sigma, x_t.ndim)
        x = x_t if schedule.kind == "flow" else x_t * torch.sqrt(1 + wide**2)
        options = _transformer_options(model, sigma)
        x0 = model.model.apply_model(x, sigma, c_crossattn=cond.text, transformer_options=options, **cond.extra)
        return (x - x0) / wide if schedule.kind == "flow" else x0

    return Denoiser(backbone_of(model), schedule, "flow" if schedule.kind == "flow" else "x0", call)


def fingerprint(model: Any) -> str:
    """Of the checkpoint itself: weights that carry a LoRA at the moment are read from ComfyUI's backup."""
    backbone, originals = backbone_of(model), {}
    for site in sites_of(backbone).values():
        kept = model.backup.get(f"diffusion_model.{site.path}.weight")
        if kept is not None:
            originals[site.path] = kept.weight
    return fingerprint_of(backbone, originals)


def allow_gradients(model: Any) -> None:
    """Let autograd run through the backbone, towards its inputs; call it outside inference mode.

    ComfyUI loads models in inference mode, and autograd refuses such tensors. Each is replaced by an equal one, which
    ComfyUI's own training node does too; one at a time, so that memory does not double.
    """
    for module in backbone_of(model).modules():
        for name, value in module._parameters.items():
            if value is not None and value.is_inference():
                module._parameters[name] = torch.nn.Parameter(value.detach().clone(), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_inference():
                module._buffers[name] = buffer.clone()


def schedule_of(model: Any) -> NoiseSchedule:
    """The noise schedule of a MODEL.

    Raises:
        VitrineError: a sampling class without a discrete table that is not a rectified flow.
    """
    sampling = model.get_model_object("model_sampling")
    if isinstance(sampling, comfy.model_sampling.CONST):
        return NoiseSchedule.flow()
    if not hasattr(sampling, "log_sigmas"):
        raise refuse("model sampling", type(sampling).__name__, "a sigma table or a flow", "remove the sampling patch")
    table = sampling.log_sigmas.double().cpu()
    return NoiseSchedule("vp", table, len(table))


def _transformer_options(model: Any, sigma: torch.Tensor) -> dict:
    """What samplers pass along; a direct call has to merge the clone's wrappers itself."""
    options = comfy.model_patcher.create_model_options_clone(model.model_options)["transformer_options"]
    wrappers = comfy.patcher_extension.copy_nested_dicts(model.wrappers)
    callbacks = comfy.patcher_extension.copy_nested_dicts(model.callbacks)
    return options | {
        "wrappers": wrappers,
        "callbacks": callbacks,
        "sigmas": sigma[:1],
        "sample_sigmas": sigma[:1],
        "cond_or_uncond": [0],
    }


def condition_of(model: Any, conditioning: list, latents: torch.Tensor) -> Condition:
    """CONDITIONING -> Condition for the rows of ``latents``, through the model's own ``extra_conds``.

    Raises:
        VitrineError: an empty conditioning, or one with areas or timestep ranges, which a single pass cannot honour.
    """
    if not conditioning:
        raise refuse("conditioning", "empty", "the output of a text encode node", "connect CLIP Text Encode")
    if len(conditioning) > 1 or {"area", "mask", "start_percent"} & set(conditioning[0][1]):
        given = f"{len(conditioning)} parts with {sorted(conditioning[0][1])}"
        raise refuse("conditioning", given, "one plain prompt", "remove Combine, Area, Mask and Timestep Range nodes")
    text, settings = conditioning[0]
    ratio = model.get_model_object("latent_format").spacial_downscale_ratio
    sizes = {"width": latents.shape[-1] * ratio, "height": latents.shape[-2] * ratio}
    told = {"cross_attn": text, "noise": latents, "device": latents.device, "prompt_type": "positive"}
    made = model.model.extra_conds(**sizes | settings | told)
    parts = {k: v.process_cond(batch_size=len(latents), area=None).cond for k, v in made.items()}
    parts = {k: v.to(latents.device) for k, v in parts.items() if isinstance(v, torch.Tensor)}
    return Condition(parts.pop("c_crossattn", None), None, parts)


def encode(model: Any, vae: Any, image: torch.Tensor) -> torch.Tensor:
    """IMAGE (B, H, W, 3) in [0, 1] -> scaled latents on the model's device (posterior mean, as ComfyUI encodes).

    Raises:
        VitrineError: a side that is no multiple of the VAE's factor (ComfyUI would crop it silently).
    """
    factor = vae.spacial_compression_encode()
    height, width = image.shape[1:3]
    if height % factor or width % factor:
        raise refuse("image size", f"{width} x {height}", f"multiples of {factor}", "resize or crop the picture first")
    latents = vae.encode(image[..., :3])
    return model.model.process_latent_in(latents).to(model.load_device).float()


def progress() -> Callable:
    """A progress callback that draws ComfyUI's bar and stops within one step when the user interrupts."""
    bar: list[Any] = []

    def report(step: int, total: int, preview: torch.Tensor | None = None) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        if not bar:
            bar.append(comfy.utils.ProgressBar(total))
        bar[0].update_absolute(step, total)

    return report


# --- recording while a sampler runs -------------------------------------------------------------------------------
@dataclass
class Recorder:
    """Filled anew by each sampling run of the clone it was made with."""

    record: StepRecord | None = field(default=None)

    def activations(self, step: int, half: str) -> Activations:
        """What one step recorded; ``step`` -1 is the last one.

        Raises:
            VitrineError: nothing was recorded yet, or not at that step or half.
        """
        if self.record is None or not len(self.record):
            raise refuse("recording", "empty", "a sampled model", "run the sampler first: connect its LATENT here")
        steps = list(self.record)
        chosen = steps[-1] if step == -1 else step
        if chosen not in steps or half not in self.record[chosen]:
            halves = sorted(self.record[steps[-1]])
            remedy = "record that step in Tap During Sampling"
            raise refuse("step", f"{step} ({half})", f"steps {steps}, {halves}", remedy)
        return self.record[chosen][half]


def record_sampling(model: Any, addresses: str, steps: set[int] | Callable[[int], bool]) -> tuple[Any, Recorder]:
    """A clone that records while it is sampled, and the recorder. Other clones never see its hooks.

    The hooks exist only inside this clone's OUTER_SAMPLE call, and go in its ``finally``, also after an interruption.
    """
    clone, recorder = model.clone(), Recorder()

    def outer_sample(executor: Any, *args: Any, **kwargs: Any) -> Any:
        backbone = backbone_of(clone)
        with tap_steps(backbone, addresses, steps, rows=_halves, count="timesteps") as record:
            recorder.record = record
            return executor(*args, **kwargs)

    kind = comfy.patcher_extension.WrappersMP.OUTER_SAMPLE
    clone.add_wrapper_with_key(kind, _KEY, outer_sample)
    return clone, recorder


def _halves(args: tuple, kwargs: dict) -> list[str]:
    """ComfyUI says for each part of the batch whether it is conditional (0) or not (1)."""
    parts = kwargs.get("transformer_options", {}).get("cond_or_uncond", [0])
    return ["uncond" if part else "cond" for part in parts]
