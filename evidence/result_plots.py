"""A claim's arms as dots with intervals, in SVG: shapes and colours mark the role of an arm; dark and light themes."""

from __future__ import annotations

import html
import math
from typing import Any

from .registry import OURS, REFERENCE, RIVAL, TRIVIAL

WIDTH, LEFT, RIGHT, ROW, TOP = 480, 16, 464, 44, 30
"""Pixels. Names are above their dots' lines, so that the plot is readable at a width of 360 pixels."""
SHAPES = {OURS: "circle", RIVAL: "diamond", TRIVIAL: "cross", REFERENCE: "square"}
LEGEND = {OURS: "ours", RIVAL: "other method", TRIVIAL: "trivial baseline", REFERENCE: "reference"}
# Okabe and Ito's colours, distinguishable for colour-blind readers; contrast of at least 3:1 on both backgrounds
STYLE = """
svg { --ground: #ffffff; --ink: #23211f; --quiet: #6b6560; --line: #d9d4cd;
  --ours: #0072b2; --rival: #c44e00; --trivial: #6b6560; --reference: #00785a; }
@media (prefers-color-scheme: dark) { svg { --ground: #1b1a19; --ink: #ece8e2; --quiet: #a8a29a; --line: #454039;
  --ours: #56b4e9; --rival: #e69f00; --trivial: #a8a29a; --reference: #2cc29a; } }
text { font: 13px system-ui, sans-serif; fill: var(--ink); } .quiet { fill: var(--quiet); font-size: 12px; }
.ours { fill: var(--ours); stroke: var(--ours); } .rival { fill: var(--rival); stroke: var(--rival); }
.reference { fill: var(--reference); stroke: var(--reference); }
.trivial { fill: none; stroke: var(--trivial); }
""".replace("\n", " ")


def number(value: float | int | None) -> str:
    """A number as in the JSON file."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def shown(value: float | None, interval: Any) -> str:
    """``0.709 (0.662 to 0.757)``."""
    return number(value) + (f" ({number(interval[0])} to {number(interval[1])})" if interval else "")


def arms_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Ours, then every baseline."""
    ours = {"name": "ours", "role": OURS, "value": result["ours"], "interval": result["interval"]}
    return [ours, *result["baselines"]]


def dot_plot(result: dict[str, Any]) -> str:
    """The SVG of a result's arms, with its own background."""
    arms = [arm for arm in arms_of(result) if arm["value"] is not None]
    low, high = _range(arms)
    bottom = TOP + ROW * len(arms) + 6

    def x(value: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * (value - low) / (high - low), 1)

    parts = [f'<text class="quiet" x="{LEFT}" y="18">{html.escape(_axis_title(result))}</text>']
    for tick in ticks(low, high):
        parts.append(f'<path d="M{x(tick)} {TOP}V{bottom}" stroke="var(--line)"/>')
        parts.append(f'<text class="quiet" x="{x(tick)}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    for i, arm in enumerate(arms):
        parts += _arm(arm, TOP + ROW * i, x)
    place, present = LEFT, [role for role in SHAPES if any(arm["role"] == role for arm in arms)]
    for role in present:
        parts.append(_mark(role, place + 6, bottom + 34))
        parts.append(f'<text class="quiet" x="{place + 16}" y="{bottom + 38}">{LEGEND[role]}</text>')
        place += 34 + 7 * len(LEGEND[role])
    height, label = bottom + 48, html.escape(f"{result['title']}: {_axis_title(result)}", quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{label}"><style>{STYLE}</style>'
        f'<rect width="{WIDTH}" height="{height}" fill="var(--ground)"/>{"".join(parts)}</svg>\n'
    )


def _axis_title(result: dict[str, Any]) -> str:
    return result["metric"] + (f" ({result['better']} is better)" if result["better"] else "")


def _arm(arm: dict[str, Any], y: int, x: Any) -> list[str]:
    """Name and figure above a line with the interval and the dot."""
    role, line = arm["role"], y + 27
    parts = [
        f'<text x="{LEFT}" y="{y + 14}">{html.escape(arm["name"])}</text>',
        f'<text x="{RIGHT}" y="{y + 14}" text-anchor="end">{number(arm["value"])}</text>',
        f'<path stroke="var(--line)" d="M{LEFT} {line}H{RIGHT}"/>',
    ]
    if arm["interval"]:
        ends = [x(v) for v in arm["interval"]]
        parts.append(f'<path class="{role}" stroke-width="2" d="M{ends[0]} {line}H{ends[1]}"/>')
    return [*parts, _mark(role, x(arm["value"]), line)]


def _mark(role: str, x: float, y: float) -> str:
    if SHAPES[role] == "circle":
        return f'<circle class="{role}" cx="{x}" cy="{y}" r="5.5"/>'
    shapes = {"diamond": "m0 -6l6 6l-6 6l-6 -6z", "square": "m-4.5 -4.5h9v9h-9z", "cross": "m-5 -5l10 10m0 -10l-10 10"}
    return f'<path class="{role}" stroke-width="2" d="M{x} {y}{shapes[SHAPES[role]]}"/>'


def _range(arms: list[dict[str, Any]]) -> tuple[float, float]:
    values = [v for arm in arms for v in (arm["value"], *(arm["interval"] or ()))]
    low, high = min(values), max(values)
    pad = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return (0.0 if 0 <= low < 0.35 * high else low - pad), high + pad


def ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers inside."""
    step = 10 ** math.floor(math.log10(high - low))
    step = next(step * f for f in (2, 1, 0.5, 0.2, 0.1) if (high - low) / (step * f) >= 3)
    return [round(step * i, 10) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
