"""``vitrine reproduce``: measure claims, print them as a table, write them as JSON, and curves as PNG beside it."""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ..engine.files import write_json, write_whole
from ..engine.progress import TqdmProgress
from .registry import Claim, pick_claims


def reproduce(names: list[str], out: Path | None, model: str | None, quick: bool = False) -> int:
    """Measure claims by name or glob, all of them for an empty list, each announced with the time it takes.

    Args:
        out: JSON file for the results, rewritten after each claim; charts go beside it.
        model: a model folder instead of the shipped one.
        quick: fewer samples and wider intervals.

    Returns:
        0 if all claims hold, else 1. A claim that does not hold stays in the list.
    """
    results = []
    for claim in pick_claims(names):
        print(f"{claim.name}: about {duration(claim, quick)} on two CPU cores", flush=True)
        results.append(measure(claim, model, quick))
        print(row(results[-1]), flush=True)
        if out is not None:  # after each claim, so that an interrupted run keeps what it has
            write_json(out, results)
            for path in draw_curves(results[-1], out):
                print(f"    curves: {path}", flush=True)
    return 0 if all(r["holds"] for r in results) else 1


def duration(claim: Claim, quick: bool) -> str:
    """How long a claim takes to measure, in seconds or minutes."""
    minutes = claim.quick_minutes if quick else claim.minutes
    return f"{max(1, round(60 * minutes))} s" if minutes < 1 else f"{minutes:g} min"


def measure(claim: Claim, model: str | None, quick: bool = False) -> dict[str, Any]:
    """One claim as {claim, paper, figure, value, interval, target, holds, quick, command, seconds, details, curves}."""
    bar, began = TqdmProgress(claim.name), time.perf_counter()
    result = claim.measure(model=model, progress=bar, quick=quick)
    bar.close()
    options = (" --quick" if quick else "") + (f" --model {model}" if model else "")
    return {
        "claim": claim.name,
        "paper": claim.paper,
        "figure": claim.figure,
        "value": result.value,
        "interval": result.interval,
        "target": claim.target,
        "holds": result.holds,
        "quick": quick,
        "command": f"vitrine reproduce {claim.name}{options}",
        "seconds": round(time.perf_counter() - began, 1),
        "details": result.details,
        "curves": [asdict(c) for c in result.curves],
    }


def row(result: dict[str, Any]) -> str:
    """One result as text, details indented below it."""
    spread = "" if result["interval"] is None else f" [{result['interval'][0]}, {result['interval'][1]}]"
    verdict = "holds" if result["holds"] else "DOES NOT HOLD"
    measured = f"{result['claim']:<22} {result['value']}{spread}"
    head = f"{measured}  target: {result['target']}  {verdict}  ({result['seconds']} s)"
    return "\n".join([head, f"    {result['figure']}", *(f"    {k}: {v}" for k, v in result["details"].items())])


def draw_curves(result: dict[str, Any], out: Path) -> list[Path]:
    """Each chart of a measured claim as OUT-CLAIM-N.png beside the JSON file OUT; the paths."""
    from .charts import line_chart

    paths = []
    for i, curves in enumerate(result["curves"]):
        path = out.with_name(f"{out.stem}-{result['claim']}-{i + 1}.png")
        picture = line_chart(**curves)
        paths.append(write_whole(path, partial(picture.save, format="PNG")))
    return paths
