"""Imports the published weights2weights files, which users download themselves: their licence is non-commercial.

Tensors are opened with ``weights_only=True``. The label table is a pickled DataFrame and is never opened here: one
line of pandas turns it into a CSV that :func:`~.labels.read_table` reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ...errors import refuse
from ...io.files import check_tensors, named
from ...io.number_checks import LARGEST_SIDE, integer
from ...io.pt_files import read_pt
from ..loras.layer_names import parse
from .labels import names_in
from .manifest import Layer, Manifest
from .space import WeightSpace
from .space_checks import check_components, check_numbers

FILES = ("mean.pt", "std.pt", "V.pt", "weight_dimensions.pt")
PROJECTIONS, WEIGHTS, TABLE = "proj_1000pc.pt", "all_weights.pt", "labels.csv"
ALPHA = 27.0
_CHECKED = 1 << 33
"""Largest tensor in bytes that is checked when it is read; larger ones are checked while they are projected."""
CONVERT = "pandas.read_pickle('identity_df.pt').to_csv('labels.csv')"


def import_official(folder: str | Path, components: int | None = 1000, alpha: float = ALPHA) -> WeightSpace:
    """A space from ``mean.pt, std.pt, V.pt, weight_dimensions.pt`` and, if present, three more.

    ``proj_1000pc.pt``, or else ``all_weights.pt``, has the deviations of the models, which are needed to
    sample; ``labels.csv``, the converted label table in row order, names the models. Projections have
    1,000 components: further ones are used by inversion only.

    Args:
        components: number of V's columns to use; None uses all.
    """
    check_components(components)
    folder = Path(folder)
    missing = [p for p in FILES if not (folder / p).is_file()]
    if missing:
        raise refuse("folder", f"{folder.name} without {missing}", list(FILES), "download the published files into it")
    with named(folder, "folder", "the published files", "download them again"):
        return _imported(folder, components, alpha)


def _imported(folder: Path, components: int | None, alpha: float) -> WeightSpace:
    mean, std = (_tensor(folder / p, 1).float() for p in FILES[:2])
    basis = _tensor(folder / FILES[2], 2).float()
    manifest = _manifest(_load(folder / FILES[3]), alpha)
    if bool((std == 0).any()):
        raise ValueError("a deviation of 0 in std.pt, by which weights are divided")
    k = min(components or basis.shape[1], basis.shape[1])
    basis = basis[:, :k].T.contiguous()
    projections, notes = _projections(folder, mean, std, basis), []
    info: dict[str, Any] = {"base": "RealisticVision v5.1 (SD1.5)", "source": "official"}
    info["licence"] = "non-commercial, do not redistribute"
    negative = int((std < 0).sum())
    if negative:
        notes.append(f"{negative} negative deviations in std.pt, kept: projection and its inverse both use them")
    singular, coefficients, count = torch.zeros(k), torch.zeros(0, k), 2
    if projections is None:
        notes.append(f"without {PROJECTIONS} the spread of the models is unknown: invert and edit, but do not sample")
    else:
        count, centre = len(projections), projections.mean(0)
        deviations = projections.std(0)
        singular[: len(centre)] = deviations * (count - 1) ** 0.5
        coefficients = projections - centre
        if bool((centre.abs() > 1e-3 * deviations).any()):
            # sample_weights() samples around the projections' mean, which our spaces include in the mean model
            mean = mean + std * (centre @ basis[: len(centre)])
            notes.append("projections off centre: their mean became the mean model")
            info["centre"] = centre.tolist()
    names = names_in(folder / TABLE, len(coefficients)) if (folder / TABLE).is_file() else ()
    info |= {"note": "; ".join(notes)} if notes else {}
    # standardised: each weight has variance one
    return WeightSpace(manifest, mean, std, basis, singular, coefficients, count, names, {}, float(len(mean)), info)


def official_manifest(folder: str | Path, alpha: float = ALPHA) -> Manifest:
    """The layers of a published space, from ``weight_dimensions.pt`` alone."""
    path = Path(folder) / FILES[3]
    if not path.is_file():
        raise refuse("folder", f"{path.parent.name} without {path.name}", list(FILES), "download the published files")
    with named(path, "file", "the layers of a published space", "download it again"):
        return _manifest(_load(path), alpha)


def _projections(folder: Path, mean: torch.Tensor, std: torch.Tensor, basis: torch.Tensor) -> torch.Tensor | None:
    """(N, M) coefficients of the models in the leading M of K components, as published, or from their weights."""
    if (folder / PROJECTIONS).is_file():
        projections = _tensor(folder / PROJECTIONS, 2)
        if len(projections) < 2:
            raise refuse("file", f"{PROJECTIONS}: {len(projections)} models", "two or more", "use the published file")
        return projections[:, : len(basis)].float()
    if not (folder / WEIGHTS).is_file():
        return None
    weights = _tensor(folder / WEIGHTS, 2)  # memory-mapped: 26 GB in the published set
    if weights.shape[1] != len(mean):
        raise refuse("file", f"{WEIGHTS}: {tuple(weights.shape)}", f"(N, {len(mean)})", "use the published file")
    projections = torch.cat([((rows.float() - mean) / std) @ basis.T for rows in weights.split(1024)])
    check_numbers({WEIGHTS: projections})
    return projections


def coefficients_in(path: Path, most: int) -> torch.Tensor:
    """``w2wmodel.pt`` -> (B, most), padded with zeros."""
    if not path.is_file():
        raise refuse("model", path.name, "an existing file", "check the path")
    rows = _tensor(path, 1, 2).float()
    rows = rows[None] if rows.ndim == 1 else rows
    if not 0 < rows.shape[1] <= most:
        shown = f"{path.name}: {tuple(rows.shape)}"
        raise refuse("model", shown, f"(B, k), k <= {most}", "import the space with --components 0")
    return torch.nn.functional.pad(rows, (0, most - rows.shape[1]))


def _load(path: Path) -> Any:
    try:
        return read_pt(path)
    except Exception as error:  # a refused pickle raises an exception of the pickle module, which is not imported here
        table = "df" in path.name or "labels" in path.name
        remedy = f"convert tables first: {CONVERT}" if table else "download it again"
        raise refuse("file", f"{path.name}: {str(error)[:80]}", "plain tensors", remedy) from error


def _tensor(path: Path, *axes: int) -> torch.Tensor:
    """One tensor of real numbers that has one of these numbers of axes."""
    tensor = _load(path)
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.ndim not in axes:
        shown = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        accepted = f"one tensor of real numbers with {' or '.join(map(str, axes))} axes"
        raise refuse("file", f"{path.name}: {shown}", accepted, "use the published file")
    if tensor.nbytes <= _CHECKED:
        with named(path, "file", "finite numbers", "download it again"):
            check_tensors({path.name: tensor})
            check_numbers({path.name: tensor})
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
        shapes = [
            tuple(integer(n, "side of a layer", 1, LARGEST_SIDE) for n in dimensions[key][1])
            for key in (down_key, up_key)
        ]
        layer = Layer(down.path, shapes[0], shapes[1], offset, alpha)
        layers.append(layer)
        offset = layer.end
    return Manifest(tuple(layers))
