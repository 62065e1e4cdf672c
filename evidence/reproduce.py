"""``vitrine reproduce``: measure claims, print them as a table, write them as JSON, and curves as PNG beside it."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..engine.files import write_json
from ..engine.progress import TqdmProgress
from .registry import Claim, pick_claims


def reproduce(names: list[str], out: Path | None, model: str | None) -> int:
    """Measure; returns 0 if all hold and 1 if not. A claim that does not hold stays in the list."""
    results = []
    for claim in pick_claims(names):
        results.append(measure(claim, model))
        print(row(results[-1]), flush=True)
        if out is not None:  # after each claim, so that an interrupted run keeps what it has
            write_json(out, results)
            for path in draw_curves(results[-1], out):
                print(f"    curves: {path}", flush=True)
    return 0 if all(r["holds"] for r in results) else 1


def measure(claim: Claim, model: str | None) -> dict[str, Any]:
    """One claim as {claim, paper, figure, value, interval, target, holds, command, seconds, details, curves}."""
    bar, began = TqdmProgress(claim.name), time.perf_counter()
    result = claim.measure(model=model, progress=bar)
    bar.close()
    return {
        "claim": claim.name,
        "paper": claim.paper,
        "figure": claim.figure,
        "value": result.value,
        "interval": result.interval,
        "target": claim.target,
        "holds": result.holds,
        "command": f"vitrine reproduce {claim.name}" + (f" --model {model}" if model else ""),
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
    from ..engine.charts import line_chart

    paths = []
    for i, told in enumerate(result["curves"]):
        paths.append(out.with_name(f"{out.stem}-{result['claim']}-{i + 1}.png"))
        line_chart(told["series"], told["title"], told["x_label"], told["y_label"]).save(paths[-1])
    return paths
