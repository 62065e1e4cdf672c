"""A space's map as a self-contained HTML page, and as an image for ComfyUI."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ...errors import refuse
from ...io.html_page import Report, inline_picture
from ..space.delta_space import Space, member_names
from ..space.directions import listed, reach
from ..space.map_layout import NEIGHBOURS, SpaceMap, neighbours_of

if TYPE_CHECKING:
    from PIL.Image import Image

SHOWN = 1500
"""Most models on a page or image; larger spaces are subsampled evenly."""
_LOW, _MIDDLE, _HIGH, _UNKNOWN = (46, 98, 150), (214, 208, 198), (196, 92, 40), (150, 150, 150)
_SIDE, _MARGIN = 900, 40
_STYLE = """<style>.map label { display: inline-block; margin: .1rem .6rem .1rem .15rem; font-size: .85rem; }
.map svg { width: 100%; background: var(--glass); border: 1px solid var(--line); border-radius: 6px; }
.map .m:hover { stroke: var(--ink); stroke-width: 3; } tr:target { background: var(--line); }
.near { font-size: .85rem; } .near a, .map a { color: inherit; }"""


def map_page(space: Space, layout: SpaceMap, thumbnails: Mapping[str, Image] | None = None) -> Report:
    """The page: a point or thumbnail per model, coloured by a selectable label, with neighbours and distances.

    Hovering shows a model's name, scores and neighbours; clicking leads to its table row. No scripts.

    Args:
        thumbnails: model name -> image.
    """
    names, chosen = member_names(space), _spread_over(len(layout.coordinates))
    page = Report("A space of models", contents(space).splitlines()[0])
    page.add_paragraph(quality_of(layout))
    if len(chosen) < len(names):
        page.add_paragraph(f"{len(chosen)} of {len(names)} models are shown, evenly sampled.")
    near = neighbours_of(space, NEIGHBOURS, chosen)
    # radio buttons, one per label, and the SVG whose colours they select
    labels, thumbnails = list(_known(layout)), thumbnails or {}
    columns = [_colours(layout, label) for label in labels]
    buttons, rules = [], [_STYLE, ".map .m { fill: #2e6296; }"]
    for n, label in enumerate(labels):
        checked = " checked" if n == 0 else ""
        buttons.append(f'<input type="radio" name="by" id="by{n}"{checked}>')
        buttons.append(f'<label for="by{n}">{html.escape(label)}</label>')
        rules.append(f"#by{n}:checked ~ svg .m {{ fill: var(--c{n}); }}")
    marks = []
    for i in chosen:
        x, y = _to_page(layout.coordinates[i].tolist())
        colours = ";".join("--c{}:#{:02x}{:02x}{:02x}".format(n, *column[i]) for n, column in enumerate(columns))
        scores = ", ".join(f"{k} {v[i]:+.1f}" for k, v in _known(layout).items() if v[i] == v[i])
        hint = f"{names[i]}\nnear {', '.join(f'{name} {d:.2f}' for name, d in near[i][:3])}\n{scores}"
        shape = f'<circle class="m" cx="{x:.1f}" cy="{y:.1f}" r="5" style="{colours}"/>'
        if names[i] in thumbnails:
            shape = f'<rect class="m" x="{x - 18:.1f}" y="{y - 18:.1f}" width="36" height="36" style="{colours}"/>'
            small = thumbnails[names[i]].convert("RGB").resize((48, 48))
            shape += f'<image x="{x - 15:.1f}" y="{y - 15:.1f}" width="30" height="30" href="{inline_picture(small)}"/>'
        marks.append(f'<a href="#m{i}">{shape}<title>{html.escape(hint)}</title></a>')
    drawing = f'<svg viewBox="0 0 {_SIDE} {_SIDE}" role="img">{"".join(marks)}</svg>'
    page.add_drawing(f'<div class="map">{"".join(rules)}</style>{"".join(buttons)}{drawing}</div>')
    page.add_heading("Neighbours")
    page.add_paragraph("Neighbours in the space, not on the page. 1.00 is the median distance of two models.")
    page.add_drawing(_neighbours(names, near, chosen))
    if space.directions:
        page.add_heading("Labels")
        rows = [(k, f"{v[~v.isnan()].min():+.1f}", f"{v[~v.isnan()].max():+.1f}") for k, v in _known(layout).items()]
        page.add_table([("label", "lowest", "highest"), *rows])
    return page


def contents(space: Space) -> str:
    """Describes a space: models, components, explained variance, and the range of each direction."""
    known = int((space.deviations > 0).sum())
    variance = f"{float(space.explained.double().sum()):.1%} of the variance"
    spread = (
        "their spread unknown"
        if not known
        else f"with {variance}"
        if known == space.dimension
        else (f"the first {known} with {variance}, the others unknown")
    )
    models = f"{space.count} models" if known else "an unknown number of models"
    lines = [f"{models}, {space.dimension} components {spread}, {space.mode}"]
    lines += [f"{label}: training models reach {reach(space, d):.1f}" for label, d in listed(space).items()]
    return "\n".join(lines)


def quality_of(layout: SpaceMap) -> str:
    """How faithful the map is, in words."""
    how = {"neighbours": "laid out by neighbours (t-SNE)", "components": "the first two principal components"}
    return (
        f"{how.get(layout.method, layout.method)}: {layout.kept:.0%} of each model's {NEIGHBOURS} nearest in the space "
        f"are nearest here too, by chance {layout.chance:.0%}. Distances across the page mean little."
    )


def map_picture(
    layout: SpaceMap, label: str = "", marked: Sequence[tuple[float, float]] = (), side: int = 768
) -> Image:
    """The map as a square image, points coloured by a label's scores; ``marked`` positions have a ring."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (side, side), "white")
    draw, scale = ImageDraw.Draw(picture), side / _SIDE
    colours = _colours(layout, label) if label else [_LOW] * len(layout.coordinates)
    for i in _spread_over(len(layout.coordinates)):
        x, y = (scale * v for v in _to_page(layout.coordinates[i].tolist()))
        draw.ellipse([x - 4, y - 4, x + 4, y + 4], fill=colours[i])
    for point in marked:
        x, y = (scale * v for v in _to_page(point))
        draw.ellipse([x - 11, y - 11, x + 11, y + 11], outline="black", width=3)
    draw.text((8, 8), label and f"{label}: low blue, high orange", fill="black")
    return picture


def _spread_over(count: int) -> list[int]:
    return torch.linspace(0, count - 1, min(count, SHOWN)).round().long().tolist()


def _to_page(point: Sequence[float]) -> tuple[float, float]:
    half = _SIDE / 2
    return half + point[0] * (half - _MARGIN), half - point[1] * (half - _MARGIN)


def _known(layout: SpaceMap) -> dict[str, torch.Tensor]:
    return {label: column for label, column in sorted(layout.labels.items()) if bool((~column.isnan()).any())}


def _colours(layout: SpaceMap, label: str) -> list[tuple[int, int, int]]:
    """Blue to orange from the 5th to the 95th percentile; grey where unknown."""
    if label not in layout.labels:
        raise refuse("label", label, sorted(layout.labels), "choose one of these, or leave it empty")
    column = layout.labels[label].float()
    known = column[~column.isnan()]
    if not len(known):
        return [_UNKNOWN] * len(column)
    low, high = torch.quantile(known, torch.tensor([0.05, 0.95])).tolist()
    levels = ((column - low) / max(high - low, 1e-12)).clamp(0, 1).tolist()
    return [_UNKNOWN if t != t else _between(t) for t in levels]


def _between(t: float) -> tuple[int, int, int]:
    ends, t = ((_LOW, _MIDDLE), 2 * t) if t < 0.5 else ((_MIDDLE, _HIGH), 2 * t - 1)
    r, g, b = (round(a + t * (z - a)) for a, z in zip(*ends, strict=True))
    return r, g, b


def _neighbours(names: Sequence[str], near: dict[int, list[tuple[str, float]]], chosen: list[int]) -> str:
    numbers, shown, rows = {name: i for i, name in enumerate(names)}, set(chosen), []
    for i in chosen:
        cells = []
        for name, distance in near[i]:
            text, j = f"{html.escape(name)} {distance:.2f}", numbers[name]
            cells.append(f'<a href="#m{j}">{text}</a>' if j in shown else text)
        rows.append(f'<tr id="m{i}"><td>{html.escape(names[i])}</td><td>{", ".join(cells)}</td></tr>')
    return f'<table class="near"><tr><th>model</th><th>nearest</th></tr>{"".join(rows)}</table>'
