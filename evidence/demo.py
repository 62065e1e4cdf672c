"""``vitrine demo``: a report of the pack on the shipped models, in eight sections with a verdict each."""

from __future__ import annotations

import html
import importlib
from pathlib import Path
from typing import Any, NamedTuple

from ..engine.io.html_page import Report
from ..engine.runtime.stages import Stages
from .result_files import read_results
from .result_plots import arms_of, dot_plot, number, shown


class Stage(NamedTuple):
    """One section of the page.

    Attributes:
        title: its heading, and its name on the console.
        module: ``section(report)`` is in ``evidence/MODULE.py``.
        claims: claims whose results open the section; the arms of the first are plotted.
        seconds: on two idle cores.
        next: what to try after it.
    """

    title: str
    module: str
    claims: tuple[str, ...]
    seconds: float
    next: str


STAGES = (
    Stage("The model, and the pictures it memorized", "portraits.page",
          ("portraits.memorized", "portraits.quality"), 15,
          "The template *Check a model for copies*; your own model: `vitrine nemo check`."),
    Stage("What the model sees in a picture", "activations.page", ("gdf.correspondence.photographs", "gdf.filter"), 20,
          "The template *See what the model sees*; layers of your own model: `vitrine taps rank`."),
    Stage("The same point, the same part in other pictures", "activations.matching_page",
          ("gdf.correspondence", "gdf.segmentation"), 20,
          "The template *Find the same part*, with points on your own picture."),
    Stage("Neurons that memorize, found and blocked", "nemo.page", ("nemo.blocking", "nemo.held_out"), 40,
          "The template *Stop the model copying a picture*, or `vitrine nemo find`."),
    Stage("A space of models: people and sliders", "w2w.page", ("w2w.inversion", "w2w.editing"), 35,
          "The template *Pull sliders on a person*; a folder of your LoRAs: `vitrine w2w build`."),
    Stage("The size a model is conditioned on", "control.page", ("control.flip", "control.cross_size"), 20,
          "The template *Say how large a picture should look*, with SDXL's size conditions."),
    Stage("Other sizes than the trained one", "resolution.page", ("resolution.receptive", "resolution.transfer"), 20,
          "The template *Sample at twice the size*, a second pass without double heads."),
    Stage("One step instead of thirty", "emd.page", ("emd.student", "emd.mixture"), 10,
          "The template *Sample in one step*; a student of your own model: `vitrine emd train`."),
)  # fmt: skip
TRUST = 30.0
"""Seconds for which the table above counts as measured: the first section also imports the libraries."""
_STYLE = """<style>.verdict { border-left: 4px solid; padding: .2rem .8rem; margin: .8rem 0; max-width: 46rem; }
.verdict b { text-transform: uppercase; letter-spacing: .04em; } .verdict .quiet { color: var(--quiet); }
.pass { border-color: #009e73; } .partly { border-color: #e69f00; } .fail { border-color: #d55e00; }
.next { font-style: italic; }</style>"""


def write_report(out: Path) -> Path:
    """Writes the page atomically, and prints a line per section. Returns the path."""
    report = Report("Vitrine", "See inside a diffusion model, change it in place, sample from what you changed.")
    report.add_drawing(_STYLE)
    report.add_paragraph(
        "Pictures and tables were computed just now by toy models that ship with the pack. Each section opens with a "
        "verdict from `results/`, measured in full beforehand, next to the best other method and a trivial baseline. "
        "Brackets are 95 % intervals."
    )
    results, stages = read_results(), Stages({stage.title: stage.seconds for stage in STAGES}, TRUST)
    for stage in STAGES:
        stages.begin(stage.title)
        report.add_heading(stage.title)
        for number_, claim in enumerate(stage.claims):
            report.add_drawing(verdict(results[claim]) + (dot_plot(results[claim]) if number_ == 0 else ""))
        importlib.import_module(f"{__package__}.{stage.module}").section(report)
        report.add_paragraph(f"Try this next: {stage.next}".replace("*", ""))
    return report.write(out)


def verdict(result: dict[str, Any]) -> str:
    """The verdict, the claim in words, ours, the best other method and the trivial baseline, as HTML."""
    lines = [f"{shown(result['ours'], result['interval'])} {result['metric']}"]
    for role, words in (("rival", "best other method"), ("trivial", "trivial baseline")):
        known = [arm for arm in arms_of(result) if arm["role"] == role]
        if known:
            pick = max if result["better"] == "higher" else min
            arm = pick(known, key=lambda a: a["value"])
            lines.append(f"{words}: {number(arm['value'])} ({arm['name']})")
    figures = html.escape("; ".join(lines))
    words = (
        f'{html.escape(result["title"])}.<br><span class="quiet">{figures}, n = {result["n"] or "-"}, {result["world"]}'
    )
    return f'<p class="verdict {result["verdict"]}"><b>{result["verdict"]}</b> {words}</span></p>'
