"""What control conditioning needs of ComfyUI's insides: weighted size vectors, checkpoints, values in conditionings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.conds
import comfy.model_base
import comfy.model_management
import comfy.model_sampling
import comfy.patcher_extension
import comfy.utils
import folder_paths
import node_helpers
import torch

from ...engine.control import (
    ControlCheckpoint,
    GammaConfig,
    Told,
    added_delta,
    blend,
    delta_share,
    load_control,
    sdxl_reference,
)
from ...engine.control.reference_blend import Reference
from ...engine.errors import refuse
from ...engine.portraits.shipped import TRANSFORMERS
from . import model as bridge

KEY = "vitrine.control"
FOLDER = "vitrine_control"
TOLD, NULL = "vitrine_told", "vitrine_null"
PIXELS = 8
"""ComfyUI tells models sizes as latent cells times 8, whatever the VAE."""
_VALUES, _DROP = "vitrine_values", "vitrine_drop"
_SIZES = ("width", "height", "crop_w", "crop_h", "target_width", "target_height", "aspect_ratio", TOLD)
_WRAPPERS = comfy.patcher_extension.WrappersMP
_FAMILIES = {
    "UNetModel": ("UNet2DConditionModel", lambda net: net.time_embed[2].out_features),
    "PixArtMS": ("PixArtTransformer2DModel", lambda net: net.hidden_size),
    "OpenAISignatureMMDITWrapper": ("SD3Transformer2DModel", lambda net: net.t_embedder.mlp[2].out_features),
}
"""ComfyUI's class -> the diffusers class a checkpoint names, and the width of its timestep embedding."""

if FOLDER not in folder_paths.folder_names_and_paths:
    folder_paths.add_model_folder_path(FOLDER, str(Path(folder_paths.models_dir) / FOLDER))


@dataclass(frozen=True)
class Weighting:
    """Attached to a MODEL: the curve, and the neutral size or the checkpoint it weighs."""

    gamma: GammaConfig
    reference: Reference = "target"
    checkpoint: ControlCheckpoint | None = None


def weighting_of(model: Any) -> Weighting | None:
    """What Apply Gamma Schedule or Load Control Checkpoint put on a MODEL."""
    return model.get_attachment(KEY)


# --- which model --------------------------------------------------------------------------------------------------
def size_family(model: Any) -> str:
    """``SDXL`` or ``PixArt``.

    Raises:
        VitrineError: a model that is told no sizes.
    """
    if isinstance(model.model, comfy.model_base.SDXL):
        return "SDXL"
    if getattr(bridge.backbone_of(model), "micro_conditioning", False):
        return "PixArt"
    given = f"{type(model.model).__name__} ({type(bridge.backbone_of(model)).__name__})"
    raise refuse("model", given, "SDXL base, PixArt with size conditions", "other models are told no sizes to weight")


def clock_of(sampling: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """sigma (B,) -> timesteps (B,) of 1000, float64 on the CPU: what the network is told.

    Raises:
        VitrineError: a continuous schedule that is no flow.
    """
    if isinstance(sampling, comfy.model_sampling.CONST):
        return lambda sigma: sigma.double().cpu() * 1000
    if isinstance(sampling, comfy.model_sampling.ModelSamplingDiscrete):
        return lambda sigma: sampling.timestep(sigma).double().cpu()
    raise refuse("model sampling", type(sampling).__name__, "a sigma table or a flow", "EDM models have no timesteps")


# --- weighting the sizes a model is told --------------------------------------------------------------------------
def weighted(model: Any, gamma: GammaConfig, reference: Reference = "target") -> Any:
    """A clone whose size inputs weigh gamma of each row's timestep; the model itself where the weight is constant 1.

    Nothing is put on the modules between calls, and no weight changes. Applied twice, the last one counts.

    Raises:
        VitrineError: a model without size inputs, or with a control checkpoint of its own.
    """
    family, before = size_family(model), weighting_of(model)
    if before is not None and before.checkpoint is not None:
        raise refuse("model", "with a control checkpoint", "one without", "its curve is part of what was trained")
    clock_of(model.get_model_object("model_sampling"))
    off = gamma.form == "constant" and reference == "target"  # else rows without control differ
    if off and before is None:
        return model
    apply = _sdxl if family == "SDXL" else _pixart
    clone = _bare(model)
    return clone if off else _attached(clone, Weighting(gamma, reference), apply)


def _bare(model: Any) -> Any:
    clone = model.clone()
    for kind in (_WRAPPERS.APPLY_MODEL, _WRAPPERS.OUTER_SAMPLE):
        clone.remove_wrappers_with_key(kind, KEY)
    clone.remove_attachments(KEY)
    return clone


def _attached(clone: Any, weighting: Weighting, apply: Callable) -> Any:
    def outer_sample(executor: Any, noise: Any, *args: Any, **kwargs: Any) -> Any:
        size = (noise.shape[-2] * PIXELS, noise.shape[-1] * PIXELS)
        for conds in executor.class_obj.conds.values():
            for cond in conds:
                cond["model_conds"] = cond.get("model_conds", {}) | _rows(cond, weighting, size)
        return executor(noise, *args, **kwargs)

    def apply_model(
        executor: Any, x: Any, t: Any, c_concat: Any = None, c_crossattn: Any = None, control: Any = None,
        transformer_options: Any = None, **named: Any,
    ) -> Any:  # fmt: skip
        told = (named.pop(_VALUES, None), named.pop(_DROP, None))

        def go(options: dict) -> Any:
            return executor(x, t, c_concat, c_crossattn, control, options, **named)

        return apply(weighting, executor.class_obj, x, t, told, named, transformer_options or {}, go)

    clone.add_wrapper_with_key(_WRAPPERS.OUTER_SAMPLE, KEY, outer_sample)
    clone.add_wrapper_with_key(_WRAPPERS.APPLY_MODEL, KEY, apply_model)
    clone.set_attachments(KEY, weighting)
    return clone


def _rows(cond: dict, weighting: Weighting, size: tuple[int, int]) -> dict[str, Any]:
    """What travels with a conditioning to the model; the same keys for all, so that they still batch."""
    if weighting.checkpoint is None:
        return {_DROP: comfy.conds.CONDRegular(torch.tensor([[bool(cond.get(NULL))]]))}
    spec, told = weighting.checkpoint.embedder.spec, cond.get(TOLD)
    drop = told is None or bool(cond.get(NULL))
    values = spec.rows(spec.reference() if told is None else told.controls(size, spec))
    return {_VALUES: comfy.conds.CONDRegular(values), _DROP: comfy.conds.CONDRegular(torch.tensor([[drop]]))}


def _weights(weighting: Weighting, base: Any, t: torch.Tensor, drop: torch.Tensor | None) -> torch.Tensor:
    weight = weighting.gamma.at(clock_of(base.model_sampling)(t))
    return weight if drop is None else weight.masked_fill(drop[:, 0].cpu(), 0.0)


def _sdxl(
    weighting: Weighting, base: Any, x: torch.Tensor, t: torch.Tensor, told: tuple, named: dict, options: dict,
    go: Callable,
) -> Any:  # fmt: skip
    """(gamma - 1)(A(size) - A(ref)) through ComfyUI's ``emb_patch``, right before the UNet adds A(size)."""
    weight, y = _weights(weighting, base, t, told[1]), named.get("y")
    if y is None or bool((weight == 1).all()):
        return go(options)
    neutral = sdxl_reference(y, weighting.reference, embed=base.embedder)
    dtype = base.get_dtype_inference()
    full, neutral = (comfy.model_management.cast_to_device(v, x.device, dtype) for v in (y, neutral))
    ends = weight == 0
    # At weight 0 the neutral vector itself: a difference that cancels would leave a rounding.
    named["y"] = torch.where(ends[:, None].to(x.device), neutral, full)
    weight = weight.masked_fill(ends, 1.0)
    if bool((weight == 1).all()):
        return go(options)
    share = delta_share(added_delta(base.diffusion_model.label_emb, full, neutral), weight)
    return go(_with_emb_patch(options, share))


def _with_emb_patch(options: dict, added: torch.Tensor) -> dict:
    patches = dict(options.get("patches", {}))
    patches["emb_patch"] = [*patches.get("emb_patch", []), lambda emb, channels, told: emb + added.to(emb)]
    return options | {"patches": patches}


def _pixart(
    weighting: Weighting, base: Any, x: torch.Tensor, t: torch.Tensor, told: tuple, named: dict, options: dict,
    go: Callable,
) -> Any:  # fmt: skip
    """PixArt has no patch at its size embedder; a hook that exists only inside this call never meets a sibling."""
    weight, reference = _weights(weighting, base, t, told[1]), weighting.reference
    asked = [s * PIXELS for s in x.shape[-2:]] if isinstance(reference, str) else list(reference)
    if bool((weight == 1).all()):
        return go(options)

    def hook(module: Any, args: tuple, output: torch.Tensor) -> torch.Tensor:
        if reference == "zeros":
            neutral = module.mlp(output.new_zeros(2, module.frequency_embedding_size)).reshape(1, -1)
        else:
            neutral = module.forward(torch.tensor([asked]).to(args[0]), 1)
        return blend(output, neutral.expand_as(output), weight)

    return _hooked(base.diffusion_model.csize_embedder, hook, lambda: go(options))


def _hooked(module: Any, hook: Callable, run: Callable) -> Any:
    handle = module.register_forward_hook(hook)
    try:
        return run()
    finally:
        handle.remove()


# --- control checkpoints ------------------------------------------------------------------------------------------
def shipped() -> dict[str, Path]:
    """Name -> control file of each portraits transformer that ships."""
    return {f"portraits {p.parent.name}": p for p in sorted(TRANSFORMERS.glob("*/control.safetensors"))}


def checkpoints() -> list[str]:
    """Files of ``models/vitrine_control``, then those that ship."""
    own = [f for f in folder_paths.get_filename_list(FOLDER) if f.endswith(".safetensors")]
    return [*own, *shipped()]


def read_checkpoint(name: str) -> ControlCheckpoint:
    """One of :func:`checkpoints`."""
    return load_control(shipped().get(name) or folder_paths.get_full_path_or_raise(FOLDER, name))


def with_checkpoint(model: Any, checkpoint: ControlCheckpoint) -> Any:
    """A clone to which a checkpoint's control embedding is added, Eq. 1, for conditionings that have control values.

    Raises:
        VitrineError: a checkpoint of another family or width, or with weights beside the embedder that have no place.
    """
    net, facts = bridge.backbone_of(model), checkpoint.metadata
    kind = next((k.__name__ for k in type(net).__mro__ if k.__name__ in _FAMILIES), type(net).__name__)
    family, width = _FAMILIES.get(kind, (kind, lambda net: 0))
    if (family, width(net)) != (facts.family, facts.dim):
        given = (family, width(net))
        raise refuse("model", given, (facts.family, facts.dim), f"load {facts.base_model or 'the base model'}")
    clock_of(model.get_model_object("model_sampling"))
    clone = _bare(model)
    _put_weights(clone, checkpoint.extra)
    return _attached(clone, Weighting(facts.gamma, checkpoint=checkpoint), _own)


def _put_weights(clone: Any, extra: dict[str, torch.Tensor]) -> None:
    if not extra:
        return
    unet = type(bridge.backbone_of(clone)).__name__ == "UNetModel"
    names = comfy.utils.unet_to_diffusers(clone.model.model_config.unet_config) if unet else {}
    keys = {k: names.get(k.removeprefix("base.")) for k in extra}
    lost = [k for k, v in keys.items() if v is None]
    if lost:
        raise refuse("weights", lost[:3], "base.* of a UNet", "merge them into the base model first")
    clone.add_patches({f"diffusion_model.{keys[k]}": ("set", (v,)) for k, v in extra.items()}, 1.0)


def _own(
    weighting: Weighting, base: Any, x: torch.Tensor, t: torch.Tensor, told: tuple, named: dict, options: dict,
    go: Callable,
) -> Any:  # fmt: skip
    values, drop = told
    if values is None or bool(drop.all()):
        return go(options)
    assert weighting.checkpoint is not None  # its own controls are what brings a MODEL here
    gamma, embedder = weighting.gamma, weighting.checkpoint.embedder.to(x.device)
    added = embedder(values.cpu(), gamma.u(clock_of(base.model_sampling)(t)), gamma, drop[:, 0].cpu())
    net = base.diffusion_model
    if type(net).__name__ == "UNetModel":
        return go(_with_emb_patch(options, added))
    return _hooked(net.t_embedder, lambda module, args, output: output + added.to(output), lambda: go(options))


# --- conditionings ------------------------------------------------------------------------------------------------
def with_told(conditioning: list, told: Told, size: tuple[int, int] | None = None) -> list:
    """CONDITIONING that is told sizes: SDXL's and PixArt's own keys, and what control checkpoints read.

    Raises:
        VitrineError: no original or target size, and no ``size`` to take them from.
    """
    if size is None and (told.original is None or told.target is None):
        raise refuse("sizes", told, "original and target", "give both")
    height, width, top, left, target_height, target_width = (int(v) for v in told.time_ids(size or (1, 1)))
    values = {
        "width": width, "height": height, "crop_w": left, "crop_h": top, "target_width": target_width,
        "target_height": target_height, "aspect_ratio": target_height / target_width, TOLD: told,
    }  # fmt: skip
    return node_helpers.conditioning_set_values(conditioning, values)


def nulled(conditioning: list) -> list:
    """The same prompt without control."""
    return [[text, {k: v for k, v in d.items() if k not in _SIZES} | {NULL: True}] for text, d in conditioning]


def controlled_like(conditioning: list, other: list) -> list:
    """A prompt with the control of another's first part."""
    values = {k: v for k, v in other[0][1].items() if k in _SIZES}
    return [[text, {k: v for k, v in d.items() if k not in _SIZES} | values] for text, d in conditioning]


def high_is_null(cond: dict, size: tuple[int, int]) -> bool:
    """As the model reads the keys: a target that is missing is the original."""
    original = (cond.get("height", size[0]), cond.get("width", size[1]))
    target = (cond.get("target_height", original[0]), cond.get("target_width", original[1]))
    told = Told(original, (cond.get("crop_h", 0), cond.get("crop_w", 0)), target)
    aspect = cond.get("aspect_ratio", original[0] / original[1])
    return told.high_is_null(size) and aspect == size[0] / size[1]


# --- text ----------------------------------------------------------------------------------------------------------
def token_count(clip: Any, text: str) -> int:
    """Tokens of a prompt with its start and end, as the first of the CLIP's text encoders sees it."""
    tokens = clip.tokenize(text)
    named = {k.removeprefix("clip_"): v for k, v in vars(clip.tokenizer).items() if hasattr(v, "end_token")}
    name = next((n for n in named if n in tokens), None)
    if name is None:
        raise refuse("clip", sorted(tokens), "a text encoder of CLIP or T5 kind", "give the number of tokens yourself")
    ids = [t[0] for chunk in tokens[name] for t in chunk]
    last = len(ids) - 1
    while last > 0 and ids[last - 1] == ids[-1]:
        last -= 1
    # Padded with the end token, the first of the run is the prompt's own; else the run is padding.
    return last + 1 if ids[-1] == named[name].end_token else last
