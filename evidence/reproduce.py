"""``vitrine reproduce``: measure claims, print them, write each as ``results/CLAIM.json``, and curves as PNG."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from ..engine.errors import refuse
from ..engine.io.files import write_whole
from ..engine.runtime.processes import cores, each_in_turn
from ..engine.runtime.progress import TqdmProgress, silent
from ..engine.runtime.quiet import quiet_libraries
from ..engine.runtime.stages import Stages, duration
from .photograph_folder import available
from .registry import Claim, pick_claims
from .result_files import commit, record, write_result
from .result_plots import shown


def reproduce(
    names: list[str],
    out: Path | None,
    model: str | None,
    quick: bool = False,
    workers: int | None = None,
    files: Mapping[str, str | None] | None = None,
) -> int:
    """Measures claims by name or glob, all for an empty list; prints the time left before each.

    Args:
        out: folder for ``CLAIM.json``, one per claim, and charts; None is :func:`default_folder`.
        model: a model folder instead of the shipped one.
        quick: fewer samples and wider intervals.
        workers: number of claims in parallel, each in a process of one thread; None takes one per CPU core, at most
            four.
        files: for claims that take them, by the parameter's name: "plants", a list of memorized pictures, "state", a
            folder for what is measured so far, and those of :data:`MATERIAL`; None is left out.

    Returns:
        0 if all claims hold, else 1. Failing claims are listed, too.
    """
    if workers is not None and workers < 1:
        raise refuse("workers", workers, "1 or more", "leave it out for the default")
    material = {name: value for name, value in (files or {}).items() if value is not None}
    folder, verdicts, picked = out or default_folder(model or material.get("plants"), quick), [], pick_claims(names)
    picked = [_with(claim, material) for claim in (picked if names or material else _with_material(picked))]
    workers = 1 if material else max(1, min(workers or min(cores(), 4), len(picked)))
    for result in _measured(picked, model, quick, workers):
        verdicts.append(result["verdict"])
        print(row(result), flush=True)
        if folder is not None:
            write_result(result, folder)
            for path in draw_curves(result, folder):
                print(f"    curves: {path}", flush=True)
    return 0 if set(verdicts) == {"pass"} else 1


def default_folder(model: str | None, quick: bool) -> Path | None:
    """``results``, ``results/quick``; None for a custom model, whose results differ from the shipped ones."""
    return None if model else Path("results") / ("quick" if quick else "")


MATERIAL = {
    "photographs": "Debian's package tuxpaint-stamps-default, or --photographs FOLDER",
    "avataaars": "--avataaars FOLDER, the model folder that `python -m vitrine.evidence.recipes avataaars` makes",
}
"""Parameter of a claim's ``measure`` -> what it needs that no Python package brings."""


def _with(claim: Claim, material: dict[str, str]) -> Claim:
    """The claim with these files and folders."""
    unknown = sorted(set(material) - set(signature(claim.measure).parameters))
    if unknown:
        option = f"--{unknown[0].replace('_', '-')}"
        raise refuse(option, f"with {claim.name}", "a claim that takes it", "name the claims that it is for")
    values = {"plants": material.get("plants")}
    flags = [name for name in ("plants", *MATERIAL) if name in material and name != "photographs"]
    options = "".join(f" --{name.replace('_', '-')} {values.get(name, 'FOLDER')}" for name in flags)
    return replace(claim, measure=partial(claim.measure, **material), options=options)


def _with_material(picked: list[Claim]) -> list[Claim]:
    """When all claims are asked for: those whose material is on this machine."""
    missing = {name for name in MATERIAL if name != "photographs" or not available()}
    kept = []
    for claim in picked:
        needed = missing & set(signature(claim.measure).parameters)
        if needed:
            print(f"{claim.name}: not measured, it needs {MATERIAL[needed.pop()]}", flush=True)
        else:
            kept.append(claim)
    return kept


def _measured(claims: list[Claim], model: str | None, quick: bool, workers: int) -> Iterator[dict[str, Any]]:
    """Yields results in order, or as they finish."""
    seconds = {c.name: 60 * (c.quick_minutes if quick else c.minutes) for c in claims}
    if workers == 1:
        stages = Stages(seconds, trust=30)
        for claim in claims:
            stages.begin(claim.name)
            yield measure(claim, model, quick)
        return
    whole = duration(sum(seconds.values()) / workers)
    print(f"{len(claims)} claims: about {whole}, {workers} at a time", flush=True)
    slowest_first = sorted(claims, key=lambda c: -seconds[c.name])
    yield from each_in_turn(partial(_named, model=model, quick=quick), [c.name for c in slowest_first], workers)


def _named(name: str, model: str | None, quick: bool) -> dict[str, Any]:
    """In a process of its own, where the command's filters of messages do not stand yet."""
    with quiet_libraries():
        return measure(pick_claims([name])[0], model, quick, bar=False)


def measure(claim: Claim, model: str | None, quick: bool = False, bar: bool = True) -> dict[str, Any]:
    """Measures one claim; returns its :func:`record`."""
    bar_shown, began, code = TqdmProgress(claim.name) if bar else None, time.perf_counter(), commit()
    result = claim.measure(model=model, progress=bar_shown or silent, quick=quick)
    if bar_shown is not None:
        bar_shown.close()
    options = (" --quick" if quick else "") + (f" --model {model}" if model else "")
    command = f"vitrine reproduce {claim.name}{options}{claim.options}"
    return record(claim, result, quick=quick, command=command, seconds=time.perf_counter() - began, code=code)


def row(result: dict[str, Any]) -> str:
    """One result as text, its baselines below it."""
    head = f"{result['claim']:<22} {result['verdict']}: {shown(result['ours'], result['interval'])}"
    lines = [f"{head}  ({result['seconds']} s)", f"    {result['title']}; {result['metric']}"]
    lines += [
        f"    {arm['name']} ({arm['role']}): {shown(arm['value'], arm['interval'])}" for arm in result["baselines"]
    ]
    lines += [f"    {'met' if met else 'not met'}: {part}" for part, met in result["parts"].items()]
    return "\n".join([*lines, f"    target: {result['target']}"])


def draw_curves(result: dict[str, Any], folder: Path) -> list[Path]:
    """Writes each chart of a measured claim as ``FOLDER/CLAIM-N.png``; returns the paths."""
    from .charts import line_chart

    paths = []
    for i, curves in enumerate(result["curves"]):
        picture = line_chart(**curves)
        path = folder / f"{result['claim']}-{i + 1}.png"
        paths.append(write_whole(path, partial(picture.save, format="PNG")))
    return paths
