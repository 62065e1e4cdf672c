# ruff: noqa: E501 - lines of the page
"""``docs/machine.md``: written from the table's promises and the figures last measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import measure
from .calls import CALLS
from .modes import MODES, pairs
from .table import BUDGETS, DTYPES_OF_FORWARDS, LEFT_OUT, STOCK, bound, equal, promised

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "machine.md"

HEAD = """# On your machine

Which call works in which precision, where, and what it costs a device in waits. **This page is written by the tests**
(`VITRINE_WRITE_DOCS=1 VITRINE_MACHINE=full pytest tests/machine`), which check every cell; `pytest tests/machine` runs a cut
through the table in five minutes of one core. They use real diffusers and transformers classes at small size, and a
pretended accelerator (`tests/machine/pretend.py`). It refuses tensors of two devices in one operation and float64, and counts waits and
uploads with the line that asked. What it cannot show: speed, memory of the device, kernels of a real one.
"""

PRECISION = """
## Half precision

`from_pretrained(..., torch_dtype=torch.float16)` or `bfloat16`, everything in that precision. The figure is the largest error of
any result against float32, relative in the Euclidean norm; in brackets the bound that a test checks.
"""

FORWARDS = """
One forward of the other families, tiny networks of diffusers' own classes:
"""

PLACING = """
## Devices and offloading

Each call once under each of diffusers' ways to distribute a pipeline over devices. `✓`: the result of the plain pipeline, and every module where it was, in its
precision, when the call has ended. In float32 results agree to {equal:g}; to {rank:g} for `rank`, whose probes magnify rounding; to {labels:g} for `segmentation`, two pixels on an edge.
*Refused* and – have their reasons below; "not run yet" waits for the run of the night. *Device* has no float64, as Apple's MPS. *Model*, *sequential*: `enable_model_cpu_offload`, `enable_sequential_cpu_offload`.
*Leaves*, *blocks*: `enable_group_offload`. *Sliced*: VAE slicing and tiling, attention slicing. *LoRA*: a PEFT adapter in the
network. *Compiled*: `unet.compile()` in place.
The full run has each call in float16 under *model* and *sequential* as well, within the bounds of the table above.
"""

WAITS = """
## Waiting for the device

Each wait of the host (`.item()`, `.cpu()`, an index by a mask) stops the device; each upload costs a transfer. Counted a sampling or
training step beyond what the scheduler does itself in the stock pipeline; a forward; or a call, beyond its inputs and results.
"""

UNMEASURED = "not run yet"
"""Of rows that were added since the night's run."""

SHORT = {
    "on the device": "device",
    "model offload": "model",
    "sequential offload": "sequential",
    "groups, leaves": "leaves",
    "groups, blocks": "blocks",
    "slicing, tiling": "sliced",
    "LoRA loaded": "LoRA",
    "compiled": "compiled",
}
FAMILIES = {"sd": "SD", "sdxl": "SDXL", "pixart": "PixArt", "pixart-1024": "PixArt 1024", "sd3": "SD3", "flux": "Flux"}
FAMILIES |= {
    "z_image": "Z-Image",
    "klein": "Klein",
    "wan": "Wan",
    "qwen_image": "Qwen-Image",
    "krea2": "Krea 2",
    "lumina2": "Lumina 2",
    "chroma": "Chroma",
    "anima": "Anima",
    "flux2": "Flux.2",
}


def render(figures: dict[str, dict[str, Any]]) -> str:
    """The page for these figures."""
    head = PLACING.format(equal=equal("tap"), rank=equal("rank"), labels=equal("segmentation"))
    return "\n".join(
        [
            HEAD,
            PRECISION,
            *_precision(figures),
            FORWARDS,
            *_forwards(figures),
            head,
            *_placing(figures),
            *_left_out(),
            WAITS,
            *_waits(figures),
            "",
        ]
    )


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


def _precision(figures: dict[str, dict[str, Any]]) -> list[str]:
    rows = []
    for name, family in pairs():
        row = f"{name} {family}"
        cells = []
        for dtype in ("fp16", "bf16"):
            if not promised(name, family, dtype):
                cells.append("–")
                continue
            figure = figures.get(row, {}).get(dtype)
            if figure is None:
                cells.append(UNMEASURED)
                continue
            cells.append(f"{figure:.1g} ({bound(name, dtype):g})")
        rows.append([f"`{name}`", FAMILIES[family], *cells])
    return _table(["call", "family", "fp16", "bf16"], rows)


def _forwards(figures: dict[str, dict[str, Any]]) -> list[str]:
    names = sorted(row.removeprefix("forward ") for row in figures if row.startswith("forward "))
    rows = [
        [name, *(f"{figures[f'forward {name}'][d]:.1g} ({most:g})" for d, (_, most) in DTYPES_OF_FORWARDS.items())]
        for name in names
    ]
    return _table(["family", *DTYPES_OF_FORWARDS], rows)


def _placing(figures: dict[str, dict[str, Any]]) -> list[str]:
    rows = []
    for name, family in pairs():
        row = f"{name} {family}"
        cells = []
        for mode in MODES:
            if not promised(name, family, mode):
                cells.append("refused" if (name, mode) in LEFT_OUT else "–")
            elif mode not in figures.get(row, {}):
                cells.append(UNMEASURED)
            else:
                cells.append("✓")
        rows.append([f"`{name}`", FAMILIES[family], *cells])
    return _table(["call", "family", *(SHORT[mode] for mode in MODES)], rows)


def _left_out() -> list[str]:
    reasons: dict[str, list[str]] = {}
    for (name, family, column), reason in STOCK.items():
        reasons.setdefault(reason, []).append(f"`{name}` {FAMILIES[family]} {SHORT.get(column, column)}")
    for (name, mode), reason in LEFT_OUT.items():
        reasons.setdefault(reason, []).append(f"`{name}` {SHORT.get(mode, mode)}")
    return [
        "",
        *(f"- {reason[0].upper()}{reason[1:]}. These: {', '.join(cells)}." for reason, cells in reasons.items()),
    ]


def _waits(figures: dict[str, dict[str, Any]]) -> list[str]:
    rows = []
    for name, family in pairs(*(n for n in CALLS if n in BUDGETS)):
        row, (unit, syncs, uploads) = f"{name} {family}", BUDGETS[name]
        measured = figures.get(row, {}).get("traffic")
        shown = UNMEASURED if measured is None else ", ".join(f"{value:.3g}" for value in measured)
        rows.append([f"`{name}`", FAMILIES[family], unit, shown, f"{syncs:g}, {uploads:g}"])
    header = ["call", "family", "a", "waits, uploads", "most"]
    return _table(header, rows)


def write() -> None:
    """Write figures and page."""
    measure.write()
    PAGE.write_text(render(measure.known()), encoding="utf-8")
