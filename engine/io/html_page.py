"""A self-contained HTML page: headings, paragraphs, pictures, tables. No scripts, no links to anywhere."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .files import write_text

if TYPE_CHECKING:
    from PIL.Image import Image

_STYLE = """
:root { color-scheme: light dark; --ink: #23211f; --quiet: #77716b; --page: #faf8f5; --line: #e4dfd8; --glass: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ece8e2; --quiet: #a09a92; --page: #1b1a19; --line: #37342f; --glass: #242220; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 3rem 1.5rem 5rem; }
h1 { font: 600 2.6rem/1.1 Georgia, serif; letter-spacing: -.02em; margin: 0; }
.lead { color: var(--quiet); font-size: 1.15rem; margin: .5rem 0 2.5rem; }
h2 { font: 600 1.5rem/1.2 Georgia, serif; margin: 3rem 0 .5rem; padding-top: 1.5rem; }
h2 { border-top: 1px solid var(--line); }
p { max-width: 46rem; }
code { font-size: .9em; background: var(--line); border-radius: 3px; padding: .1em .3em; }
h3 { font: 600 1.05rem/1.3 system-ui, sans-serif; margin: 1.8rem 0 .3rem; }
nav ol { columns: 2; padding-left: 1.4rem; margin: 0; } a { color: inherit; }
@media (max-width: 40rem) { main { padding: 1.5rem 1rem 3rem; } h1 { font-size: 2rem; } nav ol { columns: 1; } }
.scroll { overflow-x: auto; } svg { max-width: 100%; height: auto; }
.case { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0; }
figure { margin: 0; max-width: 100%; background: var(--glass); border: 1px solid var(--line); border-radius: 6px; }
figure { padding: .45rem; }
img { display: block; width: 100%; border-radius: 3px; }
.pixels { image-rendering: pixelated; }
figcaption { color: var(--quiet); font-size: .75rem; line-height: 1.35; margin-top: .4rem; }
h3 { font: 600 1.1rem/1.3 Georgia, serif; margin: 2rem 0 .3rem; }
.bars { display: grid; grid-template-columns: minmax(5rem, 34%) 1fr 3.2rem; gap: .2rem .7rem; margin: 1rem 0; }
.bars { max-width: 46rem; font-size: .9rem; align-items: center; font-variant-numeric: tabular-nums; }
.bars i { display: block; height: .8rem; border-radius: 2px; background: #3f789e; min-width: 1px; }
.verdicts { display: grid; grid-template-columns: 6.8rem 1fr; gap: .9rem 1rem; margin: 1.2rem 0; max-width: 52rem; }
.verdicts b { align-self: start; text-align: center; border-radius: 4px; padding: .1rem .3rem; font-weight: 600; }
.verdicts b { color: #fff; background: #6d6760; font-size: .85rem; }
b.fine { background: #2e7d4f; } b.look { background: #96690a; } b.bad { background: #b3372b; }
.verdicts small { display: block; color: var(--quiet); }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line); }
th { color: var(--quiet); font-weight: 500; }
"""


class Report:
    """Builds a page block by block."""

    def __init__(self, title: str, lead: str = "") -> None:
        self.title, self.lead = title, lead
        self._blocks: list[str] = []
        self._headings: list[str] = []
        self._opening = 0

    def add_heading(self, text: str) -> None:
        """Start a section."""
        self._headings.append(html.escape(text))
        self._blocks.append(f'<h2 id="section-{len(self._headings)}">{html.escape(text)}</h2>')

    def add_subheading(self, text: str) -> None:
        """Start a part of a section."""
        self._blocks.append(f"<h3>{html.escape(text)}</h3>")

    def add_paragraph(self, text: str) -> None:
        """Plain text, ``code`` between backticks; markup is escaped."""
        coded = re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text))
        self._blocks.append(f"<p>{coded}</p>")

    def add_images(self, images: Iterable[tuple[Image, str]], width: int = 160) -> None:
        """A row of (PIL image, caption), each ``width`` CSS pixels wide, embedded as PNG.

        Small images are shown pixelated; images of twice that width or more, such as charts, are scaled smoothly.
        """
        figures = "".join(_figure(image, text, width) for image, text in images)
        self._blocks.append(f'<div class="case">{figures}</div>')

    def add_table(self, rows: Sequence[Sequence[object]]) -> None:
        """The first row is the head."""
        cells = [[html.escape(str(cell)) for cell in row] for row in rows]
        head = "".join(f"<th>{c}</th>" for c in cells[0])
        body = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in cells[1:])
        self._blocks.append(f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>')

    def add_bars(self, shares: Mapping[str, float]) -> None:
        """A bar for each fraction in [0, 1], scaled to the largest."""
        largest = max(shares.values(), default=0.0) or 1.0
        rows = "".join(
            f'<span>{html.escape(name)}</span><span><i style="width:{100 * max(value, 0) / largest:.1f}%"></i></span>'
            f"<span>{value:.1%}</span>"
            for name, value in shares.items()
        )
        self._blocks.append(f'<div class="bars">{rows}</div>')

    def add_verdicts(self, rows: Iterable[tuple[str, str, Sequence[str]]]) -> None:
        """Sentences with a coloured verdict: (verdict, sentence, further lines in small print).

        ``fine``, ``look`` and ``bad`` have colours; others are grey.
        """
        cells = "".join(
            f'<b class="{html.escape(verdict)}">{html.escape(verdict)}</b><div>{html.escape(sentence)}'
            + "".join(f"<small>{html.escape(line)}</small>" for line in lines if line)
            + "</div>"
            for verdict, sentence, lines in rows
        )
        self._blocks.append(f'<div class="verdicts">{cells}</div>')

    def end_opening(self) -> None:
        """What was added so far comes before the contents."""
        self._opening = len(self._blocks)

    def add_drawing(self, markup: str) -> None:
        """Markup such as SVG, unchanged: the caller escapes its text."""
        self._blocks.append(markup)

    def to_html(self) -> str:
        """The whole page."""
        title, lead = html.escape(self.title), html.escape(self.lead)
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<style>{_STYLE}</style><main><h1>{title}</h1><p class="lead">{lead}</p>'
            + "".join(self._blocks[: self._opening])
            + self._contents()
            + "".join(self._blocks[self._opening :])
            + "</main></html>"
        )

    def _contents(self) -> str:
        """Links to the sections, if there are several."""
        links = (f'<li><a href="#section-{i}">{text}</a></li>' for i, text in enumerate(self._headings, 1))
        return f"<nav><ol>{''.join(links)}</ol></nav>" if len(self._headings) > 2 else ""

    def write(self, path: str | Path) -> Path:
        """Write the page atomically."""
        return write_text(path, self.to_html())


def _figure(image: Image, text: str, width: int) -> str:
    text, kind = html.escape(text), ' class="pixels"' if image.width < 2 * width else ""
    caption = f"<figcaption>{text}</figcaption>" if text else ""
    return (
        f'<figure style="width:{width + 16}px"><img{kind} alt="{text}" src="{inline_picture(image)}">{caption}</figure>'
    )


def inline_picture(image: Image) -> str:
    """The image as a ``data:`` URL, PNG."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
