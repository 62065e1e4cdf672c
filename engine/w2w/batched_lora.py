"""Many LoRAs at once on one frozen network: row block m of the batch goes through the adapter of model m.

The weights are one leaf (M, D) in the manifest's order, so AdamW on it is M separate AdamWs, and one backward pass
gives every model its own gradient. Each layer adds two batched products; the frozen products see M times the rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from ..errors import refuse
from ..forward_clock import timestep_of
from .manifest import LoraLayer, Manifest
from .names import canonical

PAPER_TARGETS = ("to_q", "to_v")
"""What the paper's models train: query and value of every attention, self and cross."""


def modules_of(backbone: nn.Module) -> dict[str, nn.Module]:
    """Module path in diffusers' words -> module, for diffusers networks and for ComfyUI's (ldm) UNets."""
    blocks = getattr(backbone, "num_res_blocks", 2)
    layers = int(blocks[0] if isinstance(blocks, (list, tuple)) else blocks)
    return {canonical(path, layers): module for path, module in backbone.named_modules()}


def target_layers(backbone: nn.Module, targets: tuple[str, ...] = PAPER_TARGETS) -> dict[str, nn.Linear]:
    """Module path -> linear layer for each module whose path ends in one of ``targets``.

    Raises:
        VitrineError: nothing matches.
    """
    found = {
        path: module
        for path, module in modules_of(backbone).items()
        if isinstance(module, nn.Linear) and any(path == t or path.endswith("." + t) for t in targets)
    }
    if not found:
        ends = sorted({p.rsplit(".", 1)[-1] for p, m in modules_of(backbone).items() if isinstance(m, nn.Linear)})
        raise refuse("LoRA targets", targets, ends, "name linear layers of this model")
    return found


def initial_lora(
    backbone: nn.Module, targets: tuple[str, ...] = PAPER_TARGETS, rank: int = 1, alpha: float = 27.0, seed: int = 0
) -> dict[str, LoraLayer]:
    """PEFT's start: A ~ U(-1 / sqrt(in), 1 / sqrt(in)), B = 0, layers in sorted order from one seed.

    All models of a space must share it: only a common start makes their factors comparable (see ``gauge.py``).
    """
    random, out = torch.Generator().manual_seed(seed), {}
    for path, layer in sorted(target_layers(backbone, targets).items()):
        bound = 1 / math.sqrt(layer.in_features)
        down = (torch.rand(rank, layer.in_features, generator=random) * 2 - 1) * bound
        out[path] = LoraLayer(down, torch.zeros(layer.out_features, rank), alpha)
    return out


class BatchedLora(AbstractContextManager):
    """Adapters of M models on a diffusers or ComfyUI backbone while the block is open; it is untouched afterwards.

    Args:
        weights: (M, D) in ``manifest`` order; a leaf that takes gradients, or plain numbers. May be replaced while the
            block is open (an edit that begins late).
        tiled: row i belongs to model i % M, as where guidance doubles the batch; else rows come as M equal blocks.
    """

    def __init__(self, backbone: nn.Module, manifest: Manifest, weights: torch.Tensor, tiled: bool = False) -> None:
        if weights.ndim != 2 or weights.shape[1] != manifest.size:
            raise refuse("weights", tuple(weights.shape), f"(M, {manifest.size})", "one flat row for each model")
        modules = modules_of(backbone)
        kinds = (nn.Linear, nn.Conv2d)
        missing = [layer.path for layer in manifest if not isinstance(_plain(modules.get(layer.path)), kinds)]
        if missing:
            remedy = "use the base model the LoRAs were made for"
            raise refuse("LoRA layers", missing[:3], "linear or convolution layers of this model", remedy)
        self.manifest, self.weights, self.tiled = manifest, weights, tiled
        self._modules = {layer.path: modules[layer.path] for layer in manifest}
        self._handles: list[Any] = []
        self._cut: tuple[torch.Tensor, bool, dict[int, torch.Tensor]] | None = None

    def __enter__(self) -> BatchedLora:
        for layer in self.manifest:
            module = self._modules[layer.path]  # first of all hooks: to edits and captures it is the layer's weight
            self._handles.append(module.register_forward_hook(self._hook(layer), prepend=True))
        return self

    def __exit__(self, *error: object) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _hook(self, layer: Any) -> Any:
        def add(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
            x, models = args[0], len(self.weights)
            if len(x) % models:
                raise refuse("batch", len(x), f"a multiple of {models} models", "give each model as many rows")
            parts = self._split()
            down = parts[layer.offset].view(models, *layer.down).to(x.dtype)
            up = parts[layer.middle].view(models, *layer.up).to(x.dtype)
            own = _plain(module)
            if isinstance(own, nn.Conv2d):
                change = _convolved(own, self._by_model(x), down, up)
                return output + layer.scale * self._as_batch(change, output).to(output.dtype)
            # Hu et al. 2021, Eq. 3, for M models side by side: W x + (alpha / r) B_m (A_m x)
            mine, base = (self._by_model(v).reshape(models, -1, v.shape[-1]) for v in (x, output))
            inner = torch.bmm(mine, down.mT).to(output.dtype)
            found = torch.baddbmm(base, inner, up.mT.to(output.dtype), alpha=layer.scale)
            return self._as_batch(found, output)

        return add

    def _split(self) -> dict[int, torch.Tensor]:
        """Offset -> columns, cut once for all layers: 2 L slices would each make a whole (M, D) gradient."""
        of = (self.weights, torch.is_grad_enabled())
        if self._cut is None or self._cut[0] is not of[0] or self._cut[1] != of[1]:
            starts = [at for layer in self.manifest for at in (layer.offset, layer.middle)]
            sizes = [b - a for a, b in zip(starts, [*starts[1:], self.manifest.size], strict=True)]
            self._cut = (*of, dict(zip(starts, self.weights.split(sizes, 1), strict=True)))
        return self._cut[2]

    def _by_model(self, x: torch.Tensor) -> torch.Tensor:
        """(b M, ...) -> (M, b, ...)."""
        models = len(self.weights)
        return x.unflatten(0, (-1, models)).transpose(0, 1) if self.tiled else x.unflatten(0, (models, -1))

    def _as_batch(self, found: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Back from models first to the batch's own order."""
        if not self.tiled:
            return found.reshape(like.shape)
        models = len(self.weights)
        return found.reshape(models, -1, *like.shape[1:]).transpose(0, 1).reshape(like.shape)


def _plain(module: Any) -> Any:
    """The layer itself where diffusers has wrapped it for LoRAs of its own (PEFT): both then add up."""
    return getattr(module, "base_layer", module)


def _convolved(module: Any, rows: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """(M, b, C, H, W) through (M, r, C, k, k) and (M, out, r, 1, 1): (M, b, out, h, w), as one grouped convolution."""
    models = down.shape[0]
    told = {"stride": module.stride, "padding": module.padding, "dilation": module.dilation, "groups": models}
    inner = nn.functional.conv2d(rows.transpose(0, 1).flatten(1, 2), down.flatten(0, 1), **told)
    return nn.functional.conv2d(inner, up.flatten(0, 1), groups=models).unflatten(1, (models, -1)).transpose(0, 1)


@contextmanager
def late_lora(
    backbone: nn.Module, manifest: Manifest, before: torch.Tensor, after: torch.Tensor, start: float
) -> Iterator[None]:
    """Inside, each picture of a batch has its own LoRA: ``before`` at first, ``after`` from timestep ``start`` on.

    Args:
        before, after: (B, D) flat weights; guidance's halves of a batch are tiled over them.
    """
    with BatchedLora(backbone, manifest, before, tiled=True) as lora:

        def choose(module: nn.Module, args: tuple, kwargs: dict) -> None:
            t = timestep_of(args, kwargs)
            lora.weights = after if t is not None and t <= start else before

        handle = backbone.register_forward_pre_hook(choose, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
