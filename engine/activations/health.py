"""Refuse a broken model before spending a forward on it."""

from __future__ import annotations

import torch
from torch import nn

from ..errors import refuse


@torch.no_grad()
def check_weights(name: str, module: nn.Module) -> None:
    """Refuse NaN or infinite parameters: a sum is not finite exactly when one of its terms is not.

    Parameters on the meta device (sequential offload) cannot be seen and are skipped.

    Raises:
        VitrineError: names the first bad parameter.
    """
    named = [(n, p) for n, p in module.named_parameters() if p.device.type != "meta" and p.is_floating_point()]
    if not named:
        return
    sums = torch.stack([p.sum(dtype=torch.float32).to(named[0][1].device) for _, p in named])
    if torch.isfinite(sums).all():
        return
    for parameter_name, parameter in named:
        if not torch.isfinite(parameter).all():
            remedy = "load the checkpoint again; it is damaged, or was cast to a type too small for it"
            raise refuse(f"{name} weights", f"NaN or infinite values in {parameter_name}", "finite weights", remedy)
