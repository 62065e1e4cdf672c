"""Distillation inside ComfyUI: the folders a teacher can come from, and a run in the output folder."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import comfy.samplers
import folder_paths
import torch

from ...engine.diffusion.noise import seeded_noise
from ...engine.diffusion.schedule import NoiseSchedule
from ...engine.emd import StudentSampling
from ...engine.errors import refuse
from ...engine.io.file_names import safe_name
from ...engine.io.files import write_whole
from ...engine.io.number_checks import all_finite
from ...engine.pipelines.loading import FLOW, SHIPPED
from ...engine.runtime.progress import Progress
from . import compat_comfyui as core
from .saved import lora_file
from .schedule import schedule_of

if TYPE_CHECKING:
    from ...engine.emd.train_config import EMDTrainConfig


def bases() -> list[str]:
    """The folders in models/diffusers, and the two portraits models."""
    roots = [Path(p) for p in folder_paths.get_folder_paths("diffusers")]
    return [*sorted(p.parent.name for root in roots for p in root.glob("*/model_index.json")), SHIPPED, FLOW]


def checked_latents(x0: torch.Tensor) -> torch.Tensor:
    """Latents of a finished picture as they are."""
    if all_finite(x0):
        return x0
    remedy = "use prompt weights of about 0.5 to 1.5, or run the model in float32"
    raise refuse("picture", "NaN or infinite latents", "finite ones", remedy)


def base_folder(base: str) -> Path | None:
    """Where one of :func:`bases` lies in models/diffusers; None of those that ship."""
    roots = [Path(p) for p in folder_paths.get_folder_paths("diffusers")]
    return next((root / base for root in roots if (root / base / "model_index.json").is_file()), None)


def distil(
    base: str, prompts: list[str], name: str, config: EMDTrainConfig, progress: Progress
) -> tuple[torch.Tensor, Path]:
    """Train in output/vitrine_emd/<name>; IMAGE (4, H, W, 3) of the student and its LoRA file, which loaders list."""
    from ...engine.pipelines.emd_training import training_parts

    safe_name(name, "name")
    teacher = str(base_folder(base) or base)
    folder = Path(folder_paths.get_output_directory()) / "vitrine_emd" / name
    with torch.inference_mode(False), torch.enable_grad():
        parts = training_parts(teacher, prompts, base, folder=folder)
        trainer = parts.trainer(config, folder)
        z = seeded_noise([0, 1, 2, 3], parts.shape).to(trainer.device)
        cond = parts.conditions.take(torch.arange(4) % trainer.condition_count).to(trainer.device)

        @torch.no_grad()
        def pictures() -> torch.Tensor:
            return parts.decode(trainer.generate(z, cond)).float().clamp(0, 1).cpu()

        def advance(step: int, total: int, preview: torch.Tensor | None = None) -> None:
            shown = step == total or step % config.advanced.save_every == 0
            progress(step, total, pictures() if shown else None)

        made = trainer.run(advance)[0]

        def copy(scratch: str) -> None:
            shutil.copyfile(made, scratch)

        return pictures().permute(0, 2, 3, 1), write_whole(lora_file(name), copy)


def with_prediction(model: Any, prediction: str) -> Any:
    """A clone whose network is taken to predict the clean picture, for the students that do; else the model itself."""
    if prediction != "x0":
        return model
    return core.ModelSamplingDiscrete().patch(model, "x0", False)[0]


def stock_sampling(model: Any, sampling: StudentSampling) -> tuple[torch.Tensor, Any]:
    """SIGMAS (steps + 1,) and SAMPLER with which core's SamplerCustom runs a student at cfg 1."""
    schedule = schedule_of(model)
    if sampling.sampler != "tcd":
        return sampling.sigmas(schedule), comfy.samplers.sampler_object(sampling.sampler)
    return sampling.sigmas(schedule), comfy.samplers.KSAMPLER(partial(_sample_tcd, sampling, schedule))


def _sample_tcd(
    sampling: StudentSampling,
    schedule: NoiseSchedule,
    model: Any,
    x: torch.Tensor,
    sigmas: torch.Tensor,
    extra_args: dict | None = None,
    callback: Any = None,
    disable: bool | None = None,
) -> torch.Tensor:
    """TCD's steps (Zheng et al. 2024, Alg. 4), which core does not have, as k-diffusion's samplers are called.

    Args:
        sigmas: (steps + 1,) the levels to take, the student's own or any others; a part of a run ends above 0.
    """
    args, row = extra_args or {}, x.new_ones([x.shape[0]])
    draw, times = core.default_noise_sampler(x, seed=args.get("seed")), _timesteps(schedule, sigmas)
    for i, sigma in enumerate(sigmas[:-1]):
        x0 = model(x, sigma * row, **args)
        if callback is not None:
            callback({"x": x, "i": i, "sigma": sigma, "sigma_hat": sigma, "denoised": x0})
        if sigmas[i + 1] == 0:
            return x0
        kept, fresh = sampling.split(schedule, times[i], times[i + 1])
        x = x0 + kept * (x - x0) / sigma + fresh * draw(sigma, sigmas[i + 1])
    return x


def _timesteps(schedule: NoiseSchedule, sigmas: torch.Tensor) -> list[float]:
    """Timesteps of levels; those of a float32 table are whole numbers again."""
    exact = schedule.timestep(sigmas.cpu().double().clamp(min=1e-9)).tolist()
    return [float(round(t)) if abs(t - round(t)) < 0.02 else t for t in exact]


def refuse_guidance_input(sampling: StudentSampling) -> None:
    """ComfyUI drops the weights by which a full consistency model reads its guidance."""
    if sampling.trained_guidance:
        remedy = "take the LCM-LoRA, or the diffusers pipeline"
        raise refuse("student", "one that reads its guidance", "one that does not, in ComfyUI", remedy)
