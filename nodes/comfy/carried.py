"""What a CONDITIONING and a LATENT carry besides their tensors: which keys one forward understands, which it cannot.

Core's own functions turn a conditioning into the network's inputs, so whatever they read is honoured. A key that is in
no list here is no part of core: it goes along, for wrappers on the MODEL that read it, and reports name it.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import comfy.model_management
import torch

from ...engine.errors import refuse
from ...engine.runtime.compat_torch import parameters_and_buffers
from ...engine.runtime.finite import require_finite
from . import compat_comfyui as core

SIZES, NULL = "vitrine_sizes", "vitrine_null"
"""Keys of a conditioning: the SizeCondition a control checkpoint reads, and that control is left out."""
CARRIED = "vitrine_carried"
"""Key of the engine's Condition under which :class:`Carried` travels."""
_NAMES = """
    aesthetic_score aspect_ratio attention_mask attention_mask_img_shape attention_mask_mt5xl audio_codes audio_embed
    audio_inject_scale augmentation_level azimuth camera_conditions clip_vision_output clip_vision_output_pose
    clip_vision_output_ref clip_vision_outputs concat_image concat_latent_image concat_mask concat_mask_index condition
    conditioning_byt5small conditioning_llama3 conditioning_lyrics conditioning_mt5xl conditioning_scale context_latents
    control_video crop_h crop_w cross_attn cross_attn_controlnet cross_attn_pose degrade_sigma driving_mask_28ch
    elevation embeds face_video_pixels fps frame_rate generated_keyframes guidance guide_attention_entries
    guiding_frame_index height keyframe_idxs latent_shapes lq_latent lyrics_strength minimax_audio_cond_noise_aug
    minimax_keyframes minimax_refs minimax_token_tags minimax_visual_cond_noise_aug motion_bucket_id noise_augmentation
    noise_concat ofs pooled_output pose_strength pose_video_latent prompt_type ref_audio ref_latent ref_mask_28ch
    ref_mask_flag reference_audio_timbre_latents reference_latents reference_latents_method
    reference_latents_text_embeds reference_motion reference_strength seconds_start seconds_total seed
    stable_cascade_prior t5xxl_ids t5xxl_weights target_height target_width text_input_ids time_conditioning
    time_dim_concat time_dim_replace unclip_conditioning unclip_noise_augment_merge unprocessed_ltxav_embeds vace_frames
    vace_mask vace_strength width
"""
READ_BY_MODELS = frozenset(_NAMES.split())
"""What ``extra_conds`` of core's model classes reads."""
HONOURED = frozenset({"control", "control_apply_to_uncond", "gligen", "hooks", "additional_models"})
"""What core applies around a forward."""
_WITHOUT_EFFECT = frozenset({"strength", "model_conds", "uuid", SIZES, NULL})
"""A single conditioning's strength cancels, in core too; the others are read where they are."""
PART_OF_PICTURE = frozenset({"area", "mask", "mask_strength", "set_area_to_bounds", "default"})
"""Where in the picture a prompt is meant."""
PART_OF_RUN = frozenset({"start_percent", "end_percent", "clip_start_percent", "clip_end_percent"})
"""When in the run it is meant."""
_LATENT = frozenset({"samples", "batch_index", "downscale_ratio_spacial", "downscale_ratio_temporal"})


class Carried:
    """ControlNets, GLIGEN boxes and hook LoRAs of a conditioning. Two are equal only if they are one object.

    Attributes:
        settings: core's keys of them, and of the part of the picture that the prompt is for.
        others: core's form of the prompts for other parts of the picture.
    """

    def __init__(self, settings: dict[str, Any], others: Sequence[dict[str, Any]] = ()) -> None:
        self.settings, self.others = settings, others
        self._mark = uuid.uuid4().hex

    @property
    def inputs(self) -> dict[str, Any]:
        """What a job that resumes depends on: each ControlNet's network, picture and settings.

        Boxes and hooks contain models that cannot be read whole here: with them, a job is that of this object alone.
        """
        others = {key for key, value in self.settings.items() if value is not None}
        others -= {"control", "control_apply_to_uncond"}
        return {
            "controls": [_of_control(c) for c in self.controls],
            "others": self._mark if others or self.others else "",
        }

    @property
    def controls(self) -> Iterator[Any]:
        """The ControlNets, the last one applied first."""
        for settings in (self.settings, *self.others):
            control = settings.get("control")
            while control is not None:
                yield control
                control = control.previous_controlnet


def _of_control(control: Any) -> dict[str, Any]:
    """A ControlNet, T2I adapter or ControlLora as plain values, tensors and networks."""
    networks = [getattr(control, name, None) for name in ("control_model", "t2i_model", "control_weights")]
    settings = [control.strength, list(control.timestep_percent_range), str(control.strength_type)]
    return {
        "kind": type(control).__name__,
        "networks": networks,
        "picture": control.cond_hint_original,
        "settings": settings,
        "concatenated": list(control.extra_concat_orig),
        "arguments": str(control.extra_args),
    }


def checked(conditioning: list, regional: bool = False) -> list:
    """A CONDITIONING for the whole run; keys that core does not know go along and are logged.

    Args:
        regional: several prompts, for parts of the picture, are understood too.
    """
    if not conditioning:
        raise refuse("conditioning", "empty", "the output of a text encode node", "connect CLIP Text Encode")
    for _, settings in conditioning:
        _check_keys(settings, len(conditioning), regional)
    if line := foreign_keys(conditioning):
        warn_once(f"conditioning: {line}")
    return conditioning


@lru_cache(maxsize=256)
def warn_once(line: str) -> None:
    """Into the server's log, for nodes that have no report to say it in."""
    logging.getLogger("vitrine").warning(line)


def _check_keys(settings: dict[str, Any], count: int, regional: bool) -> None:
    keys = {k for k, v in settings.items() if v is not None}
    partial = (keys & (PART_OF_PICTURE | PART_OF_RUN)) - _whole_run(settings)
    partial -= PART_OF_PICTURE if regional else set()
    if (count > 1 and not regional) or partial:
        shown = f"{count} parts with {sorted(partial) or sorted(keys)}"
        remedy = "remove Combine, Area and Mask nodes (Timestep Range too, where it runs at several noise levels)"
        raise refuse("conditioning", shown, "one prompt for the whole picture: the network runs once", remedy)


def _foreign(settings: dict[str, Any]) -> set[str]:
    """Keys of other packs, which nothing in core reads."""
    known = READ_BY_MODELS | HONOURED | _WITHOUT_EFFECT | PART_OF_RUN | PART_OF_PICTURE
    return {k for k, v in settings.items() if v is not None and k not in known}


def foreign_keys(conditioning: list) -> str:
    """A line for a report: what of a CONDITIONING nothing in core reads; empty if there is nothing."""
    keys = sorted(set[str]().union(*(_foreign(settings) for _, settings in conditioning)))
    return f"not read by ComfyUI: {', '.join(keys)}" if keys else ""


def with_foreign(text: str, *conditionings: list | None) -> str:
    """A report, and what nothing in core reads of the prompts that it is about."""
    lines = dict.fromkeys(foreign_keys(conditioning) for conditioning in conditionings if conditioning)
    return "\n".join([text, *filter(None, lines)])


def active_at(model: Any, conditioning: list, sigma: float) -> list:
    """The prompts of a CONDITIONING that core's sampler applies at a noise level, without their timestep ranges."""
    base = SimpleNamespace(model_sampling=model.get_model_object("model_sampling"))
    prompts = [dict(settings) for _, settings in conditioning]
    core.calculate_start_end_timesteps(base, prompts)
    ranges = [(own.get("timestep_end", 0.0), own.get("timestep_start", math.inf)) for own in prompts]
    active = [
        [text, {k: v for k, v in settings.items() if k not in PART_OF_RUN}]
        for (text, settings), (end, start) in zip(conditioning, ranges, strict=True)
        if end <= sigma <= start
    ]
    if conditioning and not active:
        shown = f"no prompt at the noise level {sigma:.4g}: {[(s, e) for e, s in ranges]}"
        raise refuse("conditioning", shown, "a prompt there", "change the timestep, or the Timestep Range")
    return active


def _whole_run(settings: dict[str, Any]) -> frozenset[str]:
    """The keys of a timestep range that leaves nothing out."""
    starts, ends = (
        [settings.get(f"{k}{end}", least) for k in ("", "clip_")]
        for end, least in (("start_percent", 0.0), ("end_percent", 1.0))
    )
    return PART_OF_RUN if all(s == 0 for s in starts) and all(e == 1 for e in ends) else frozenset()


def carried_by(model: Any, prompts: Sequence[dict[str, Any]]) -> Carried | None:
    """What of core's forms of prompts acts around a forward; None where there is nothing."""
    first, *others = prompts
    regional = bool(others or any(first.get(k) is not None for k in PART_OF_PICTURE))
    kept = HONOURED | (PART_OF_PICTURE | {"strength"} if regional else set()) | _foreign(first)
    carried = Carried({k: first[k] for k in kept if first.get(k) is not None}, others)
    if not carried.settings and not others:
        return None
    for control in carried.controls:
        hint = control.cond_hint_original
        if hint is not None and len(hint) != 1:
            remedy = "give one picture; these methods arrange their rows in their own way"
            raise refuse("ControlNet", f"{len(hint)} hint pictures", "one for the whole batch", remedy)
    if model.is_dynamic() and core.cond_has_hooks([[None, prompt] for prompt in prompts]):
        remedy = "load the LoRA with Load LoRA, or start ComfyUI with --disable-dynamic-vram"
        raise refuse("conditioning", "hooks on a model whose weights are streamed", "one without hooks", remedy)
    return carried


def check_covered(prompts: Sequence[dict[str, Any]], latents: torch.Tensor) -> None:
    """Prompts for parts of latents (B, C, h, w), in core's form, leave none without any."""
    covered, first = torch.zeros_like(latents), 2
    for prompt in prompts:
        if "default" in prompt:
            return
        whole = {"model_conds": {}, "uuid": None} | prompt
        part = core.get_area_and_mult(whole | {"model_conds": {}}, latents, latents.flatten()[:1])
        where, axes = covered, range(latents.ndim - first if part.area is not None else 0)
        for i in axes:
            where = where.narrow(i + first, part.area[i + len(axes)], part.area[i])
        where += part.mult
    if not bool((covered > 0).all()):
        shown = f"prompts for {float((covered > 0).float().mean()):.0%} of the picture"
        raise refuse("conditioning", shown, "prompts that cover all of it", "combine them with one for the rest")


def latent_keys(latent: dict, sampled: bool = False) -> dict:
    """A LATENT of pictures or videos, of which every key is understood.

    Args:
        sampled: a sampler starts from it, so that a noise mask is understood, and other keys go on, as in KSampler.
    """
    samples = latent.get("samples")
    if not isinstance(samples, torch.Tensor) or samples.ndim not in (4, 5) or not samples.numel():
        shown = tuple(samples.shape) if isinstance(samples, torch.Tensor) else type(samples).__name__
        accepted = "one picture or more, (B, C, h, w), or a video (B, C, T, h, w)"
        raise refuse("latent", shown, accepted, "connect Empty Latent Image or VAE Encode")
    require_finite(samples, "latent", "look at it with VAE Decode: a VAE in float16 may need --fp32-vae")
    if latent.get("noise_mask") is not None and not sampled:
        remedy = "remove Set Latent Noise Mask (noise_mask off in InpaintModelConditioning)"
        raise refuse("latent", "a noise mask", "a latent without one: whole pictures are predicted", remedy)
    unknown = {k for k, v in latent.items() if v is not None} - _LATENT - {"noise_mask"}
    unknown &= {"type"} if sampled else unknown
    if unknown:
        remedy = "connect a picture's latent, from Empty Latent Image or VAE Encode"
        raise refuse("latent", f"keys {sorted(unknown)}", "a picture's latent", remedy)
    return latent


# --- around one forward -------------------------------------------------------------------------------------------
@contextmanager
def applied(
    model: Any, parts: list[dict[str, Any]], options: dict[str, Any]
) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Prompts, prepared for ``calc_cond_batch`` as a guider's run prepares them, and cleaned up after.

    Args:
        parts: core's settings of each, with ``model_conds`` and ``uuid``.
        options: model_options of the forward.
    """
    conds = {"positive": parts}
    core.preprocess_conds_hooks(conds)
    core.prepare_model_patcher(model, conds, options)
    core.filter_registered_hooks_on_conds(conds, options)
    models: list[Any] = []
    before, acting = model.hook_mode, bool(HONOURED & {key for part in parts for key in part})
    try:
        if acting:
            model.hook_mode = core.EnumHookMode.MinVram
            models = core.get_additional_models(conds, model.model_dtype())[0]
            models += core.get_additional_models_from_model_options(options)
            _load(model, models)
            for hook in (hook for part in parts if part.get("hooks") for hook in part["hooks"].hooks):
                hook.initialize_timesteps(model.model)
            core.pre_run_control(model.model, conds["positive"])
        yield conds
    finally:
        model.hook_mode = before
        if acting:
            core.cleanup_models(conds, models)
            model.restore_hook_patches()


def _load(model: Any, models: Iterable[Any]) -> None:
    """Load what acts together with the model, fit for gradients where there are any."""
    comfy.model_management.load_models_gpu([model, *models])
    if torch.is_grad_enabled():
        for other in models:
            own_tensors(other.model)


def own_tensors(module: torch.nn.Module) -> None:
    """Replace tensors made in inference mode by equal ones, which autograd takes; one at a time."""
    for part in module.modules():
        for table, name, value in parameters_and_buffers(part):
            if value.is_inference():
                own, fixed = value.detach().clone(), isinstance(value, torch.nn.Parameter)
                table[name] = torch.nn.Parameter(own, requires_grad=False) if fixed else own
