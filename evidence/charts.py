"""Line charts of reports and claims, drawn with matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..engine.errors import refuse

if TYPE_CHECKING:
    from PIL.Image import Image

WIDTH = 560
"""CSS size of a chart; it is rendered at twice that many pixels."""
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#555555")
"""Okabe and Ito's colours, distinguishable for colour-blind readers."""
MARKED = 24
"""Lines of more points have no markers."""
Points = Sequence[tuple[float, float]]


def line_chart(series: Mapping[str, Points], title: str, x_label: str, y_label: str) -> Image:
    """One line per series of (x, y) points, 1120 x 640 pixels; the legend is below the axes."""
    from matplotlib.figure import Figure
    from PIL import Image

    points = [point for line in series.values() for point in line]
    if not points or not all(math.isfinite(value) for point in points for value in point):
        raise refuse("chart", f"{len(points)} points", "finite points", "leave out what could not be measured")
    figure = Figure(figsize=(WIDTH / 80, 4), dpi=160, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    for i, (name, line) in enumerate(series.items()):
        marker = "o" if len(line) <= MARKED else ""
        axes.plot(*zip(*line, strict=True), marker=marker, markersize=4, color=COLORS[i % len(COLORS)], label=name)
    axes.set_title(title, fontsize=12)
    axes.set_xlabel(x_label, fontsize=11)
    axes.set_ylabel(y_label, fontsize=11)
    axes.grid(color="#e4e4e4")
    axes.spines[["top", "right"]].set_visible(False)
    if any(series):
        figure.legend(loc="outside lower center", ncols=min(3, len(series)), fontsize=10, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return Image.open(buffer).convert("RGB")
