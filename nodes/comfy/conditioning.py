"""ComfyUI's CONDITIONING: as the engine's Condition, from prompts, and with the sizes of size conditioning."""

from __future__ import annotations

import copy
from typing import Any

import node_helpers
import torch

from ...engine.control import SizeCondition
from ...engine.errors import refuse
from ...engine.families import FAMILIES
from ...engine.io.number_checks import all_finite
from ...engine.network.condition import Condition
from . import compat_comfyui as core
from .carried import CARRIED, NULL, PART_OF_PICTURE, PART_OF_RUN, SIZES, active_at, carried_by, check_covered, checked
from .forwards import LISTED
from .schedule import schedule_of

PIXELS = 8
"""ComfyUI tells models sizes as latent cells times 8, whatever the VAE."""
CONTROL = "vitrine.control"
"""Key under which a MODEL has its weighting of sizes or its control checkpoint."""
_KEYS = ("width", "height", "crop_w", "crop_h", "target_width", "target_height", "aspect_ratio", SIZES)
_PLACES = PART_OF_PICTURE | PART_OF_RUN | {"strength"}


# --- as the engine's Condition ------------------------------------------------------------------------------------
def condition_of(
    model: Any, conditioning: list, latents: torch.Tensor, t: float | None = None, regional: bool = False
) -> Condition:
    """CONDITIONING -> Condition for the rows of ``latents``, through the model's own ``extra_conds``.

    What core reads of a conditioning is honoured: its own functions prepare it. So are ControlNets, GLIGEN and hooks,
    which act around each forward.

    Args:
        t: the one timestep at which it is used, so that of prompts with timestep ranges the one of that time is taken;
            None where there are several.
        regional: the method wants predictions alone, so that prompts for parts of the picture may be several rows or
            forwards.
    """
    prompts = conditioning if t is None else prompts_at(model, conditioning, t)
    parts = _as_core_does(model, checked(prompts, regional), latents)
    carried = carried_by(model, parts)
    conds = parts[0]["model_conds"].items()
    values = {k: v.process_cond(batch_size=len(latents), area=None).cond for k, v in conds}
    tensors, fixed = {}, {}
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            tensors[key] = value.to(latents.device)
        elif isinstance(value, list) and value and all(isinstance(v, torch.Tensor) for v in value):
            tensors |= {f"{key}{LISTED}{n}": v.to(latents.device) for n, v in enumerate(value)}
        else:
            fixed[key] = value
    fixed |= {} if carried is None else {CARRIED: carried}
    return Condition(tensors.pop("c_crossattn", None), None, tensors, fixed)


def prompts_at(model: Any, conditioning: list, t: float) -> list:
    """The prompts of a CONDITIONING that act at a timestep, without their timestep ranges."""
    return active_at(model, conditioning, float(schedule_of(model).sigma(t)))


def _as_core_does(model: Any, prompts: list, latents: torch.Tensor) -> list[dict[str, Any]]:
    """Prompts as core's sampler prepares them: model_conds, and areas and masks in cells of the latents."""
    weighting, own = model.get_attachment(CONTROL), []
    for text, settings in prompts:
        part = {k: v for k, v in settings.items() if v is not None}
        part["model_conds"] = dict(settings.get("model_conds", {}))
        if text is not None and not all_finite(text):
            remedy = "use prompt weights of about 0.5 to 1.5, and a text encoder in float32"
            raise refuse("prompt", "NaN or infinite text features", "finite ones", remedy)
        part |= {} if text is None else {"cross_attn": text}
        if weighting is not None:
            part["model_conds"] |= weighting.model_conds(settings, _pixels(latents))
        own.append(part)
    core.resolve_areas_and_cond_masks_multidim(own, latents.shape[2:], latents.device)
    check_covered(own, latents)
    blank = torch.zeros_like(latents)
    parts: list[dict[str, Any]] = core.encode_model_conds(
        model.model.extra_conds,
        own,
        latents,
        latents.device,
        "positive",
        latent_image=blank,
        denoise_mask=None,
        seed=0,
        latent_shapes=[latents.shape],
    )
    return parts


def _pixels(latents: torch.Tensor) -> tuple[int, int]:
    return latents.shape[-2] * PIXELS, latents.shape[-1] * PIXELS


def prompt_conditions(model: Any, clip: Any, prompts: list[str], latents: torch.Tensor) -> list[Condition]:
    """One condition of one row for each caption, taken literally."""
    return [condition_of(model, literal(clip, prompt), latents[:1]) for prompt in prompts]


def literal(clip: Any, text: str) -> list:
    """CONDITIONING of a caption, literally.

    ComfyUI reads parentheses as weights and ``embedding:`` as a file, which no list of captions means.
    """
    reader = copy.copy(clip)
    reader.tokenizer = copy.copy(clip.tokenizer)
    for name, part in {**vars(clip.tokenizer)}.items():
        if hasattr(part, "embedding_directory"):
            part = copy.copy(part)
            part.embedding_directory = None
            setattr(reader.tokenizer, name, part)
    tokens = reader.tokenize(text.replace("(", "\\(").replace(")", "\\)"))
    conditioning: list = clip.encode_from_tokens_scheduled(tokens)
    return conditioning


# --- sizes --------------------------------------------------------------------------------------------------------
def with_sizes(conditioning: list, sizes: SizeCondition, size: tuple[int, int] | None = None) -> list:
    """CONDITIONING with sizes: SDXL's and PixArt's own keys, and what control checkpoints read.

    Args:
        size: (height, width) of the picture in pixels, for what ``sizes`` leaves open.
    """
    if size is None and (sizes.original is None or sizes.target is None):
        raise refuse("sizes", sizes, "original and target", "give both")
    height, width, top, left, target_height, target_width = (int(v) for v in sizes.time_ids(size or (1, 1)))
    values = {
        "width": width,
        "height": height,
        "crop_w": left,
        "crop_h": top,
        "target_width": target_width,
        "target_height": target_height,
        "aspect_ratio": target_height / target_width,
        SIZES: sizes,
    }
    return node_helpers.conditioning_set_values(conditioning, values)


def readers_of(conditioning: list) -> str:
    """Which models read the sizes of a prompt, in words: a model of another kind ignores them without a word."""
    readers = "SDXL and PixArt read these values, and any model behind Load Size Checkpoint."
    models = {m.text: m.name for family in FAMILIES for m in family.published if m.text and not m.sized}
    widths = {text.shape[-1] for text, _ in conditioning if isinstance(text, torch.Tensor)}
    small = [models[w] for w in sorted(widths & set(models))]
    if small:
        readers = f"This prompt is for {small[0]}, which has no size inputs: without Load Size Checkpoint these "
        readers += "values change nothing."
    return readers


def null_control(conditioning: list, prompt_type: str | None = None) -> list:
    """The same prompt without control."""
    role = {} if prompt_type is None else {"prompt_type": prompt_type}
    return [[text, _without_sizes(settings) | {NULL: True} | role] for text, settings in conditioning]


def same_control(conditioning: list, other: list, prompt_type: str) -> list:
    """A prompt with the control of another: of each of its parts, where these differ, in that part's place."""
    role = {"prompt_type": prompt_type}
    sizes = [{k: v for k, v in settings.items() if k in _KEYS} for _, settings in other]
    if all(values == sizes[0] for values in sizes):
        return [[text, _without_sizes(settings) | sizes[0] | role] for text, settings in conditioning]
    places = [{k: v for k, v in settings.items() if k in _PLACES} for _, settings in other]
    if any(settings.get(k) is not None for _, settings in conditioning for k in _PLACES):
        remedy = "give the prompt's parts one size, or take the area, mask or range off the negative prompt"
        shown = "for a part of the picture or the run, beside a prompt whose parts have other sizes"
        raise refuse("negative", shown, "one for all of it", remedy)
    pairs = list(zip(sizes, places, strict=True))
    return [[text, _without_sizes(settings) | v | p | role] for text, settings in conditioning for v, p in pairs]


def _without_sizes(settings: dict) -> dict:
    return {k: v for k, v in settings.items() if k not in _KEYS}


def high_is_null(settings: dict, size: tuple[int, int]) -> bool:
    """Whether only the original size differs from a picture of ``size`` (height, width) without control.

    Read as the model reads the keys: a target that is missing is the original.
    """
    original = (settings.get("height", size[0]), settings.get("width", size[1]))
    target = (settings.get("target_height", original[0]), settings.get("target_width", original[1]))
    sizes = SizeCondition(original, (settings.get("crop_h", 0), settings.get("crop_w", 0)), target)
    aspect = settings.get("aspect_ratio", original[0] / original[1])
    return sizes.high_is_null(size) and aspect == size[0] / size[1]


# --- text ---------------------------------------------------------------------------------------------------------
def token_count(clip: Any, text: str, positions: int = 0) -> int:
    """Tokens of a prompt with its start and end, as one of the CLIP's text encoders sees it.

    Args:
        positions: of the prompt's states, by which the encoder that made them is known; 0 takes the first.
    """
    tokens = clip.tokenize(text)
    encoders = {k.removeprefix("clip_"): v for k, v in vars(clip.tokenizer).items() if hasattr(v, "end_token")}
    known = {name: [t[0] for chunk in tokens[name] for t in chunk] for name in encoders if name in tokens}
    name = next((n for n, ids in known.items() if positions in (0, len(ids))), None)
    if not known:
        raise refuse("clip", sorted(tokens), "a text encoder of CLIP or T5 kind", "give the number of tokens yourself")
    if name is None:
        shown = f"{positions} positions, for encoders of {', '.join(f'{len(ids)}' for ids in known.values())}"
        raise refuse("text", shown, "the text of this prompt, by one encoder", "give the number of tokens yourself")
    ids = known[name]
    last = len(ids) - 1
    while last > 0 and ids[last - 1] == ids[-1]:
        last -= 1
    # Padded with the end token, the first of the run is the prompt's own; else the run is padding.
    return last + 1 if ids[-1] == encoders[name].end_token else last
