"""Curves of Frechet distance by fine-tuning step: files, means, and the step at which a curve reaches a level."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ...engine.errors import refuse
from ...engine.io.files import write_json

Curve = dict[int, float]
"""Step -> Frechet distance."""
Curves = dict[str, dict[int, Curve]]
"""Arm -> seed -> curve."""
ARMS = {
    "grid-rescaled": ("relabel", "grid"),
    "extrapolated-rescaled": ("relabel", "extrapolate"),
    "grid-plain": ("none", "grid"),
}
"""Name -> (schedule, positions) of training and sampling."""
CURVE = "curve.json"


def run_folder(folder: Path, arm: str, seed: int) -> Path:
    """The folder with an arm's state and curve of one seed."""
    return folder / f"{arm}-{seed}"


# --- files --------------------------------------------------------------------------------------------------------
def read_curve(folder: Path) -> Curve:
    """Reads the curve of a run's folder; empty before the first measurement."""
    path = folder / CURVE
    return _curve(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def write_curve(folder: Path, curve: Curve) -> None:
    """Writes the curve into a run's folder."""
    write_json(folder / CURVE, {str(step): distance for step, distance in sorted(curve.items())})


def curves_by_seed(folder: Path, arm: str) -> dict[int, Curve]:
    """One arm's curves by seed, from the folder of all runs."""
    curves = {int(p.parent.name.rsplit("-", 1)[1]): read_curve(p.parent) for p in folder.glob(f"{arm}-*/{CURVE}")}
    return dict(sorted(curves.items()))


def read_curves(path: str | Path) -> Curves:
    """Reads all curves from the folder of all runs, or from the file that the recipe ``transfer`` wrote."""
    path = Path(path)
    if path.is_file():
        table = json.loads(path.read_text(encoding="utf-8"))["curves"]
        return {arm: {int(seed): _curve(c) for seed, c in seeds.items()} for arm, seeds in table.items()}
    curves = {arm: curves_by_seed(path, arm) for arm in ARMS}
    curves = {arm: seeds for arm, seeds in curves.items() if seeds}
    if not curves:
        raise refuse(
            "curves", str(path), "a folder or a file of `python -m vitrine.evidence.recipes transfer`", "run it first"
        )
    return curves


def _curve(table: Mapping[str, float]) -> Curve:
    return {int(step): float(distance) for step, distance in table.items()}


# --- figures -------------------------------------------------------------------------------------------------------
def mean_curve(seeds: Mapping[int, Curve]) -> Curve:
    """Mean over seeds at their common steps."""
    steps = sorted(set.intersection(*(set(c) for c in seeds.values())))
    return {s: sum(c[s] for c in seeds.values()) / len(seeds) for s in steps}


def steps_to_reach(curve: Curve, level: float) -> float | None:
    """First step at which the interpolated curve is at ``level`` or below; None if it never is."""
    steps = sorted(curve)
    for last, now in zip([None, *steps], steps, strict=False):
        if curve[now] <= level:
            if last is None:
                return float(now)
            return last + (now - last) * (curve[last] - level) / (curve[last] - curve[now])
    return None
