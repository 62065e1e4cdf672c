"""What resolution transfer needs of ComfyUI's insides: model_sampling and positions of a clone, facts for a plan."""

from __future__ import annotations

import copy
import math
from typing import Any

import comfy.model_sampling
import comfy.patcher_extension
import comfy.supported_models
import folder_paths
import torch

from ...engine.errors import VitrineError, refuse
from ...engine.resolution import ModelFacts, Plan, Positions, read_metadata, recover_grid, shift_grid
from ...engine.resolution.rope import axis_angles
from ...engine.schedule import NoiseSchedule
from . import model as bridge

NONE = "(none)"
_KEY = "vitrine.resolution"
_FOLDERS = ("checkpoints", "diffusion_models")
_SIDES = {
    "_Portraits": 64, "SD15": 512, "SD20": 768, "SD21UnclipL": 768, "SD21UnclipH": 768, "SDXL": 1024, "SSD1B": 1024,
    "Segmind_Vega": 1024, "KOALA_700M": 1024, "KOALA_1B": 1024, "SD3": 1024, "AuraFlow": 1024, "PixArtAlpha": 1024,
    "PixArtSigma": 1024, "Flux": 1024, "FluxSchnell": 1024, "Chroma": 1024, "Lumina2": 1024, "HunyuanDiT": 1024,
}  # fmt: skip
"""Training side in pixels of ComfyUI's model classes; a checkpoint that was trained otherwise needs it said."""


def checkpoint_files() -> list[str]:
    """Files whose header can say how they were trained, after the entry that means none."""
    return [NONE, *sorted({name for f in _FOLDERS for name in folder_paths.get_filename_list(f)})]


def metadata_in(name: str) -> dict[str, str] | None:
    """Header of a checkpoint file; None without one.

    Raises:
        VitrineError: not there, or not safetensors.
    """
    if name == NONE:
        return None
    found = next((p for f in _FOLDERS if (p := folder_paths.get_full_path(f, name))), None)
    if found is None:
        raise refuse("checkpoint", name, "a file in models/checkpoints or models/diffusion_models", "refresh the list")
    return read_metadata(found)


# --- facts --------------------------------------------------------------------------------------------------------
def facts_of(model: Any) -> ModelFacts:
    """What the plan has to know of a MODEL.

    Raises:
        VitrineError: a sampling class whose schedule cannot be moved.
    """
    sampling, net = model.get_model_object("model_sampling"), bridge.backbone_of(model)
    config = model.model.model_config
    kinds = [k.__name__ for k in type(config).__mro__]
    side = getattr(config, "trained_side", None) or next((_SIDES[k] for k in kinds if k in _SIDES), None)
    own = _position_facts(net)
    patch = _patch(net) if own.kind != "none" else 1
    factor = model.get_model_object("latent_format").spacial_downscale_ratio
    convolutional = hasattr(net, "input_blocks")
    return ModelFacts(
        type(config).__name__.lstrip("_"), _schedule_facts(sampling), (side, side) if side else None, factor, patch,
        own_shift(sampling), None, own, convolutional,
    )  # fmt: skip


def _schedule_facts(sampling: Any) -> NoiseSchedule:
    flows = (comfy.model_sampling.ModelSamplingDiscreteFlow, comfy.model_sampling.ModelSamplingFlux)
    if isinstance(sampling, flows):
        return NoiseSchedule.flow()
    blind = (comfy.model_sampling.ModelSamplingDiscreteEDM, comfy.model_sampling.StableCascadeSampling)
    if not isinstance(sampling, comfy.model_sampling.ModelSamplingDiscrete) or isinstance(sampling, blind):
        accepted = "ModelSamplingDiscrete, ModelSamplingDiscreteFlow, ModelSamplingFlux"
        remedy = "this model is told its noise level without a table; use its own ModelSampling node"
        raise refuse("model sampling", [c.__name__ for c in type(sampling).__mro__[:2]], accepted, remedy)
    table = sampling.log_sigmas.double().cpu()
    return NoiseSchedule("vp", table, len(table))


def own_shift(sampling: Any) -> float:
    """A flow model's shift; ModelSamplingFlux keeps its logarithm."""
    if isinstance(sampling, comfy.model_sampling.ModelSamplingFlux):
        return math.exp(sampling.shift)
    return float(getattr(sampling, "shift", 1.0))


def _position_facts(net: Any) -> Positions:
    if hasattr(net, "cropped_pos_embed"):
        table = getattr(net, "pos_embed", None)
        if table is None:
            return Positions("computed")
        size = net.pos_embed_max_size
        try:
            return Positions("stored", size=size, table=table, grid=recover_grid(table))
        except VitrineError:
            return Positions("learned", size=size, table=table)
    if hasattr(net, "pe_embedder") and hasattr(net.pe_embedder, "axes_dim"):
        return Positions("rope")
    if hasattr(net, "rope_embedder"):
        return Positions("rope_scale")
    return Positions("computed") if "PixArt" in type(net).__name__ else Positions()


def _patch(net: Any) -> int:
    found = getattr(net, "patch_size", None)
    if found is None and hasattr(net, "x_embedder"):
        found = getattr(net.x_embedder, "patch_size", 2)
    if found is None:
        return 2
    return int(found if isinstance(found, int) else found[-1])


# --- applying -----------------------------------------------------------------------------------------------------
def transferred(model: Any, facts: ModelFacts, plan: Plan) -> Any:
    """A clone with the plan in it: its own model_sampling and positions. Network and weights are not touched."""
    clone = model.clone()
    if plan.schedule != "none":
        own = model.get_model_object("model_sampling")
        clone.add_object_patch("model_sampling", sampling_for(own, plan))
        if plan.schedule == "resample" and plan.config.top == "clamp_dedupe":
            kind = comfy.patcher_extension.WrappersMP.OUTER_SAMPLE
            clone.add_wrapper_with_key(kind, _KEY, _without_repeats)
    if plan.positions != "keep":
        _place(clone, facts, plan)
    return clone


def sampling_for(own: Any, plan: Plan) -> Any:
    """A new model_sampling of the model's own prediction class."""
    new = copy.deepcopy(own)
    if isinstance(own, comfy.model_sampling.ModelSamplingFlux):
        new.set_parameters(shift=own.shift + math.log(plan.ratio), timesteps=len(own.sigmas))
    elif isinstance(own, comfy.model_sampling.ModelSamplingDiscreteFlow):
        more = {"audio_shift": own.audio_shift} if hasattr(own, "audio_shift") else {}
        shift = own.shift * plan.ratio
        new.set_parameters(shift=shift, timesteps=len(own.sigmas), multiplier=own.multiplier, **more)
    elif plan.schedule == "relabel":
        new.set_sigmas(own.sigmas.double() * plan.ratio)
    else:
        new.__class__ = _truthful(type(own))
        new.told = copy.deepcopy(own)
        new.set_sigmas(shift_grid(own.sigmas.double(), plan.ratio, float(own.sigmas[-1]), plan.config.top))
    return new


def _truthful(base: type) -> type:
    """A sampling class whose table is the shifted one, while the network is told the nearest entry of its own table."""

    class Resampled(base):  # type: ignore[misc, valid-type]
        """Its two directions are not each other's inverse, on purpose."""

        def timestep(self, sigma: torch.Tensor) -> torch.Tensor:
            return self.told.timestep(sigma)

    return Resampled


def _without_repeats(executor: Any, noise: Any, latent: Any, sampler: Any, sigmas: Any, *args: Any, **kw: Any) -> Any:
    """Steps that were clamped to the same highest level become one."""
    return executor(noise, latent, sampler, torch.unique_consecutive(sigmas), *args, **kw)


def _place(clone: Any, facts: ModelFacts, plan: Plan) -> None:
    net, own = bridge.backbone_of(clone), facts.positions
    if own.kind in ("stored", "learned"):
        table = plan.table(own, own.table.shape[-1]).to(own.table.dtype)  # type: ignore[union-attr]
        clone.add_object_patch("diffusion_model.cropped_pos_embed", _Table(table, plan, _patch(net)))
    elif plan.positions == "rope_pi":
        down, across = (1 / s for s in plan.scales)
        clone.set_model_rope_options(across, 0.0, down, 0.0, 1.0, 0.0)
    elif own.kind == "computed":
        clone.add_object_patch("diffusion_model.pe_interpolation", _divisor(clone, plan))
        clone.add_object_patch("diffusion_model.pe_precision", None)  # else core works the divisor out by itself
    elif own.kind == "rope":
        clone.add_object_patch("diffusion_model.pe_embedder", _Rotary(net.pe_embedder, plan))


def _divisor(model: Any, plan: Plan) -> float:
    """PixArt's ``pe_interpolation`` at the target: position i of n tokens is i base(n) / n / divisor.

    ``base`` follows the latent's size, and a checkpoint that brings a position table has a divisor of its own: left
    alone, such a model runs on past its trained positions. Read through the patcher: another clone that was sampled
    last still has its own on the network.
    """
    net = bridge.backbone_of(model)
    base, patch = [_base(net, grid) for grid in (plan.train, plan.target)], _patch(net)
    own, places = (model.get_model_object(f"diffusion_model.pe_{name}") for name in ("interpolation", "precision"))
    if own is None or places is not None:
        own = 1.0 if hasattr(net, "base_size") else round(sum(plan.train) * patch // 2 / 64, places or 0)
    spread = base[1] * own / base[0]
    return spread if plan.positions == "grid" else spread * plan.train[0] / plan.target[0]


def _base(net: Any, grid: tuple[int, int]) -> int:
    """Tokens that core's PixArt takes as a side of this grid; the portraits transformers have one number."""
    patch = _patch(net)
    return getattr(net, "base_size", None) or round(sum(grid) * patch // 2 / 64) * 64 // patch


class _Table:
    """Stands in for MMDiT.cropped_pos_embed; a plain object, so that no weight is registered."""

    def __init__(self, table: torch.Tensor, plan: Plan, patch: int) -> None:
        self.table, self.plan, self.patch = table, plan, patch

    def __call__(self, hw: tuple[int, int], device: Any = None) -> torch.Tensor:
        found = tuple((side + 1) // self.patch for side in hw)
        if found != self.plan.target:
            width, height = self.plan.config.target_size
            raise refuse("latent size", f"{found} tokens", f"{self.plan.target}", f"sample at {width} x {height}")
        return self.table.to(device)


class _Rotary(torch.nn.Module):
    """Stands in for EmbedND with other frequencies on rows and columns."""

    def __init__(self, own: Any, plan: Plan) -> None:
        super().__init__()
        self.theta, self.axes_dim, self.dim, self.plan = own.theta, own.axes_dim, own.dim, plan

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        angles, factor = axis_angles(
            ids.float(), self.axes_dim, self.theta, self.plan.positions, self.plan.scales, self.plan.train
        )  # fmt: skip
        wide = torch.cat(angles, -1)
        turned = torch.stack([wide.cos(), -wide.sin(), wide.sin(), wide.cos()], -1) * factor
        return turned.reshape(*wide.shape, 2, 2).float().unsqueeze(1)
