"""One training run on a page: the verdict, one drawing of its checkpoints, and the table."""

from __future__ import annotations

import html
from collections.abc import Sequence

from ..io.html_page import Report
from .training_runs import LEARNS, TURNS, WANDERS, Checkpoint, TrainingRun

_WIDE, _LEFT, _RIGHT = 440, 12, 12
"""Of the drawing, in its units; text of 13 units is legible at 370 and at 530 CSS pixels."""
_BARS, _CELLS, _LINES = 110, 26, 80
"""Heights of the parts."""
_MOST_COUNTS = 14
"""Checkpoints whose bars and cells have numbers."""
LEARNING, SLOW, WANDERING, BACK = "#2e7d4f", "#b8860b", "#8b857d", "#b3372b"
_COPIES, _CLEAN = "#b3372b", "#2e7d4f"
_RULE = (
    f"The rule: from a cosine of {LEARNS} on a stretch goes the way of the one before, below {WANDERS} it does not, "
    f"below {TURNS} it turns back. It wanders from the step after which every stretch is below {WANDERS}, two or more "
    "of them. It holds within one run whose checkpoints are evenly spaced: longer stretches and larger batches give "
    "larger cosines. It says when the weights stop learning, not which picture is nicer."
)


def add_run(page: Report, run: TrainingRun) -> None:
    """The verdict and the drawing, for the top of a page."""
    page.add_heading(f"{run.name}: a run of {len(run.checkpoints)} checkpoints")
    page.add_verdicts([(run.verdict, f"{run.headline}. {run.text} {run.measured}", [])])
    page.add_drawing(drawing(run))


def add_run_table(page: Report, run: TrainingRun) -> None:
    """The numbers, and the rule that made the verdict."""
    page.add_heading(f"{run.name}: the checkpoints in numbers")
    page.add_paragraph(_RULE)
    head = ["step", "size", "stretch", "same way", "to the last", *(["copies", "agreement"] if run.copies else [])]
    page.add_table([head, *(_row(run, i, point) for i, point in enumerate(run.checkpoints))])


def _row(run: TrainingRun, i: int, point: Checkpoint) -> list[str]:
    numbers = (point.size, point.stretch, point.cosine, point.to_last)
    cells = [point.label, *("" if value is None else f"{value:.3g}" for value in numbers)]
    cells[3] = "" if point.cosine is None else f"{point.cosine:.2f}"
    copies = run.copies[i] if run.copies else None
    if not run.copies:
        return cells
    if copies is None:
        return [*cells, "not measured", ""]
    counted = "" if copies.copies is None else f"{copies.copies} of {copies.samples}"
    return [*cells, counted, f"{copies.agreement:.0%}"]


def drawing(run: TrainingRun) -> str:
    """SVG: a bar for each stretch, what each checkpoint copies, and size and distance to the last as lines."""
    count = len(run.checkpoints)
    step = (_WIDE - _LEFT - _RIGHT) / count
    middles = [_LEFT + step * (i + 0.5) for i in range(count)]
    parts, top = [], 18.0
    if run.suggested is not None:
        x = middles[run.suggested]
        anchor = "start" if x < 60 else "end" if x > _WIDE - 60 else "middle"
        parts.append(_text(x, 12, "▼ try this first", anchor, 'font-weight="700"'))
        top += 6
    begin = top
    parts.append(_text(_LEFT, top + 12, "Does it still go the same way?", extra='class="part"'))
    marks, top = _bars(run.checkpoints, middles, step, top + 20)
    parts += marks
    if run.copies:
        title = "Samples that copy a training picture" if run.copies_counted else "How alike samples of a prompt are"
        parts.append(_text(_LEFT, top + 12, title, extra='class="part"'))
        marks, top = _cells(run, middles, step, top + 18)
        parts += marks
    marks, top = _curves(run.checkpoints, middles, top)
    parts += marks
    parts += _labels(run.checkpoints, middles, top + 14)
    tall = top + 36
    if run.suggested is not None:
        x = middles[run.suggested] - step / 2
        parts.insert(0, _box(x, begin - 4, step, top - begin + 8, 'class="band"'))
    style = (
        ".run { width: 100%; max-width: 33rem; display: block; margin: 1rem 0; font: 13px system-ui, sans-serif; }"
        ".run text { fill: var(--ink); } .run .quiet { fill: var(--quiet); font-size: 11px; }"
        ".run .part { font-weight: 600; } .run .band { fill: var(--line); opacity: .6; }"
        ".run .line { stroke: var(--line); } .run .on { fill: #fff; font-size: 11px; font-weight: 600; }"
    )
    label = html.escape(f"{run.headline}. {run.text}", quote=True)
    head = f'<svg class="run" viewBox="0 0 {_WIDE} {tall:.0f}" role="img" aria-label="{label}">'
    return f"<style>{style}</style>{head}{''.join(parts)}</svg>"


def _text(x: float, y: float, text: str, anchor: str = "start", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {extra}>{html.escape(text)}</text>'


def _box(x: float, y: float, wide: float, tall: float, extra: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}" {extra}/>'


def _bars(points: Sequence[Checkpoint], middles: Sequence[float], step: float, top: float) -> tuple[list[str], float]:
    """Bars of the cosines around a line of zero, and where they end."""
    values = [point.cosine for point in points if point.cosine is not None]
    low, high = min(0.0, *values, 0.0), max(1.5 * LEARNS, *values, 0.0)
    scale = _BARS / (high - low)
    zero = top + high * scale
    parts = [f'<line x1="{_LEFT}" x2="{_WIDE - _RIGHT}" y1="{zero:.1f}" y2="{zero:.1f}" class="line"/>']
    wide = max(1.5, min(0.72 * step, 46))
    for x, point in zip(middles, points, strict=True):
        value = point.cosine
        if value is None:
            continue
        color = LEARNING if value >= LEARNS else SLOW if value >= WANDERS else WANDERING if value > TURNS else BACK
        tall = max(abs(value) * scale, 2.0)
        y = zero - tall if value >= 0 else zero
        parts.append(
            f'<rect x="{x - wide / 2:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}" fill="{color}"/>'
        )
        if len(points) <= _MOST_COUNTS:
            inside = tall > 18
            at = y + 13 if inside and value >= 0 else y + tall - 5 if inside else y - 3 if value >= 0 else y + tall + 11
            parts.append(_text(x, at, f"{value:.2f}"[value >= 0 :], "middle", f'class="{"on" if inside else "quiet"}"'))
    end = top + _BARS
    quiet = 'class="quiet"'
    for x, color, word in (
        (_LEFT, LEARNING, "yes"),
        (62, SLOW, "hardly"),
        (128, WANDERING, "no: it wanders"),
        (236, BACK, "it turns back"),
    ):
        parts.append(_box(x, end + 8, 9, 9, f'fill="{color}"'))
        parts.append(_text(x + 13, end + 16, word, extra=quiet))
    return parts, end + 26


def _cells(run: TrainingRun, middles: Sequence[float], step: float, top: float) -> tuple[list[str], float]:
    """A coloured cell for each checkpoint: how many samples copy, or how much samples agree."""
    parts, wide = [], max(1.5, 0.86 * step)
    for x, row in zip(middles, run.copies, strict=True):
        if row is None:
            continue
        color = _COPIES if row.copied else SLOW if row.copies else _CLEAN
        parts.append(_box(x - wide / 2, top, wide, _CELLS, f'fill="{color}"'))
        if len(middles) <= _MOST_COUNTS:
            text = f"{row.agreement:.0%}" if row.copies is None else f"{row.copies}/{row.samples}"
            parts.append(_text(x, top + 17, text, "middle", 'class="on"'))
    return parts, top + _CELLS + 8


def _curves(points: Sequence[Checkpoint], middles: Sequence[float], top: float) -> tuple[list[str], float]:
    """Size and distance to the last, over the largest of both."""
    curves = (
        ("Size", "var(--ink)", [point.size for point in points], ""),
        ("distance to the last", "#3f789e", [point.to_last for point in points], "5 3"),
    )
    # a whole model's size hardly changes: each curve has its own scale
    parts, x = [], _LEFT
    for name, color, values, dashes in curves:
        parts.append(
            f'<line x1="{x}" x2="{x + 18}" y1="{top + 9}" y2="{top + 9}" stroke="{color}" stroke-width="2.5" '
            f'stroke-dasharray="{dashes}"/>'
        )
        parts.append(_text(x + 23, top + 13, name, extra='class="part"'))
        x += 70
        largest = max(values) or 1.0
        places = " ".join(
            f"{at:.1f},{top + 22 + _LINES * (1 - value / largest):.1f}"
            for at, value in zip(middles, values, strict=True)
        )
        parts.append(
            f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="2.5" stroke-dasharray="{dashes}"/>'
        )
    return parts, top + 22 + _LINES


def _labels(points: Sequence[Checkpoint], middles: Sequence[float], y: float) -> list[str]:
    """Steps below the drawing, as many as have room."""
    room = max(2, int((_WIDE - _LEFT - _RIGHT) / (8 * max(len(point.label) for point in points) + 10)))
    every = -(-len(points) // room)
    last = len(points) - 1
    shown = [i for i in range(len(points)) if i == last or (i % every == 0 and last - i >= every)]
    labels = [_text(middles[i], y, points[i].label, "middle") for i in shown]
    return [*labels, _text(_WIDE / 2, y + 16, "step", "middle", 'class="quiet"')]
