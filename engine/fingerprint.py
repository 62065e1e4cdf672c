"""Identifies a model by a short hash of sampled weights, equal for diffusers and ComfyUI copies of one checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .addresses import sites_of
from .reading import columns_of
from .site import ModuleSite


def width_of(backbone: nn.Module, site: ModuleSite) -> int:
    """Number of neurons of a value site, from the size of its projection."""
    module: Any = backbone.get_submodule(site.path)
    out = int(module.out_features) if hasattr(module, "out_features") else int(module.weight.shape[0])
    return site.width or (out // site.columns[1] if site.columns else out)


def fingerprint_of(backbone: nn.Module, originals: Mapping[str, torch.Tensor] | None = None) -> str:
    """16 hex digits from sampled weights of the value projections, the same in diffusers and ComfyUI.

    A few numbers of each layer are read and rounded to half precision, so that fp16 and fp32 copies agree.

    Args:
        originals: module path -> unpatched weight, for modules whose weight carries a patch (a LoRA in ComfyUI).
    """
    digest = hashlib.sha256()
    for site in sites_of(backbone).values():
        if not isinstance(site, ModuleSite) or not site.address.endswith(("-cross-v", "-ctx-v")):
            continue
        module: Any = backbone.get_submodule(site.path)
        weight = (originals or {}).get(site.path, module.weight).detach()
        weight = columns_of(weight.movedim(0, -1), site.columns, site.width).movedim(-1, 0)
        sample = weight[:: max(1, weight.shape[0] // 4), :: max(1, weight.shape[1] // 4)]
        rounded = sample.to("cpu", torch.float32).to(torch.float16).flatten().float()
        digest.update(f"{site.address} {tuple(weight.shape)} {[f'{v:.4g}' for v in rounded.tolist()]}".encode())
    return digest.hexdigest()[:16]
