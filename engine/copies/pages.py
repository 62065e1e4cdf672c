"""The copy check as a table (CSV) and a page, and the LoRA report as a page: HTML that needs no other file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..io.files import write_text
from ..io.html_page import Report
from ..io.picture_files import open_rgb
from ..io.tables import csv_text
from .altered import LOOKED_FOR
from .copy_check import CheckedPrompt, CopyCheck
from .lora_findings import BAD, FINE, LOOK, OPEN, Findings, PromptCopies
from .lora_samples import SHARES
from .nearest import Pictures, as_image, overlay
from .run_page import add_run, add_run_table
from .training_runs import TrainingRun

if TYPE_CHECKING:
    from PIL.Image import Image

CHECK_TABLE, CHECK_PAGE = "copies.csv", "copies.html"
WIDTH = 168
"""Of a picture on a page, in CSS pixels; larger ones are scaled down to twice that."""
SHOWN = 50
"""Prompts of a copy check that have their pictures on the page; the table has all."""
_MOST_BLOCKS = 24


def _small(image: Image) -> Image:
    image.thumbnail((2 * WIDTH, 2 * WIDTH))
    return image


# --- the copy check -------------------------------------------------------------------------------------------------
def write_check(folder: str | Path, check: CopyCheck, pictures: Pictures) -> tuple[Path, Path]:
    """(table, page) in the folder, whole or not at all."""
    folder = Path(folder)
    return write_text(folder / CHECK_TABLE, _table(check)), _page(check, pictures).write(folder / CHECK_PAGE)


def _table(check: CopyCheck) -> str:
    head = ["prompt", "label", "samples", "copies", "share", "share low", "share high", "nearest ratio", "seed"]
    rows: list[list[object]] = [[*head, "nearest", "copied area", "MS-SSIM", "nemo", "memorized", "file"]]
    for p in check.prompts:
        low, high = p.interval
        i = p.closest
        numbers = [f"{p.share:.4f}", low, high, f"{float(p.ratios[i]):.4f}", p.seeds[i]]
        where = [_nearest_name(check, p), f"{float(p.areas[i]):.4f}", f"{float(p.similar[i]):.4f}"]
        score = "" if p.score is None else f"{p.score:.6g}"
        row = [p.prompt, p.label, len(p.ratios), p.copies, *numbers, *where, score, _verdict(check, p), p.file.name]
        rows.append(row)
    return csv_text(rows)


def _verdict(check: CopyCheck, prompt: CheckedPrompt) -> str:
    """NeMo's, ``yes`` or ``no``; empty without a threshold that was measured on this model."""
    if check.tau is None or prompt.score is None:
        return ""
    return "yes" if prompt.score > check.tau else "no"


def _nearest_name(check: CopyCheck, prompt: CheckedPrompt) -> str:
    """The picture that a prompt's shown sample is nearest to; without pictures, the other sample."""
    number = int(prompt.numbers[prompt.closest])
    return str(check.names[number]) if check.names else f"seed {prompt.seeds[number]}"


def _page(check: CopyCheck, pictures: Pictures) -> Report:
    report = Report("Copy check", check.text().split("\n")[0])
    report.add_paragraph(_method(check))
    ranked = check.ranked
    scored = any(p.score is not None for p in ranked)
    labelled = any(p.label for p in ranked)
    head = ["prompt", *(["label"] if labelled else []), "copies", "95 %", "nearest", "ratio", "area"]
    head += (["nemo"] if scored else []) + (["memorized"] if check.tau is not None else [])
    rows: list[Sequence[object]] = [head]
    for p in ranked[:200]:
        i, low, high = p.closest, *p.interval
        counted = f"{p.copies} of {len(p.ratios)}" + (f" ({p.alterations})" if p.alterations else "")
        row = [p.prompt[:90], *([p.label] if labelled else []), counted, f"{low} to {high}"]
        row += [_nearest_name(check, p), f"{float(p.ratios[i]):.2f}", f"{float(p.areas[i]):.0%}"]
        row += ["" if p.score is None else f"{p.score:.3g}"] if scored else []
        rows.append([*row, _verdict(check, p)] if check.tau is not None else row)
    report.add_table(rows)
    report.add_heading("Beside each other")
    report.add_paragraph("The sample that is nearest; what of it is copied, in colour; and what it is nearest to.")
    for p in ranked[:SHOWN]:
        report.add_paragraph(f"`{p.copies} of {len(p.ratios)}` {p.prompt}")
        report.add_images(_check_pictures(check, p, pictures), WIDTH)
    return report


def _method(check: CopyCheck) -> str:
    others = "the nearest training picture" if check.names else "the nearest other sample of the same prompt"
    text = (
        f"Each prompt was sampled with {check.config.seeds} seeds from {check.config.first_seed} on. A sample is a "
        f"copy where it is nearer to {others} than a third of the distance that is usual (Gu et al. 2023), by pixels "
        "at 64 px. The ratio is that distance divided by the usual one. The area is the "
        "fraction of the picture where it is below a third."
    )
    if check.names:
        text += (
            f" Copies were looked for that are {LOOKED_FOR}; an altered one is compared after the picture is aligned."
        )
    if not check.names:
        text += " Without training pictures this says that a prompt repeats itself, not what it repeats."
    if check.tau is None:
        text += " The scores have no verdict: no threshold was calibrated for this model at this size."
    return text


def _check_pictures(check: CopyCheck, prompt: CheckedPrompt, pictures: Pictures) -> list[tuple[Image, str]]:
    i = prompt.closest
    images = [
        (_small(open_rgb(prompt.file)), f"seed {prompt.seeds[i]}, ratio {float(prompt.ratios[i]):.2f}"),
        (_small(open_rgb(prompt.overlay_file)), f"copied: {float(prompt.areas[i]):.0%}"),
    ]
    if pictures.read is not None and check.names:
        picture = _small(as_image(pictures.read(int(prompt.numbers[i]))))
        images.append((picture, f"training picture: {_nearest_name(check, prompt)}"))
    return images


# --- the LoRA report ------------------------------------------------------------------------------------------------
def write_page(
    path: Path,
    loras: Sequence[Findings],
    table: Mapping[str, Any],
    pictures: Pictures,
    runs: Sequence[TrainingRun] = (),
) -> Path:
    """The page of all LoRAs, whole or not at all.

    Args:
        table: the report as JSON: settings and what was spent.
        runs: that the LoRAs are checkpoints of; they come first.
    """
    counts = Counter(lora.worst for lora in loras)
    lead = ", ".join(f"{counts[v]} {v}" for v in (BAD, LOOK, FINE, OPEN) if counts[v])
    page = Report("LoRA report", f"{len(loras)} {'LoRA' if len(loras) == 1 else 'LoRAs'}: {lead}")
    for run in runs:
        add_run(page, run)
    page.end_opening()
    for run in runs:
        add_run_table(page, run)
    if len(loras) > 1:
        topics = [sentence.topic for sentence in loras[0].summary]
        page.add_table([["LoRA", *topics], *([x.name, *(s.verdict for s in x.summary)] for x in loras)])
    for lora in loras:
        _add_lora(page, lora, pictures)
    _add_method(page, table)
    return page.write(path)


def _add_lora(page: Report, lora: Findings, pictures: Pictures) -> None:
    page.add_heading(lora.name)
    page.add_verdicts(
        (
            s.verdict,
            f"{s.topic.capitalize()}: {s.text}",
            [s.advice and f"What to do: {s.advice}", f"Thresholds: {s.threshold}."],
        )
        for s in lora.summary
    )
    page.add_subheading("1. What it is")
    page.add_table([["", ""], *_what_rows(lora)])
    if lora.health is not None and lora.health.total:
        _add_where(page, lora)
    if lora.copies:
        _add_copies(page, lora, pictures)
    if lora.cost is not None and lora.cost.variety is not None:
        page.add_subheading("4. What it costs")
        page.add_table(_cost_rows(lora))
    if lora.neighbours is not None and lora.neighbours.alike:
        page.add_subheading("5. Its neighbours")
        page.add_paragraph("Cosine of the changes of the weights, estimated from random projections of every layer.")
        page.add_table([["LoRA", "cosine"], *([name, f"{cosine:.3f}"] for name, cosine in lora.neighbours.alike)])
    if lora.skipped:
        page.add_paragraph(f"Left out for the budget: {'; '.join(lora.skipped)}. The same call resumes here.")


def _what_rows(lora: Findings) -> list[list[str]]:
    """What a file is, as a table of two columns."""
    facts = lora.facts.to_dict()
    rows = [["file", f"{facts['file']}, {facts['bytes'] / 2**20:.2f} MiB"], ["trainer", facts["trainer"]]]
    if lora.facts.file is None:
        rows.append(["refused", facts["refused"]])
    else:
        alphas = ", ".join(f"{alpha:g}" for alpha in facts["alphas"][:6]) or "none in the file"
        more = f"; {facts['text_encoder_layers']} layers of text encoders" if facts["text_encoder_layers"] else ""
        kinds = ", ".join(f"{count} {kind}" for kind, count in facts["kinds"].items())
        rows += [
            ["base model by layers", facts["base_by_layers"] or "none that is known"],
            ["base model by header", facts["base_by_header"] or "not said"],
            ["layers", f"{facts['layers']} ({kinds}){more}"],
            ["rank; alpha", f"{', '.join(map(str, facts['ranks'][:8]))}; {alphas}"],
            ["numbers", ", ".join(facts["dtypes"])],
            ["spelling", facts["spelling"]],
        ]
        rows += [["also in the file", ", ".join(facts["left_out"])]] if facts["left_out"] else []
    rows += [["licence", facts["licence"] or "not said"]]
    words = ", ".join(facts["trigger_words"])
    rows += [["trigger words", f"{words} ({facts['trigger_words_from']})" if words else "not said"]]
    rows += [[name, value] for name, value in facts["training"].items()]
    if lora.health is not None:
        broken = {layer.problem for layer in lora.health.layers} - {""}
        rows += [
            ["broken", "; ".join(f"{len(lora.health.broken(p))} layers: {p}" for p in sorted(broken)) or "nothing"]
        ]
        rows += [["rank that is used", f"{lora.health.used:.1f}, weighed by each layer's change"]]
    for loading in lora.loadings:
        dropped = f"; dropped: {', '.join(loading.dropped)}" if loading.dropped else ""
        text = f", {loading.text} layers of text encoders" if loading.text else ""
        note = f". {loading.note}" if loading.note else ""
        rows += [[f"loaded by {loading.library}", f"{loading.loaded} of {loading.layers} layers{text}{dropped}{note}"]]
    return rows


def _add_where(page: Report, lora: Findings) -> None:
    assert lora.health is not None
    page.add_subheading("2. Where it acts")
    page.add_paragraph("Fraction of its change of the weights (sum of squares) by kind of layer, then by block.")
    page.add_bars(lora.health.fractions("kind"))
    blocks = lora.health.fractions("block")
    page.add_bars(dict(list(blocks.items())[:_MOST_BLOCKS]))
    if len(blocks) > _MOST_BLOCKS:
        page.add_paragraph(f"{len(blocks) - _MOST_BLOCKS} further blocks are in the JSON file.")
    if lora.changes:
        page.add_paragraph(
            "How far it moves the predicted clean picture, in one forward: root mean square over the prediction's "
            "standard deviation, by how much of the schedule's noise is left."
        )
        head = ["prompt", "kind", *(f"{fraction:.0%}" for fraction in SHARES)]
        rows = [[p, lora.kinds.get(p, ""), *(f"{v:.1%}" for v in row)] for p, row in lora.changes.items()]
        page.add_table([head, *rows])


def _add_copies(page: Report, lora: Findings, pictures: Pictures) -> None:
    page.add_subheading("3. What it copies")
    page.add_paragraph(
        "Distance is that of two samples of the prompt from different seeds (root mean square at 64 px, median pair). "
        "Lost is how much of it the LoRA takes: 100 % where every seed gives one picture. The ratio is the distance to "
        f"the nearest {'training picture' if lora.pictures else 'other sample'} over the usual one; below 0.33 is a "
        "copy."
    )
    head = ["prompt", "kind", "distance", "without", "lost", *(["copies"] if lora.pictures else []), "ratio", "area"]
    page.add_table([head, *(_copy_row(p) for p in lora.copies)])
    if len(lora.strengths) > 1:
        page.add_paragraph("By strength, over its captions and trigger: mean distance, and the prompt that loses most.")
        copied = any("copies" in values for values in lora.strengths.values())
        rows: list[list[str]] = [["strength", "distance", "lost", *(["copies"] if copied else [])]]
        for strength, values in lora.strengths.items():
            fraction = [f"{values['copies']:.0%}"] if copied else []
            rows.append([f"{strength:g}", f"{values['distance']:.3f}", f"{values['lost']:.0%}", *fraction])
        page.add_table(rows)
    page.add_paragraph("The nearest sample, and where: in colour below a third of the usual distance, all else dark.")
    page.add_images([entry for p in lora.own for entry in _beside(p, lora.pictures, pictures)], WIDTH)


def _copy_row(p: PromptCopies) -> list[str]:
    row = [p.prompt[:90], p.kind, f"{p.distance:.3f}", f"{p.bare:.3f}", f"{p.lost:.0%}"]
    how = f" ({p.alterations})" if p.alterations else ""
    row += [] if p.copies is None else [f"{p.copies} of {p.samples}{how}"]
    return [*row, f"{p.ratio:.2f}", f"{p.area:.0%}"]


def _beside(p: PromptCopies, names: Sequence[str], pictures: Pictures) -> list[tuple[Image, str]]:
    agrees = f"agrees: {p.area:.0%} of the picture, ratio {p.ratio:.2f}"
    shown = (p.shown, f"{p.kind}: {p.prompt[:60]}"), (overlay(p.shown, p.where), agrees)
    images = [(_small(as_image(picture)), text) for picture, text in shown]
    if p.nearest is not None and pictures.read is not None:
        images.append((_small(as_image(pictures.read(p.nearest))), f"nearest training picture: {names[p.nearest]}"))
    return images


def _cost_rows(lora: Findings) -> Sequence[Sequence[object]]:
    """What it costs, as a table."""
    assert lora.cost is not None
    rows = [["", "without the LoRA", "with it", "left"]]
    pairs = {
        "variety between seeds, own prompts": lora.cost.variety,
        "variety between seeds, ordinary prompts": lora.cost.ordinary,
    }
    rows += [
        [name, f"{a:.3f}", f"{b:.3f}", f"{b / max(a, 1e-9):.0%}"]
        for name, pair in pairs.items()
        if pair
        for a, b in [pair]
    ]
    if lora.cost.drift is not None:
        rows.append(["drift of ordinary prompts", "0", f"{lora.cost.drift:.3f}", ""])
    return rows


def _add_method(page: Report, table: Mapping[str, Any]) -> None:
    page.add_heading("How this was measured")
    settings, spent = table["settings"], table["spent"]
    if settings is None:
        page.add_paragraph("Without a model: what the files contain. Give a base model for samples and forwards.")
    else:
        page.add_paragraph(
            f"Samples of {settings['steps']} steps, {settings['seeds']} seeds from {settings['first_seed']} on, "
            f"guidance {settings['guidance']:g}, equal seeds with and without the LoRA. {spent['network_rows']} "
            "evaluations of the network in this call; what earlier calls had sampled is not counted. Distances are of "
            "pixels at 64 px; a copy is nearer than a third of the usual distance (Gu et al. 2023). With training "
            f"pictures, copies were looked for that are {LOOKED_FOR}."
        )
    rows = ([part, str(spent["network_rows_of"][part]), f"{value:.1f}"] for part, value in spent["seconds"].items())
    page.add_table([["part", "evaluations of the network", "seconds"], *rows])
