"""Many LoRAs at once on one frozen network: row block m of the batch goes through the adapter of model m.

The weights are one leaf (M, D) in the manifest's order, so AdamW on it is M separate AdamWs, and one backward pass
gives every model its own gradient. Each layer adds two batched products; the frozen products see M times the rows.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ..errors import refuse
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
            down = self.weights[:, layer.offset : layer.middle].view(models, *layer.down).to(x.dtype)
            up = self.weights[:, layer.middle : layer.end].view(models, *layer.up).to(x.dtype)
            each = len(x) // models
            if self.tiled:
                rows = x.reshape(each, models, *x.shape[1:])
            else:
                rows = x.reshape(models, each, *x.shape[1:]).transpose(0, 1)
            # Hu et al. 2021, Eq. 3, for M models side by side: W x + (alpha / r) B_m (A_m x)
            own = _plain(module)
            change = (_convolved if isinstance(own, nn.Conv2d) else _multiplied)(own, rows, down, up)
            if not self.tiled:
                change = change.transpose(0, 1)
            return output + layer.scale * change.reshape(output.shape).to(output.dtype)

        return add


def _plain(module: Any) -> Any:
    """The layer itself where diffusers has wrapped it for LoRAs of its own (PEFT): both then add up."""
    return getattr(module, "base_layer", module)


def _multiplied(module: nn.Module, rows: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """(b, M, ..., in) through (M, r, in) and (M, out, r): (b, M, ..., out)."""
    mine = rows.transpose(0, 1)
    found = torch.bmm(torch.bmm(mine.reshape(len(mine), -1, mine.shape[-1]), down.mT), up.mT)
    return found.view(*mine.shape[:-1], -1).transpose(0, 1)


def _convolved(module: Any, rows: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """(b, M, C, H, W) through (M, r, C, k, k) and (M, out, r, 1, 1): (b, M, out, h, w), as one grouped convolution."""
    models = down.shape[0]
    told = {"stride": module.stride, "padding": module.padding, "dilation": module.dilation, "groups": models}
    inner = nn.functional.conv2d(rows.flatten(1, 2), down.flatten(0, 1), **told)
    return nn.functional.conv2d(inner, up.flatten(0, 1), groups=models).unflatten(1, (models, -1))
