"""Import of the published weights2weights files, which users download themselves: the licence is non-commercial.

Tensors are opened with ``weights_only=True``. The label table is a pickled DataFrame and is never opened here: one
line of pandas turns it into a CSV that :func:`~.labels.read_table` reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..errors import refuse
from .manifest import Layer, Manifest
from .names import parse
from .space import WeightSpace

FILES = ("mean.pt", "std.pt", "V.pt", "weight_dimensions.pt")
ALPHA = 27.0
CONVERT = "pandas.read_pickle('identity_df.pt').to_csv('labels.csv')"


def import_official(folder: str | Path, components: int | None = 1000, alpha: float = ALPHA) -> WeightSpace:
    """A space from ``mean.pt, std.pt, V.pt, weight_dimensions.pt`` and, where present, ``proj_1000pc.pt``.

    The coefficients' deviations are known from the projections only, which hold 1,000 components. Components beyond
    them can be inverted into but not sampled, and the space then holds no training coefficients.

    Args:
        components: how many of V's columns to take; None takes all.

    Raises:
        VitrineError: If a file is missing, cannot be opened without unpickling, or does not fit the others.
    """
    folder = Path(folder)
    missing = [p for p in FILES if not (folder / p).is_file()]
    if missing:
        raise refuse("folder", f"{folder.name} without {missing}", list(FILES), "download the published files into it")
    mean, std, basis = (_tensor(folder / p) for p in FILES[:3])
    manifest = _manifest(_load(folder / FILES[3]), alpha)
    k = min(components or basis.shape[1], basis.shape[1])
    projections = _tensor(folder / "proj_1000pc.pt") if (folder / "proj_1000pc.pt").is_file() else None
    singular, coefficients, count = torch.zeros(k), torch.zeros(0, k), 2
    if projections is not None:
        count, known = len(projections), min(k, projections.shape[1])
        singular[:known] = projections[:, :known].float().std(0) * (count - 1) ** 0.5
        if k <= projections.shape[1]:
            coefficients = projections[:, :k].float()
    info = {"base": "RealisticVision v5.1 (SD1.5)", "source": "official", "licence": "non-commercial, do not pass on"}
    negative = int((std < 0).sum())
    if negative:
        info["note"] = f"{negative} negative deviations in std.pt, kept: projection and its inverse both use them"
    basis = basis[:, :k].T.contiguous()
    return WeightSpace(manifest, mean.float(), std.float(), basis, singular, coefficients, count, (), {}, 0.0, info)


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a refused pickle raises a class of the pickle module, which nothing here imports
        table = "df" in path.name or "labels" in path.name
        remedy = f"convert tables first: {CONVERT}" if table else "download it again"
        raise refuse("file", f"{path.name}: {str(error)[:80]}", "plain tensors", remedy) from error


def _tensor(path: Path) -> torch.Tensor:
    tensor = _load(path)
    if not isinstance(tensor, torch.Tensor):
        raise refuse("file", f"{path.name}: {type(tensor).__name__}", "one tensor", "use the published file")
    return tensor


def _manifest(dimensions: Any, alpha: float) -> Manifest:
    """{key: [Size([numel]), Size(shape)]} in vector order -> offsets."""
    if not isinstance(dimensions, dict):
        raise refuse("weight_dimensions.pt", type(dimensions).__name__, "a dict", "use the published file")
    keys, layers, offset = list(dimensions), [], 0
    for down_key, up_key in zip(keys[::2], keys[1::2], strict=True):
        down, up = parse(down_key), parse(up_key)
        if down is None or up is None or (down.role, up.role) != ("down", "up") or down.path != up.path:
            accepted = "lora_A then lora_B of a layer"
            raise refuse("weight_dimensions.pt", (down_key, up_key), accepted, "use the published file")
        shapes = [tuple(int(n) for n in dimensions[key][1]) for key in (down_key, up_key)]
        layer = Layer(down.path, shapes[0], shapes[1], offset, alpha)
        layers.append(layer)
        offset = layer.end
    return Manifest(tuple(layers))
