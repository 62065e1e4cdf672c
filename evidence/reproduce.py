"""``vitrine reproduce``: measure claims, print them as a table, write them as JSON, and curves as PNG beside it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from ..engine.errors import refuse
from ..engine.io.files import write_json, write_whole
from ..engine.runtime.processes import each_in_turn
from ..engine.runtime.progress import TqdmProgress, silent
from .registry import Claim, pick_claims


def reproduce(
    names: list[str], out: Path | None, model: str | None, quick: bool = False, workers: int = 1,
    plants: str | None = None,
) -> int:  # fmt: skip
    """Measure claims by name or glob, all of them for an empty list, each announced with the time it takes.

    Args:
        out: JSON file for the results, rewritten after each claim; charts go beside it.
        model: a model folder instead of the shipped one.
        quick: fewer samples and wider intervals.
        workers: so many claims side by side, each in a process of one thread.
        plants: a list of planted pictures, for claims that take one.

    Raises:
        VitrineError: There is no such claim, or no worker; or one of the claims takes no list of planted pictures.

    Returns:
        0 if all claims hold, else 1. A claim that does not hold stays in the list.
    """
    if workers < 1:
        raise refuse("workers", workers, "1 or more", "2 suits two cores")
    results, picked = [], pick_claims(names)
    if plants is not None:
        picked = [_with_plants(claim, plants) for claim in picked]
        workers = 1
    for result in _measured(picked, model, quick, workers):
        results.append(result)
        print(row(result), flush=True)
        if out is not None:  # after each claim, so that an interrupted run keeps what it has
            write_json(out, results)
            for path in draw_curves(result, out):
                print(f"    curves: {path}", flush=True)
    return 0 if all(r["holds"] for r in results) else 1


def _with_plants(claim: Claim, plants: str) -> Claim:
    if "plants" not in signature(claim.measure).parameters:
        raise refuse("plants", claim.name, "a claim about planted pictures", "name nemo.held_out alone")
    return replace(claim, measure=partial(claim.measure, plants=plants), options=f" --plants {plants}")


def _measured(claims: list[Claim], model: str | None, quick: bool, workers: int) -> Iterator[dict[str, Any]]:
    """Results one after another, or as they come."""
    if workers == 1:
        for claim in claims:
            print(f"{claim.name}: about {duration(claim, quick)} on two CPU cores", flush=True)
            yield measure(claim, model, quick)
        return
    minutes = sum(c.quick_minutes if quick else c.minutes for c in claims)
    print(f"{len(claims)} claims: about {minutes / workers:.0f} min, {workers} side by side", flush=True)
    slowest_first = sorted(claims, key=lambda c: -(c.quick_minutes if quick else c.minutes))
    yield from each_in_turn(partial(_named, model=model, quick=quick), [c.name for c in slowest_first], workers)


def _named(name: str, model: str | None, quick: bool) -> dict[str, Any]:
    return measure(pick_claims([name])[0], model, quick, bar=False)


def duration(claim: Claim, quick: bool) -> str:
    """How long a claim takes to measure, in seconds or minutes."""
    minutes = claim.quick_minutes if quick else claim.minutes
    return f"{max(1, round(60 * minutes))} s" if minutes < 1 else f"{minutes:g} min"


def measure(claim: Claim, model: str | None, quick: bool = False, bar: bool = True) -> dict[str, Any]:
    """One claim as {claim, paper, figure, value, interval, target, holds, quick, command, seconds, details, curves}."""
    shown, began = TqdmProgress(claim.name) if bar else None, time.perf_counter()
    result = claim.measure(model=model, progress=shown or silent, quick=quick)
    if shown is not None:
        shown.close()
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
        "command": f"vitrine reproduce {claim.name}{options}{claim.options}",
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
