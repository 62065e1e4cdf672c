"""A copy check as files for people: one table (CSV), and one page that needs no other file (HTML)."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..io.files import write_text
from ..io.html_page import Report
from ..io.picture_files import open_rgb
from .check import SCORES, CheckedPrompt, CopyCheck, Pictures

if TYPE_CHECKING:
    from PIL.Image import Image

TABLE, PAGE = "copies.csv", "copies.html"
WIDTH = 176
"""Of a picture on the page, in CSS pixels; larger ones are scaled down to twice that."""


def write_check(folder: str | Path, check: CopyCheck, pictures: Pictures, shown: int = 50) -> tuple[Path, Path]:
    """(table, page) in the folder, whole or not at all.

    Args:
        shown: how many prompts have their pictures on the page; the table has all.
    """
    folder = Path(folder)
    return write_text(folder / TABLE, _table(check)), _page(check, pictures, shown).write(folder / PAGE)


def _table(check: CopyCheck) -> str:
    text = io.StringIO()
    written = csv.writer(text, lineterminator="\n")
    head = ["prompt", "label", "samples", "copies", "share", "share low", "share high", "nearest ratio", "seed"]
    written.writerow([*head, "nearest", "copied area", "MS-SSIM", *SCORES, "memorized", "file"])
    for p in check.prompts:
        low, high = p.interval
        i = p.closest
        numbers = [f"{p.share:.4f}", low, high, f"{float(p.ratios[i]):.4f}", p.seeds[i]]
        where = [nearest_name(check, p), f"{float(p.areas[i]):.4f}", f"{float(p.similar[i]):.4f}"]
        scores = [f"{p.scores[name]:.6g}" if name in p.scores else "" for name in SCORES]
        row = [p.prompt, p.label, len(p.ratios), p.copies, *numbers, *where, *scores, verdict(check, p), p.file.name]
        written.writerow(row)
    return text.getvalue()


def verdict(check: CopyCheck, prompt: CheckedPrompt) -> str:
    """NeMo's, ``yes`` or ``no``; empty without a threshold that was measured on this model."""
    if check.tau is None or "nemo" not in prompt.scores:
        return ""
    return "yes" if prompt.scores["nemo"] > check.tau else "no"


def nearest_name(check: CopyCheck, prompt: CheckedPrompt) -> str:
    """The picture that a prompt's shown sample is nearest to; without pictures, the other sample."""
    number = int(prompt.numbers[prompt.closest])
    return str(check.names[number]) if check.names else f"seed {prompt.seeds[number]}"


def _page(check: CopyCheck, pictures: Pictures, shown: int) -> Report:
    report = Report("Copy check", check.text().split("\n")[0])
    report.add_paragraph(_method(check))
    ranked = check.ranked
    columns = [name for name in SCORES if any(name in p.scores for p in ranked)]
    labelled = any(p.label for p in ranked)
    head = ["prompt", *(["label"] if labelled else []), "copies", "95 %", "nearest", "ratio", "area", *columns]
    rows: list[Sequence[object]] = [[*head, "memorized"] if check.tau is not None else head]
    for p in ranked[: max(shown, 200)]:
        i, low, high = p.closest, *p.interval
        row = [p.prompt[:90], *([p.label] if labelled else []), f"{p.copies} of {len(p.ratios)}", f"{low} to {high}"]
        row += [nearest_name(check, p), f"{float(p.ratios[i]):.2f}", f"{float(p.areas[i]):.0%}"]
        row += [f"{p.scores[name]:.3g}" if name in p.scores else "" for name in columns]
        rows.append([*row, verdict(check, p)] if check.tau is not None else row)
    report.add_table(rows)
    report.add_heading("Beside each other")
    report.add_paragraph("The sample that is nearest; what of it is copied, in colour; and what it is nearest to.")
    for p in ranked[:shown]:
        report.add_paragraph(f"`{p.copies} of {len(p.ratios)}` {p.prompt}")
        report.add_images(_beside(check, p, pictures), WIDTH)
    return report


def _method(check: CopyCheck) -> str:
    others = "the nearest training picture" if check.names else "the nearest other sample of the same prompt"
    text = (
        f"Each prompt was sampled with {check.config.seeds} seeds from {check.config.first_seed} on. A sample is a "
        f"copy where it is nearer to {others} than a third of the distance that is usual (Gu et al. 2023), by pixels "
        "at 64 px. The ratio is that distance divided by the usual one. The area is the "
        "fraction of the picture where it is below a third."
    )
    if not check.names:
        text += " Without training pictures this says that a prompt repeats itself, not what it repeats."
    if check.tau is None:
        text += " The scores have no verdict: no threshold was calibrated for this model at this size."
    return text


def _beside(check: CopyCheck, prompt: CheckedPrompt, pictures: Pictures) -> list[tuple[Image, str]]:
    from PIL import Image

    i = prompt.closest
    images = [(_small(open_rgb(prompt.file)), f"seed {prompt.seeds[i]}, ratio {float(prompt.ratios[i]):.2f}"),
              (_small(open_rgb(prompt.overlay_file)), f"copied: {float(prompt.areas[i]):.0%}")]  # fmt: skip
    if pictures.read is not None and check.names:
        picture = (pictures.read(int(prompt.numbers[i])).movedim(0, -1) * 255).round().byte().numpy()
        images.append((_small(Image.fromarray(picture)), f"training picture: {nearest_name(check, prompt)}"))
    return images


def _small(image: Image) -> Image:
    image.thumbnail((2 * WIDTH, 2 * WIDTH))
    return image
