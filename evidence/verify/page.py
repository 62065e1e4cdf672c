"""The report of a verification: what was published, what was measured here, and what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...engine.io.html_page import Report
from ...engine.runtime.stages import duration


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
    rows = [(n["file"], "yes" if n["here"] else "no", n["what"], n["where_published"], n["licence"])
            for n in needs.values()]  # fmt: skip
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
