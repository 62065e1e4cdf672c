"""``vitrine verify``: print the cost, measure, and write a table published / measured / what differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...engine.io.files import named, parse_table, write_json
from ...engine.io.html_page import Report
from ...engine.jobs.digests import digest
from ...engine.jobs.run import sole_owner
from ...engine.runtime.progress import Progress, TqdmProgress
from ...engine.runtime.stages import Stages, duration
from .context import Asked, Context, local_model, offline
from .embedded import embedded
from .protocol import Check, pick_checks
from .records import Estimate, Figure, Measured, Need

RESULTS, PLAN, PAGE = "verify.json", "plan.json", "verify.html"


@dataclass(frozen=True)
class Planned:
    """One check before it runs.

    Attributes:
        check: the claim.
        missing: required data that was not found.
        estimate: None if the claim does not apply to this model.
        unfit: why it does not.
    """

    check: Check
    missing: tuple[Need, ...]
    estimate: Estimate | None
    unfit: str = ""

    @property
    def reason(self) -> str:
        """Why it cannot run; empty if it can."""
        if self.estimate is None:
            return f"not for this model: {self.unfit}"
        return "needs " + ", ".join(need.short for need in self.missing) if self.missing else ""


def verify(
    asked: Asked, names: Sequence[str] = (), dry: bool = False, bar: Callable[[str], Progress] = TqdmProgress
) -> int:
    """Verify claims on a checkpoint, without names all possible ones; the same call resumes after a kill.

    Writes ``plan.json`` before anything is measured, then ``verify.json`` and ``verify.html`` into the out folder.

    Args:
        names: claims by name or glob.
        dry: stop after the plan; which the report then contains.
        bar: label -> progress of one claim.

    Returns:
        0 if all of the named claims were measured (without names: any), or dry; else 1.
    """
    checks, asked = pick_checks(names), embedded(asked)
    local_model(asked.model, asked.load.config)
    with offline(), sole_owner(asked.out):
        context = Context(asked, bar)
        plans = [_planned(check, context) for check in checks]
        _announce(context, plans)
        world = bool(asked.world)
        rows = [_claim(plan, None, world, "dry run" if dry else "not measured yet") for plan in plans]
        _write(context, plans, rows)
        stages = Stages({p.check.name: p.estimate.seconds for p in plans if p.estimate and not p.reason}, trust=30)
        for i, plan in enumerate(plans):
            if not dry and not plan.reason:
                stages.begin(plan.check.name)
                rows[i] = _claim(plan, _measured(plan.check, context), world)
                _print(rows[i])
                _write(context, plans, rows)  # after each claim, so that an interrupted run shows what it has
    print(f"-> {asked.out / PAGE}, {asked.out / RESULTS}")
    ran = [row["status"] == "measured" for row in rows]
    return 0 if dry or (all(ran) if names else any(ran)) else 1


def _write(context: Context, plans: Sequence[Planned], rows: list[dict[str, Any]]) -> None:
    """The JSON file and the page with the claims measured so far."""
    out, table = context.asked.out, _plan_table(context, plans)
    report = {"model": _model(context), "subset": context.asked.subset, "claims": rows}
    write_json(out / PLAN, table)
    write_json(out / RESULTS, report)
    write_page(out / PAGE, report, table)


def _planned(check: Check, context: Context) -> Planned:
    if context.kind not in check.families:
        return Planned(check, (), None, f"the claim is about {' or '.join(check.families)}")
    if unfit := check.fits(context):
        return Planned(check, (), None, unfit)
    missing = tuple(n for n in check.needs if not n.optional and context.path(n) is None)
    return Planned(check, missing, check.prepare(context))


def _announce(context: Context, plans: Sequence[Planned]) -> None:
    """Prints the required data, time and memory before the work begins."""
    pace, device = context.pace, context.network.device.type
    row = f"a UNet evaluation {pace.seconds:.3g} s and {pace.row / 2**20:.0f} MiB"
    kind = f"{type(context.pipe).__name__} ({context.kind}), {context.dtype} on {device}"
    print(f"{kind}: weights {pace.weights / 2**30:.1f} GiB, {row}", flush=True)
    if context.asked.world:
        print(stand_in(context.asked.world), flush=True)
    for plan in plans:
        line = f"{plan.check.name}: {plan.reason}" if plan.reason else plan.check.name
        if plan.estimate is not None:
            line += f"\n    about {duration(plan.estimate.seconds)}, {plan.estimate.bytes / 2**30:.2f} GiB beyond the "
            line += f"weights; {plan.estimate.why}"
        print(line, flush=True)
        for need in plan.missing:
            print(f"    missing: {need.text()}", flush=True)


def _plan_table(context: Context, plans: Sequence[Planned]) -> dict[str, Any]:
    pace = context.pace
    return {
        "seconds of a row": round(pace.seconds, 4),
        "bytes of a row": pace.row,
        "bytes of the weights": pace.weights,
        "device": context.network.device.type,
        "claims": [
            {
                "claim": p.check.name,
                "estimate": None if p.estimate is None else asdict(p.estimate),
                "cannot run": p.reason,
                "needs": [asdict(n) | {"here": context.path(n) is not None} for n in p.check.needs],
            }
            for p in plans
        ],
    }


def _model(context: Context) -> dict[str, Any]:
    return {
        "name": context.asked.world or context.model.name,
        "shipped": bool(context.asked.world),
        "class": type(context.pipe).__name__,
        "family": context.kind,
        "dtype": context.dtype,
        "sha256": context.weights,
    }


def _measured(check: Check, context: Context) -> tuple[Measured, dict[str, str]]:
    """The outcome and the sums of the data, measured now or by an earlier call."""
    sums = context.data_sums(check.needs)
    described_by = context.data_sums_of("sscd", "clip", "face")
    mark = digest([context.identity, context.asked.subset, context.settings, sums, described_by, context.asked.world])
    path = context.asked.out / "state" / f"{check.name}.json"
    if path.is_file():
        with named(path, "result", "what an earlier run left", "delete it to measure anew"):
            known = parse_table(path.read_text(encoding="utf-8"))
        if known["mark"] == mark:
            return _from_plain(known), sums
    write_json(path, {"mark": mark, **asdict(check.measure(context))})
    return _from_plain(parse_table(path.read_text(encoding="utf-8"))), sums


def _from_plain(table: dict[str, Any]) -> Measured:
    figures = {}
    for key, values in table["figures"].items():
        interval = None if values["interval"] is None else (values["interval"][0], values["interval"][1])
        figures[key] = Figure(**values | {"interval": interval})
    return Measured(figures, tuple(table["differs"]), table["missing"], table["details"])


def _claim(
    plan: Planned, outcome: tuple[Measured, dict[str, str]] | None, shipped: bool, waiting: str = "not measured"
) -> dict[str, Any]:
    """One claim of the JSON file: each published figure next to the measured one, then those without a published one.

    Args:
        shipped: the model ships with the pack, so that only figures with ``anywhere`` can be compared.
    """
    result, sums = outcome or (Measured({}), {})
    status = "measured" if outcome else plan.reason or "planned"
    printed = {p.key: p for p in plan.check.published}
    rows = [
        {
            "key": key,
            "figure": p.figure,
            "published": asdict(p),
            "comparable": p.anywhere or not shipped,
            "measured": _plain(result.figures.get(key)),
            "why not": "" if key in result.figures else result.missing.get(key) or plan.reason or waiting,
        }
        for key, p in printed.items()
    ]
    rows += [
        {"key": key, "figure": f.what, "published": None, "comparable": False, "measured": _plain(f), "why not": ""}
        for key, f in result.figures.items()
        if key not in printed
    ]
    return {
        "claim": plan.check.name,
        "paper": plan.check.paper,
        "status": status,
        "figures": rows,
        "differs": list(result.differs),
        "data": sums,
        "details": result.details,
    }


def _print(row: dict[str, Any]) -> None:
    """Each measured figure of a claim with the published one."""
    for figure in row["figures"]:
        if figure["measured"] is not None:
            values = f"measured {measured(figure)}, published {published(figure)}"
            print(f"{row['claim']}: {figure['figure']}: {values}", flush=True)


def _plain(figure: Figure | None) -> dict[str, Any] | None:
    return None if figure is None else asdict(figure)


def write_page(path: Path, report: dict[str, Any], plan: dict[str, Any]) -> Path:
    """A page from the tables of ``verify.json`` and ``plan.json``."""
    model = report["model"]
    lead = f"{model['name']}: {model['class']}, {model['dtype']}. Published figures next to those measured here."
    page = Report("Verified on a shipped model" if model["shipped"] else "Verified on your checkpoint", lead)
    if model["shipped"]:
        page.add_paragraph(stand_in(model["name"]))
    page.add_paragraph("Local files alone were read; nothing was downloaded. SHA-256 of the weights:")
    page.add_table([("file", "SHA-256"), *model["sha256"].items()])
    for row in report["claims"]:
        _add_claim(page, row)
    _add_data(page, plan)
    _add_plan(page, plan)
    return page.write(path)


def _add_claim(page: Report, row: dict[str, Any]) -> None:
    page.add_heading(row["claim"])
    page.add_paragraph(row["paper"])
    if row["status"] != "measured":
        page.add_paragraph(f"Not run here: {row['status']}.")
    head = ("figure", "published", "on", "measured [95 %]", "n")
    page.add_table([head, *(_row(figure) for figure in row["figures"])])
    if row["differs"]:
        page.add_table([("What differs",), *((line,) for line in row["differs"])])
    notes = dict.fromkeys(f["published"]["note"] for f in row["figures"] if f["published"] and f["published"]["note"])
    for note in notes:
        page.add_paragraph(note)
    if row["data"]:
        page.add_table([("data", "SHA-256"), *row["data"].items()])


def _row(figure: dict[str, Any]) -> tuple[object, ...]:
    source = figure["published"]
    where = f"{source['model']}, {source['data']} ({source['source']})" if source else ""
    count = "" if figure["measured"] is None else figure["measured"]["n"]
    return figure["figure"], published(figure), where, measured(figure), count


def stand_in(name: str) -> str:
    """The note on figures of a shipped model."""
    return (
        f"'{name}' ships with this pack and is measured on drawings: this shows that the checks run. Published figures "
        "are of other models and photographs; those that cannot be compared say so."
    )


def published(figure: dict[str, Any]) -> str:
    """The printed value of a figure of ``verify.json``, and whether it can be compared; or "none"."""
    if not figure["published"]:
        return "none"
    return _number(figure["published"]) + ("" if figure["comparable"] else " (not comparable)")


def measured(figure: dict[str, Any]) -> str:
    """The measured value with its 95 % interval, or why there is none."""
    value = figure["measured"]
    if value is None:
        return f"not run here: {figure['why not']}"
    interval = value["interval"]
    return _number(value) + ("" if interval is None else f" [{interval[0]:g}, {interval[1]:g}]")


def _number(figure: dict[str, Any]) -> str:
    """A value with its spread, as papers print them."""
    return f"{figure['value']:g}" + ("" if figure["spread"] is None else f" +- {figure['spread']:g}")


def _add_data(page: Report, plan: dict[str, Any]) -> None:
    """The data that each claim needs, whether present or not."""
    page.add_heading("Data")
    page.add_paragraph("None of it ships with the pack, and nothing is downloaded: get it from its authors.")
    needs = {n["file"]: n for claim in plan["claims"] for n in claim["needs"]}
    head = ("file", "here", "what", "where its authors publish it", "licence")
    rows = [
        (n["file"], "yes" if n["here"] else "no", n["what"], n["where_published"], n["licence"]) for n in needs.values()
    ]
    page.add_table([head, *rows])


def _add_plan(page: Report, plan: dict[str, Any]) -> None:
    page.add_heading("What it takes on this machine")
    page.add_paragraph(
        f"A UNet evaluation takes {plan['seconds of a row']:g} s on {plan['device']} and "
        f"{plan['bytes of a row'] / 2**20:.0f} MiB beyond the weights' {plan['bytes of the weights'] / 2**30:.2f} GiB."
    )
    rows: list[tuple[object, ...]] = [("claim", "UNet evaluations", "about", "GiB beyond the weights", "counted as")]
    for claim in plan["claims"]:
        estimate = claim["estimate"]
        if estimate is not None:
            size, seconds = f"{estimate['bytes'] / 2**30:.2f}", duration(estimate["seconds"])
            rows.append((claim["claim"], f"{estimate['rows']:.0f}", seconds, size, estimate["why"]))
    page.add_table(rows)
