"""``results/CLAIM.json``: the outcome of one claim, written by ``vitrine reproduce`` and read by pages and the demo."""

from __future__ import annotations

import datetime
import math
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from ..engine.io.files import parse_table, write_json
from .registry import OURS, Claim, ClaimResult
from .statements import Statement, statements

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "results"
"""Results of the shipped models; those of ``--quick`` are in the subfolder ``quick``."""
LIBRARIES = ("vitrine-diffusion", "torch", "diffusers", "transformers", "peft")


def record(
    claim: Claim, result: ClaimResult, *, quick: bool, command: str, seconds: float, code: str | None
) -> dict[str, Any]:
    """The file's content: the claim in words, its figures with all baselines, and the settings of the measurement.

    Args:
        code: the commit that was checked out when the measurement began.
    """
    words = statements().get(claim.name, Statement(claim.figure, claim.figure, "", "", ""))
    ours = next((arm for arm in result.arms if arm.role == OURS), None)
    value, interval = (result.value, result.interval) if ours is None else (ours.value, ours.interval)
    table = {
        "claim": claim.name,
        **words._asdict(),
        "paper": claim.paper,
        "figure": claim.figure,
        "target": claim.target,
        "verdict": result.verdict,
        "parts": result.parts,
        "ours": value,
        "interval": interval,
        "judged": None if ours is None else {"value": result.value, "interval": result.interval},
        "n": result.n,
        "seeds": result.seeds,
        "baselines": [asdict(arm) for arm in result.arms if arm is not ours],
        "tables": [asdict(extra) for extra in result.tables],
        "quick": quick,
        "commit": code,
        "date": datetime.date.today().isoformat(),
        "seconds": round(seconds, 1),
        "command": command,
        "versions": versions(),
        "details": result.details,
        "curves": [asdict(c) for c in result.curves],
    }
    return _rounded(table)


def write_result(table: dict[str, Any], folder: str | Path) -> Path:
    """Writes ``folder/CLAIM.json``."""
    return write_json(Path(folder) / f"{table['claim']}.json", table)


def read_results(folder: str | Path = SHIPPED) -> dict[str, dict[str, Any]]:
    """Claim -> its result, in the order of the statements."""
    tables = [parse_table(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("*.json"))]
    order = {name: i for i, name in enumerate(statements())}
    return {t["claim"]: t for t in sorted(tables, key=lambda t: order.get(t["claim"], len(order)))}


def commit(root: Path = ROOT) -> str | None:
    """The checked-out commit's first seven digits, from git's files; None outside a checkout."""
    git = root / ".git"
    if git.is_file():  # a worktree: one line, "gitdir: PATH"
        git = Path(git.read_text(encoding="utf-8").removeprefix("gitdir:").strip())
    if not (git / "HEAD").is_file():
        return None
    common = git / (git / "commondir").read_text(encoding="utf-8").strip() if (git / "commondir").is_file() else git
    head = (git / "HEAD").read_text(encoding="utf-8").strip()
    if not head.startswith("ref: "):
        return head[:7]
    name, packed = head.removeprefix("ref: "), common / "packed-refs"
    if (common / name).is_file():
        return (common / name).read_text(encoding="utf-8")[:7]
    lines = packed.read_text(encoding="utf-8").splitlines() if packed.is_file() else []
    return next((line[:7] for line in lines if line.endswith(f" {name}")), None)


def versions() -> dict[str, str]:
    """Library -> its installed version."""
    known = {}
    for name in LIBRARIES:
        try:
            known[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return known


def _rounded(value: Any) -> Any:
    """Floats with four significant digits, as printed on pages; None if not finite."""
    if isinstance(value, dict):
        return {str(k): _rounded(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value
