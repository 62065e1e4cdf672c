"""Resolution transfer on a MODEL: what a plan has to know of it, and a clone with the plan's schedule and positions."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import comfy.model_sampling
import folder_paths
import torch

from ...engine.errors import VitrineError, refuse
from ...engine.families import FAMILIES, class_names, trained_size
from ...engine.network.rotary_embedding import turns
from ...engine.resolution import ModelFacts, Plan, Positions, read_metadata, recover_grid
from ...engine.resolution.receptive import Spread, is_convolutional
from ...engine.resolution.rope import DYNAMIC, axis_angles
from .forwards import Forward, Run, around_forwards, around_sampling
from .model import PREFIX, backbone_of
from .own_patches import put_object
from .saved import known_files, stamp
from .schedule import movable_schedule, moved_sampling, own_shift

NONE = "(none)"
_KEY = "vitrine.resolution"
_FOLDERS = ("checkpoints", "diffusion_models")


def checkpoint_files() -> list[str]:
    """Files whose header can say how they were trained, after the entry that means none."""
    return [NONE, *sorted({name for f in _FOLDERS for name in known_files(f)})]


def metadata_in(name: str) -> dict[str, str] | None:
    """Header of a checkpoint file; None without one."""
    if name == NONE:
        return None
    path = next((p for f in _FOLDERS if (p := folder_paths.get_full_path(f, name))), None)
    if path is None:
        raise refuse("checkpoint", name, "a file in models/checkpoints or models/diffusion_models", "refresh the list")
    return read_metadata(path)


def metadata_stamp(name: str) -> str:
    """What tells whether one of :func:`checkpoint_files` has changed."""
    return "" if name == NONE else stamp(*(folder_paths.get_full_path(f, name) for f in _FOLDERS))


# --- facts --------------------------------------------------------------------------------------------------------
def facts_of(model: Any) -> ModelFacts:
    """What the plan has to know of a MODEL."""
    if model.get_attachment(_KEY):
        remedy = "take the MODEL from before the other Fit Model to Size (Resolution Transfer)"
        raise refuse("model", "one that is moved to another size already", "a model as it was loaded", remedy)
    sampling, network = model.get_model_object("model_sampling"), backbone_of(model)
    config = model.model.model_config
    positions = _position_facts(model, network)
    convolutional = is_convolutional(network)
    patch = 1 if convolutional else _patch(network)
    factor = model.get_model_object("latent_format").spacial_downscale_ratio
    return ModelFacts(
        type(config).__name__.lstrip("_"),
        movable_schedule(sampling),
        _own_size(model, network),
        factor,
        patch,
        own_shift(sampling),
        None,
        positions,
        convolutional,
        set_before="model_sampling" in model.object_patches,
    )


def _own_size(model: Any, network: Any) -> tuple[int, int] | None:
    """(width, height) in pixels that a MODEL was trained at, as far as its class says."""
    config = model.model.model_config
    side = vars(config).get("trained_side")  # core's configs warn of every name that they do not have
    if side is None and (family := trained_size(network)):
        return family
    published, kinds = (base for family in FAMILIES for base in family.published), class_names(config)
    sides = next((base.side for base in published if base.config in kinds), None)
    if side is None and sides is not None:
        predicts_v = isinstance(model.get_model_object("model_sampling"), comfy.model_sampling.V_PREDICTION)
        side = sides[1] if predicts_v else sides[0]
    return (side, side) if side else None


def _position_facts(model: Any, network: Any) -> Positions:
    if hasattr(network, "cropped_pos_embed"):
        table = getattr(network, "pos_embed", None)
        if table is None:
            return Positions("computed")
        size = network.pos_embed_max_size
        try:
            return Positions("stored", size=size, table=table, grid=recover_grid(table))
        except VitrineError:
            return Positions("learned", size=size, table=table)
    if _rotary(model)[0]:
        return Positions("rope")
    if hasattr(network, "pe_interpolation"):
        return Positions("computed")
    return Positions("none" if is_convolutional(network) else "unknown")


def _rotary(model: Any) -> tuple[str, Any]:
    """(attribute, module) that turns a network's positions into rotations; ("", None) without one.

    Read through the patcher: another clone that was sampled last still has its own on the network.
    """
    for name, sign in (("pe_embedder", "axes_dim"), ("rope_embedder", "axes_dim"), ("pos_embedder", "h_ntk_factor")):
        if hasattr(backbone_of(model), name):
            part = model.get_model_object(f"{PREFIX}{name}")
            if hasattr(part, sign):
                return name, part
    return "", None


def _patch(network: Any) -> int:
    """Latent cells on a token's side."""
    size = getattr(network, "patch_size", getattr(network, "patch_spatial", None))
    if size is None and hasattr(network, "x_embedder"):
        size = getattr(network.x_embedder, "patch_size", 2)
    if size is None:
        return 2
    return int(size if isinstance(size, int) else size[-1])


# --- applying -----------------------------------------------------------------------------------------------------
def transferred(model: Any, facts: ModelFacts, plan: Plan) -> Any:
    """A clone with the plan in it: its own model_sampling and positions. Network and weights are not touched."""
    clone = model.clone()
    if plan.schedule != "none":
        put_object(clone, "model_sampling", moved_sampling(model.get_model_object("model_sampling"), plan))
    if plan.schedule != "none" or plan.positions != "keep" or plan.step != (1, 1):
        clone.set_attachments(_KEY, True)
        clone = _at_its_size(clone, facts.factor, plan)
    if plan.step != (1, 1):
        clone = around_forwards(clone, f"{_KEY}.reach", lambda forward: Spread(forward.network, plan.step))
    if plan.positions != "keep":
        return _place(clone, facts, plan)
    return clone


def _at_its_size(clone: Any, factor: int, plan: Plan) -> Any:
    """The clone, which refuses latents of another size than the plan's, where its levels and positions are wrong."""
    width, height = plan.config.target_size
    wanted = (height // factor, width // factor)

    def check(latents: torch.Tensor) -> None:
        size = tuple(latents.shape[-2:])
        if latents.ndim > 3 and size != wanted:
            accepted = f"{width} x {height}, for which Fit Model to Size (Resolution Transfer) made this MODEL ready"
            remedy = "sample other sizes, such as the first pass of a hires fix, with the MODEL from before it"
            raise refuse("latent size", f"{size[1] * factor} x {size[0] * factor}", accepted, remedy)

    @contextmanager
    def sampling(run: Run) -> Iterator[None]:
        check(run.noise)
        yield

    @contextmanager
    def forward(forward: Forward) -> Iterator[None]:
        if forward.running is None or not forward.running.steps:  # of a run the whole latent is looked at, not an area
            check(forward.x)
        yield

    return around_forwards(around_sampling(clone, f"{_KEY}.size", sampling), f"{_KEY}.size", forward)


def _place(clone: Any, facts: ModelFacts, plan: Plan) -> Any:
    network, trained = backbone_of(clone), facts.positions
    if trained.kind == "stored":
        table = plan.table(trained, trained.table.shape[-1]).to(trained.table.dtype)  # type: ignore[union-attr]
        put_object(clone, f"{PREFIX}cropped_pos_embed", _Table(table, plan, _patch(network)))
    elif trained.kind == "computed":
        put_object(clone, f"{PREFIX}pe_interpolation", _divisor(clone, plan))
        put_object(clone, f"{PREFIX}pe_precision", None)  # else core works the divisor out by itself
    elif trained.kind == "rope":
        return _turned(clone, plan)
    return clone


def _turned(clone: Any, plan: Plan) -> Any:
    """The clone with rotary positions of the plan, which follow the noise level where the mode does."""
    if _scaled_elsewhere(clone.model_options):
        raise _twice()
    clock, (name, part) = _Clock(), _rotary(clone)
    kind = _Rotary if hasattr(part, "axes_dim") else _Video
    put_object(clone, f"{PREFIX}{name}", kind(part, plan, clock))
    clone = around_sampling(clone, f"{_KEY}.positions", _alone)
    return around_forwards(clone, f"{_KEY}.clock", clock.at) if plan.positions.endswith(DYNAMIC) else clone


def _scaled_elsewhere(options: dict[str, Any]) -> bool:
    return bool(options.get("transformer_options", {}).get("rope_options"))


def _twice() -> VitrineError:
    accepted = "one node that moves positions"
    return refuse("positions", "ScaleROPE on the same model", accepted, "remove ScaleROPE, or set pos_embed to keep")


@contextmanager
def _alone(run: Run) -> Iterator[None]:
    """ScaleROPE behind this node would scale positions that are scaled already."""
    if _scaled_elsewhere(run.guider.model_options):
        raise _twice()
    yield


class _Clock:
    """The noise level of the running forward, for positions that follow it."""

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def tau(self) -> float:
        """1, full noise, .. 0."""
        return getattr(self._local, "tau", 1.0)

    @contextmanager
    def at(self, forward: Forward) -> Iterator[None]:
        """Around a forward, whose rows are at one level."""
        levels = forward.sigma.detach().cpu()
        if not bool((levels == levels[0]).all()):
            raise refuse("sigmas", levels.tolist(), "one for the whole batch", "take a mode without _dynamic")
        self._local.tau = float(levels[0])
        yield


def _divisor(model: Any, plan: Plan) -> float:
    """PixArt's ``pe_interpolation`` at the target: position i of n tokens is i base(n) / n / divisor.

    ``base`` follows the latent's size, and a checkpoint that brings a position table has its own divisor: left
    alone, such a model runs on past its trained positions. Read through the patcher: another clone that was sampled
    last still has its own on the network.
    """
    network = backbone_of(model)
    base, patch = [_base(network, grid) for grid in (plan.train, plan.target)], _patch(network)
    divisor, digits = (model.get_model_object(f"{PREFIX}pe_{name}") for name in ("interpolation", "precision"))
    if divisor is None or digits is not None:
        divisor = 1.0 if hasattr(network, "base_size") else round(sum(plan.train) * patch // 2 / 64, digits or 0)
    spread = base[1] * divisor / base[0]
    return spread if plan.positions == "grid" else spread * plan.train[0] / plan.target[0]


def _base(network: Any, grid: tuple[int, int]) -> int:
    """Tokens that core's PixArt takes as a side of this grid; the portraits transformers have one number."""
    patch = _patch(network)
    return getattr(network, "base_size", None) or round(sum(grid) * patch // 2 / 64) * 64 // patch


class _Table:
    """Replaces MMDiT.cropped_pos_embed; a plain object, so that no weight is registered."""

    def __init__(self, table: torch.Tensor, plan: Plan, patch: int) -> None:
        self.table, self.plan, self.patch = table, plan, patch

    def __call__(self, hw: tuple[int, int], device: Any = None) -> torch.Tensor:
        tokens = tuple((side + 1) // self.patch for side in hw)
        if tokens != self.plan.target:
            width, height = self.plan.config.target_size
            raise refuse("latent size", f"{tokens} tokens", f"{self.plan.target}", f"sample at {width} x {height}")
        return self.table.to(device)


class _Turning(torch.nn.Module):
    """Base of what replaces a rotary embedding with other frequencies on rows and columns."""

    def __init__(self, trained: Any, plan: Plan, clock: _Clock | None = None) -> None:
        super().__init__()
        self.plan, self.clock = plan, clock or _Clock()

    def rotations(self, ids: torch.Tensor, dims: Sequence[int], theta: float | Sequence[float]) -> torch.Tensor:
        """(..., sum of dims / 2, 2, 2) of positions (..., axes)."""
        plan = self.plan
        angles, factor = axis_angles(ids.float(), dims, theta, plan.positions, plan.scales, plan.train, self.clock.tau)
        return turns(torch.cat(angles, -1), factor)


class _Rotary(_Turning):
    """Replaces EmbedND: Flux, Chroma, Qwen-Image, Krea 2, Z-Image, Lumina 2, Wan, HiDream."""

    def __init__(self, trained: Any, plan: Plan, clock: _Clock | None = None) -> None:
        super().__init__(trained, plan, clock)
        self.theta, self.axes_dim = trained.theta, trained.axes_dim
        # HiDream has its own EmbedND, which does not say its width and leaves the heads' axis behind the tokens'.
        self.heads = 1 if hasattr(trained, "dim") else 2
        self.dim = getattr(trained, "dim", sum(trained.axes_dim))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rotations(ids, self.axes_dim, self.theta).unsqueeze(self.heads)


class _Video(_Turning):
    """Replaces VideoRopePosition3DEmb: Anima and its Cosmos kin, which widen their bases themselves."""

    def __init__(self, trained: Any, plan: Plan, clock: _Clock | None = None) -> None:
        super().__init__(trained, plan, clock)
        wide, deep = 2 * len(trained.dim_spatial_range), 2 * len(trained.dim_temporal_range)
        self.axes_dim = (deep, wide, wide)
        self.thetas = [10000.0 * f for f in (trained.t_ntk_factor, trained.h_ntk_factor, trained.w_ntk_factor)]
        self.rate = trained.base_fps if trained.enable_fps_modulation else None

    def forward(self, x: torch.Tensor, fps: Any = None, device: Any = None, dtype: Any = None) -> torch.Tensor:
        axes = [torch.arange(n, device=device or x.device, dtype=torch.float32) for n in x.shape[1:4]]
        if fps is not None and self.rate is not None:
            axes[0] = axes[0] / (float(fps.flatten()[0]) if isinstance(fps, torch.Tensor) else fps) * self.rate
        ids = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, 2)
        return self.rotations(ids, self.axes_dim, self.thetas)
