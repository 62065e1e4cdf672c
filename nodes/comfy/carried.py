"""What a CONDITIONING and a LATENT carry beside their tensors: which keys one forward understands, and which it cannot.

Core's own functions turn a conditioning into the network's inputs, so whatever they read is honoured. A key that is in
no list here is refused: ignored, it would give the numbers of another graph.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import comfy.hooks
import comfy.model_management
import comfy.sampler_helpers
import comfy.samplers
import torch

from ...engine.errors import refuse

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
_PART_OF_PICTURE = frozenset({"area", "mask", "mask_strength", "set_area_to_bounds", "default"})
_PART_OF_RUN = frozenset({"start_percent", "end_percent", "clip_start_percent", "clip_end_percent"})
_LATENT = frozenset({"samples", "batch_index", "downscale_ratio_spacial", "downscale_ratio_temporal"})


class Carried:
    """ControlNets, GLIGEN boxes and hook LoRAs of one conditioning. Two are equal only if they are one object.

    Attributes:
        settings: core's keys of them.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self._mark = uuid.uuid4().hex

    @property
    def inputs(self) -> dict[str, Any]:
        """What a job that resumes depends on: each ControlNet's network, picture and settings.

        Boxes and hooks hold models that nothing here can read whole: with them, a job is that of this object alone.
        """
        others = {key for key, value in self.settings.items() if value is not None}
        others -= {"control", "control_apply_to_uncond"}
        return {"controls": [_of_control(c) for c in self.controls], "others": self._mark if others else ""}

    @property
    def controls(self) -> Iterator[Any]:
        """The ControlNets, the last one applied first."""
        control = self.settings.get("control")
        while control is not None:
            yield control
            control = control.previous_controlnet


def _of_control(control: Any) -> dict[str, Any]:
    """A ControlNet, T2I adapter or ControlLora as plain values, tensors and networks."""
    networks = [getattr(control, name, None) for name in ("control_model", "t2i_model", "control_weights")]
    settings = [control.strength, list(control.timestep_percent_range), str(control.strength_type)]
    return {
        "kind": type(control).__name__, "networks": networks, "picture": control.cond_hint_original,
        "settings": settings, "concatenated": list(control.extra_concat_orig), "arguments": str(control.extra_args),
    }  # fmt: skip


def one_part(conditioning: list) -> tuple[Any, dict[str, Any]]:
    """(text, settings) of a CONDITIONING of a single prompt for the whole picture and the whole run.

    Raises:
        VitrineError: It is empty; has several prompts, areas, masks or timestep ranges; or an unknown key.
    """
    if not conditioning:
        raise refuse("conditioning", "empty", "the output of a text encode node", "connect CLIP Text Encode")
    settings = conditioning[0][1]
    keys = {k for k, v in settings.items() if v is not None}
    partial = (keys & (_PART_OF_PICTURE | _PART_OF_RUN)) - _whole_run(settings)
    if len(conditioning) > 1 or partial:
        shown = f"{len(conditioning)} parts with {sorted(partial) or sorted(keys)}"
        raise refuse("conditioning", shown, "one plain prompt", "remove Combine, Area, Mask and Timestep Range nodes")
    unknown = keys - READ_BY_MODELS - HONOURED - _WITHOUT_EFFECT - _PART_OF_RUN
    if unknown:
        remedy = "remove the node that added them; sampling with KSampler is not affected"
        raise refuse("conditioning", f"keys {sorted(unknown)}", "what ComfyUI's own nodes put on a prompt", remedy)
    return conditioning[0][0], settings


def _whole_run(settings: dict[str, Any]) -> frozenset[str]:
    """The keys of a timestep range that leaves nothing out."""
    starts, ends = ([settings.get(f"{k}{end}", least) for k in ("", "clip_")]
                    for end, least in (("start_percent", 0.0), ("end_percent", 1.0)))  # fmt: skip
    return _PART_OF_RUN if all(s == 0 for s in starts) and all(e == 1 for e in ends) else frozenset()


def carried_by(model: Any, settings: dict[str, Any]) -> Carried | None:
    """What of a conditioning's settings acts around a forward; None where there is nothing.

    Raises:
        VitrineError: A ControlNet has several hint pictures, or hooks are asked of weights that ComfyUI streams.
    """
    carried = Carried({k: settings[k] for k in HONOURED if settings.get(k) is not None})
    if not carried.settings:
        return None
    for control in carried.controls:
        hint = control.cond_hint_original
        if hint is not None and len(hint) != 1:
            remedy = "give one picture; these methods arrange their rows in their own way"
            raise refuse("ControlNet", f"{len(hint)} hint pictures", "one for all rows", remedy)
    if model.is_dynamic() and comfy.sampler_helpers.cond_has_hooks([[None, carried.settings]]):
        remedy = "load the LoRA with Load LoRA, or start ComfyUI with --disable-dynamic-vram"
        raise refuse("conditioning", "hooks on a model whose weights are streamed", "one without hooks", remedy)
    return carried


def latent_keys(latent: dict) -> dict:
    """A LATENT of which every key is understood.

    Raises:
        VitrineError: It has a noise mask, or a key that is not understood.
    """
    if latent.get("noise_mask") is not None:
        remedy = "remove Set Latent Noise Mask (noise_mask off in InpaintModelConditioning)"
        raise refuse("latent", "a noise mask", "a latent without one: whole pictures are predicted", remedy)
    unknown = {k for k, v in latent.items() if v is not None} - _LATENT - {"noise_mask"}
    if unknown:
        remedy = "connect a picture's latent, from Empty Latent Image or VAE Encode"
        raise refuse("latent", f"keys {sorted(unknown)}", "a picture's latent", remedy)
    return latent


# --- around one forward -------------------------------------------------------------------------------------------
@contextmanager
def applied(model: Any, part: dict[str, Any], options: dict[str, Any]) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """One conditioning, prepared for ``calc_cond_batch`` as a guider's run prepares it, and cleaned up after.

    Args:
        part: core's settings of it, with ``model_conds`` and ``uuid``.
        options: model_options of the forward.
    """
    conds = {"positive": [part]}
    comfy.samplers.preprocess_conds_hooks(conds)
    comfy.sampler_helpers.prepare_model_patcher(model, conds, options)
    comfy.samplers.filter_registered_hooks_on_conds(conds, options)
    models: list[Any] = []
    before = model.hook_mode
    try:
        if HONOURED & set(part):
            model.hook_mode = comfy.hooks.EnumHookMode.MinVram
            models = comfy.sampler_helpers.get_additional_models(conds, model.model_dtype())[0]
            models += comfy.sampler_helpers.get_additional_models_from_model_options(options)
            _load(model, models)
            for hook in part["hooks"].hooks if part.get("hooks") else ():
                hook.initialize_timesteps(model.model)
            comfy.samplers.pre_run_control(model.model, conds["positive"])
        yield conds
    finally:
        model.hook_mode = before
        if HONOURED & set(part):
            comfy.sampler_helpers.cleanup_models(conds, models)
            model.restore_hook_patches()


def _load(model: Any, models: Iterable[Any]) -> None:
    """Load what acts beside the model, fit for gradients where there are any."""
    comfy.model_management.load_models_gpu([model, *models])
    if torch.is_grad_enabled():
        for other in models:
            own_tensors(other.model)


def own_tensors(module: torch.nn.Module) -> None:
    """Replace tensors made in inference mode by equal ones, which autograd takes; one at a time."""
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None and value.is_inference():
                part._parameters[name] = torch.nn.Parameter(value.detach().clone(), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_inference():
                part._buffers[name] = buffer.clone()
