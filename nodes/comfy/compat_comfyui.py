"""Names inside ComfyUI that are no public API. Each is looked up here, when it is used: another pack may replace it.

A name that this ComfyUI does not have is logged when the pack is loaded. The node that needs it refuses to run, or is
left out if it cannot even be made; all others work.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ...engine.errors import VitrineError, refuse

PRIVATE = {
    "comfy.hooks": ("EnumHookMode",),
    "comfy.k_diffusion.sampling": ("default_noise_sampler",),
    "comfy.ldm.pixart.pixartms": ("PixArtMS", "get_2d_sincos_pos_embed_torch"),
    "comfy.lora": ("calculate_weight", "load_lora", "model_lora_keys_clip", "model_lora_keys_unet"),
    "comfy.lora_convert": ("convert_lora",),
    "comfy.model_management": ("cast_to_device", "in_training"),
    "comfy.model_patcher": ("CoreModelPatcher", "create_model_options_clone"),
    "comfy.sampler_helpers": (
        "cleanup_models", "cond_has_hooks", "get_additional_models", "get_additional_models_from_model_options",
        "prepare_model_patcher",
    ),
    "comfy.samplers": (
        "calc_cond_batch", "calculate_start_end_timesteps", "cast_to_load_options", "cfg_function",
        "encode_model_conds", "filter_registered_hooks_on_conds", "get_area_and_mult", "pre_run_control",
        "preprocess_conds_hooks", "resolve_areas_and_cond_masks_multidim",
    ),
    "comfy.utils": ("flux_to_diffusers", "pixart_to_diffusers", "unet_to_diffusers"),
    "comfy_extras.nodes_model_advanced": ("ModelSamplingDiscrete",),
}  # fmt: skip
"""Module -> names in it that are looked up as attributes of this one."""
NEWER = {"comfy.model_prefetch": ("pause_malloc_graph", "cleanup_malloc_graph")}
"""Names that older versions do not have, and that only matter where they are."""
USED = {
    "comfy.conds": ("CONDConstant", "CONDCrossAttn", "CONDList", "CONDRegular"),
    "comfy.latent_formats": ("LatentFormat",),
    "comfy.ldm.modules.diffusionmodules.model": ("ops",),
    "comfy.model_base": ("BaseModel", "ModelType", "PixArt"),
    "comfy.model_management": (
        "get_torch_device", "intermediate_device", "intermediate_dtype", "load_models_gpu",
        "throw_exception_if_processing_interrupted", "unet_offload_device",
    ),
    "comfy.model_patcher": ("ModelPatcher",),
    "comfy.model_sampling": (
        "CONST", "ModelSamplingDiscrete", "ModelSamplingDiscreteEDM", "ModelSamplingDiscreteFlow", "ModelSamplingFlux",
        "StableCascadeSampling", "V_PREDICTION",
    ),
    "comfy.patcher_extension": ("CallbacksMP", "WrappersMP"),
    "comfy.sample": ("fix_empty_latent_channels", "prepare_noise", "sample"),
    "comfy.samplers": ("CFGGuider", "KSAMPLER", "KSampler", "SAMPLER_NAMES", "SCHEDULER_NAMES", "sampler_object"),
    "comfy.sd": ("CLIP", "VAE", "load_lora_for_models"),
    "comfy.sd1_clip": ("SD1ClipModel", "SD1Tokenizer", "SDClipModel", "SDTokenizer"),
    "comfy.supported_models": ("Flux", "PixArtAlpha", "SD15"),
    "comfy.supported_models_base": ("ClipTarget",),
    "comfy.utils": ("PROGRESS_BAR_ENABLED", "ProgressBar", "common_upscale", "load_torch_file"),
    "comfy_api": ("feature_flags",),
    "comfy_execution.graph_utils": ("ExecutionBlocker",),
    "comfy_execution.progress": ("get_progress_state",),
    "comfy_execution.utils": ("get_executing_context",),
    "folder_paths": (
        "add_model_folder_path", "folder_names_and_paths", "get_filename_list", "get_folder_paths", "get_full_path",
        "get_full_path_or_raise", "get_output_directory", "models_dir",
    ),
    "nodes": ("NODE_CLASS_MAPPINGS",),
    "server": ("PromptServer",),
}  # fmt: skip
"""Module -> names in it that core's own nodes and other packs use too, and that the pack takes from there."""
_HOMES = {name: module for module, names in PRIVATE.items() for name in names}


class Gone(VitrineError, AttributeError):
    """A name that this ComfyUI does not have."""


def _gone(name: str) -> Gone:
    remedy = "update the pack, or go back to the ComfyUI that its page of versions names"
    return Gone(str(refuse("ComfyUI", f"one without {name}", "a version that has it", remedy)))


def __getattr__(name: str) -> Any:
    """One of :data:`PRIVATE` (PEP 562).

    Raises:
        Gone: This ComfyUI does not have it.
    """
    if name not in _HOMES:
        raise AttributeError(name)
    named = _look_up(_HOMES[name], name)
    if named is None:
        raise _gone(f"{_HOMES[name]}.{name}")
    return named[0]


def _look_up(module: str, name: str) -> tuple[Any] | None:
    try:
        return (getattr(importlib.import_module(module), name),)
    except (ImportError, AttributeError):
        return None


def newer(name: str) -> Any:
    """One of :data:`NEWER`, or None."""
    module = next(m for m, names in NEWER.items() if name in names)
    named = _look_up(module, name)
    return None if named is None else named[0]


def missing() -> list[str]:
    """Dotted names that the pack uses and this ComfyUI does not have."""
    tables = (*PRIVATE.items(), *USED.items())
    loaded = [(m, names) for m, names in tables if not m.startswith("comfy_extras")]  # core loads those after the pack
    pairs = [(module, name) for module, names in loaded for name in names]
    return [f"{module}.{name}" for module, name in pairs if _look_up(module, name) is None]


# --- what depends on such names -----------------------------------------------------------------------------------
def unrecorded() -> AbstractContextManager:
    """While open, what is allocated is not part of what core's model compiler records."""
    pause = newer("pause_malloc_graph")
    return nullcontext() if pause is None else pause()


def drop_recording() -> None:
    """After a forward that was cut short: core would take up its half-recorded allocations in the next one."""
    drop = newer("cleanup_malloc_graph")
    if drop is not None:
        drop()


@contextmanager
def training() -> Iterator[None]:
    """Core's kernels that have a derivative, instead of those that have none."""
    import comfy.model_management

    before = __getattr__("in_training")
    comfy.model_management.in_training = True
    try:
        yield
    finally:
        comfy.model_management.in_training = before


def change_class(thing: Any, kind: type) -> None:
    """Make an object of core's one of a subclass; its ``__init__`` would begin from the defaults."""
    thing.__class__ = kind


# --- nodes where names are gone -----------------------------------------------------------------------------------
def nodes_of(modules: list[str], package: str) -> Iterator[type]:
    """The ``NODES`` of each module. One that core's changes keep from loading is left out, with a line in the log.

    Where names are gone, a node that meets one says so.
    """
    log, absent = logging.getLogger("vitrine"), missing()
    if absent:
        log.warning("this ComfyUI no longer has %s; nodes that need it will say so", ", ".join(absent))
    for module in modules:
        try:
            nodes = importlib.import_module(f"{package}.{module}").NODES
        except (ImportError, AttributeError) as error:
            if not absent:
                raise
            log.warning("the nodes of %s are left out: %s", module, error)
            continue
        for node in nodes:
            if absent:
                _explain(node)
            yield node


def _explain(node: Any) -> None:
    """Let a node's ``execute`` say plainly which name of core's it misses."""
    execute: Callable[..., Any] = node.execute.__func__

    def translated(error: AttributeError) -> Exception:
        where = getattr(error.obj, "__name__", "")
        return _gone(f"{where}.{error.name}") if where.startswith(("comfy", "folder_paths", "server")) else error

    @functools.wraps(execute)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return execute(*args, **kwargs)
        except Gone:
            raise
        except AttributeError as error:
            raise translated(error) from error

    @functools.wraps(execute)
    async def run_later(*args: Any, **kwargs: Any) -> Any:
        try:
            return await execute(*args, **kwargs)
        except Gone:
            raise
        except AttributeError as error:
            raise translated(error) from error

    node.execute = classmethod(run_later if inspect.iscoroutinefunction(execute) else run)
