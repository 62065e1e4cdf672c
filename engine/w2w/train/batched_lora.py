"""Many LoRAs at once on one frozen network: block m of the batch goes through the adapter of model m.

The weights are one leaf (M, D) in the manifest's order, so AdamW on it is M separate AdamWs, and one backward pass
gives every model its gradient. Each layer adds two batched products; the frozen products have an M times larger batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from ...diffusion.forward_clock import Timesteps
from ...errors import refuse
from ...families import spelled_layers
from ...io.lora_layer import LoraLayer
from ...io.number_checks import refuse_unless_finite
from ...runtime.compiled import eager_runs, uncompiled
from ...runtime.forward_hooks import Reached, block_of, hook_after, hook_before
from ...settings.w2w_options import PAPER_TARGETS
from ..loras.base_weights import modules_of
from ..space.manifest import Layer, Manifest

"""The paper's layers: query and value of every attention, self and cross."""

Hook = Callable[[nn.Module, tuple, torch.Tensor], torch.Tensor]
Clock = Callable[[tuple, dict[str, Any]], float | None]
"""(args, kwargs) of a forward -> its timestep in 0..1000."""


class LoraTarget(NamedTuple):
    """The module of a LoRA's layer, and the layer's slice of its outputs if several are fused."""

    module: nn.Module
    rows: slice = slice(None)


def lora_targets(backbone: nn.Module, manifest: Manifest) -> dict[str, LoraTarget]:
    """Layer path -> module and outputs; also for ComfyUI's transformers, which rename and fuse some layers."""
    targets = {path: LoraTarget(module) for path, module in modules_of(backbone).items()}

    def lacking() -> list[str]:
        return [layer.path for layer in manifest if not _takes_lora(_unwrapped(targets.get(layer.path)))]

    if lacking():
        layers = dict(backbone.named_modules())
        by_family = {
            name: LoraTarget(layers[path], slice(None) if rows is None else slice(rows[0], sum(rows)))
            for name, path, rows in spelled_layers(backbone)
        }
        targets = by_family | targets
    if missing := lacking():
        remedy = "use the base model of the LoRAs"
        raise refuse("LoRA layers", missing[:3], "linear or convolution layers of this model", remedy)
    return {layer.path: targets[layer.path] for layer in manifest}


def target_layers(backbone: nn.Module, targets: tuple[str, ...] = PAPER_TARGETS) -> dict[str, nn.Linear]:
    """Module path -> linear layer, for each module whose path ends with one of ``targets``."""
    modules = {path: _unwrapped(module) for path, module in modules_of(backbone).items()}
    layers = {
        path: module
        for path, module in modules.items()
        if isinstance(module, nn.Linear) and any(path == t or path.endswith("." + t) for t in targets)
    }
    if not layers:
        ends = sorted({p.rsplit(".", 1)[-1] for p, m in modules_of(backbone).items() if isinstance(m, nn.Linear)})
        raise refuse("LoRA targets", targets, ends, "name linear layers of this model")
    return layers


def initial_lora(
    backbone: nn.Module, targets: tuple[str, ...] = PAPER_TARGETS, rank: int = 1, alpha: float = 27.0, seed: int = 0
) -> dict[str, LoraLayer]:
    """PEFT's initialisation: A ~ U(-1 / sqrt(in), 1 / sqrt(in)), B = 0, layers in sorted order from one seed.

    All models of a space must share it: only a common initialisation makes their factors comparable (see ``gauge.py``).
    """
    refuse_unless_finite("alpha", alpha)
    random, lora = torch.Generator().manual_seed(seed), {}
    for path, layer in sorted(target_layers(backbone, targets).items()):
        bound = 1 / math.sqrt(layer.in_features)
        down = (torch.rand(rank, layer.in_features, generator=random) * 2 - 1) * bound
        lora[path] = LoraLayer(down, torch.zeros(layer.out_features, rank), alpha)
    return lora


class BatchedLora(AbstractContextManager):
    """Applies the adapters of M models to a diffusers or ComfyUI backbone while the block is open.

    Args:
        weights: (M, D) in ``manifest`` order, with or without gradients; may be replaced while the block is open.
        tiled: batch row i belongs to model i % M, as under guidance; else the batch is M equal blocks.
    """

    def __init__(self, backbone: nn.Module, manifest: Manifest, weights: torch.Tensor, tiled: bool = False) -> None:
        if weights.ndim != 2 or weights.shape[1] != manifest.size:
            raise refuse("weights", tuple(weights.shape), f"(M, {manifest.size})", "one flat vector for each model")
        self._backbone = backbone
        self._targets = lora_targets(uncompiled(backbone), manifest)
        self.manifest, self.weights, self.tiled = manifest, weights, tiled
        self._handles, self._reached = list[Any](), Reached("LoRA")
        self._columns: tuple[torch.Tensor, bool, dict[int, torch.Tensor]] | None = None
        self._rows = 0

    def __enter__(self) -> BatchedLora:
        if self._handles:
            raise refuse("block", "open already", "one at a time", "leave it first, or make a second one")
        backbone, self._reached = uncompiled(self._backbone), Reached("LoRA")
        self._handles += eager_runs(self._backbone)
        self._handles.append(hook_before(backbone, self._count, with_kwargs=True))
        for layer in self.manifest:
            target = self._targets[layer.path]
            # Before all other hooks, so that edits and captures see it as part of the layer.
            hook = self._hook(layer) if target.rows == slice(None) else self._fused_hook(layer, target.rows)
            # by blocks, since HiDream's experts without tokens are not run
            self._handles.append(
                hook_after(target.module, self._reached.noting(block_of(layer.path), hook), prepend=True)
            )
        self._reached.watch(backbone)
        return self

    def __exit__(self, *error: object) -> None:
        self._reached.close()
        while self._handles:
            self._handles.pop().remove()
        if error[0] is None:
            self._reached.check()

    def _count(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        first = args[0] if args else next((kwargs[k] for k in ("hidden_states", "sample", "x") if k in kwargs), ())
        self._rows = len(first)

    def _hook(self, layer: Layer) -> Hook:
        def add(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
            x, models, whole = args[0], len(self.weights), output
            if not len(x):  # HiDream's experts: no token chose this one
                return output
            if self.tiled and models > 1 and self._rows not in (0, len(x)):
                x, output = (self._of_pictures(layer, v) for v in (x, output))
            if len(x) % models:
                raise refuse("batch", len(x), f"a multiple of {models} models", "give each model as many pictures")
            columns = self._split()
            down = columns[layer.offset].view(models, *layer.down).to(x.dtype)
            up = columns[layer.middle].view(models, *layer.up).to(x.dtype)
            plain = _unwrapped(module)
            if isinstance(plain, nn.Conv2d):
                change = _convolved(plain, self._by_model(x), down, up)
                return output + layer.scale * self._as_batch(change, output).to(output.dtype)
            # Hu et al. 2021, Eq. 3, for M models: W x + (alpha / r) B_m (A_m x)
            rows, base = (self._by_model(v).reshape(models, -1, v.shape[-1]) for v in (x, output))
            inner = torch.bmm(rows, down.mT).to(output.dtype)
            adapted = torch.baddbmm(base, inner, up.mT.to(output.dtype), alpha=layer.scale)
            return self._as_batch(adapted, output).reshape(whole.shape)

        return add

    def _fused_hook(self, layer: Layer, rows: slice) -> Hook:
        own = self._hook(layer)

        def add(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
            changed = own(module, args, output[..., rows])
            return torch.cat([output[..., : rows.start], changed, output[..., rows.stop :]], -1)

        return add

    def _of_pictures(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        """(B n, T, C), n rows per image (Krea 2's text) -> (B, n T, C)."""
        if x.ndim < 3 or len(x) % self._rows:  # Z-Image's embedders: tokens of prompts that may differ in length
            remedy = f"{layer.path} sees the tokens of all pictures in one row: generate one picture per call"
            raise refuse("models", len(self.weights), "one for all pictures of this model", remedy)
        return x.reshape(self._rows, -1, x.shape[-1])

    def _split(self) -> dict[int, torch.Tensor]:
        """Offset -> columns, split once, since each of 2 L slices would allocate a full (M, D) gradient."""
        weights, graph = self.weights, torch.is_grad_enabled()
        if self._columns is None or self._columns[0] is not weights or self._columns[1] != graph:
            starts = [at for layer in self.manifest for at in (layer.offset, layer.middle)]
            sizes = [b - a for a, b in zip(starts, [*starts[1:], self.manifest.size], strict=True)]
            self._columns = (weights, graph, dict(zip(starts, weights.split(sizes, 1), strict=True)))
        return self._columns[2]

    def _by_model(self, x: torch.Tensor) -> torch.Tensor:
        """(b M, ...) -> (M, b, ...)."""
        models = len(self.weights)
        return x.unflatten(0, (-1, models)).transpose(0, 1) if self.tiled else x.unflatten(0, (models, -1))

    def _as_batch(self, by_model: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`_by_model`, in the shape of ``like``."""
        if not self.tiled:
            return by_model.reshape(like.shape)
        models = len(self.weights)
        return by_model.reshape(models, -1, *like.shape[1:]).transpose(0, 1).reshape(like.shape)


def _takes_lora(module: Any) -> bool:
    """Whether it is a linear layer, also a quantised one that is not an ``nn.Linear``, or a convolution."""
    linear = all(isinstance(getattr(module, name, None), int) for name in ("in_features", "out_features"))
    return isinstance(module, (nn.Linear, nn.Conv2d)) or (isinstance(module, nn.Module) and linear)


def _unwrapped(module: nn.Module | LoraTarget | None) -> Any:
    """The layer inside PEFT's wrapper, if diffusers has loaded a LoRA; both are then added."""
    module = module.module if isinstance(module, LoraTarget) else module
    return getattr(module, "base_layer", module)


def _convolved(module: nn.Conv2d, rows: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """(M, b, C, H, W) through (M, r, C, k, k) and (M, out, r, 1, 1): (M, b, out, h, w), as one grouped convolution."""
    models = down.shape[0]
    stacked, kernels = rows.transpose(0, 1).flatten(1, 2), down.flatten(0, 1)
    inner = nn.functional.conv2d(stacked, kernels, None, module.stride, module.padding, module.dilation, models)
    return nn.functional.conv2d(inner, up.flatten(0, 1), groups=models).unflatten(1, (models, -1)).transpose(0, 1)


@contextmanager
def late_lora(
    backbone: nn.Module,
    manifest: Manifest,
    weights: torch.Tensor,
    late: torch.Tensor | None = None,
    start: float = 1000.0,
    now: Clock | None = None,
) -> Iterator[None]:
    """Applies a different LoRA to each image of a batch, and another one below timestep ``start``.

    Args:
        weights, late: (B, D) flat weights of B pictures, shared by the two halves of guidance; without ``late``,
            ``weights`` are used throughout.
        now: reads a forward's timestep; by default the network's timestep argument, as for UNets.
    """
    with BatchedLora(backbone, manifest, weights, tiled=True) as lora:
        if late is None:
            yield
            return
        clock: Clock = now or Timesteps().first

        def choose(module: nn.Module, args: tuple, kwargs: dict) -> None:
            t = clock(args, kwargs)
            # weights2weights, appendix I: the edited model takes over at timestep T
            lora.weights = late if t is not None and t <= start else weights

        handle = hook_before(backbone, choose, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
