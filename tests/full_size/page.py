# ruff: noqa: E501 - lines of the page
"""``docs/full_size.md``: what ran on the full-size checkpoints, and what it took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import measure
from .pipeline_cases import CASES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "full_size.md"
DOORS = {
    "diffusers": "Pipelines",
    "own": "Templates on your model, as they are",
}
FAMILIES = {"sd15": "SD1.5", "sdxl": "SDXL"}

HEAD = """# At full size

Pipelines, and the templates "(your checkpoint)" in ComfyUI, on single-file checkpoints of full size: SD1.5 (2.1 GB, 1130 tensors) and
SDXL (6.9 GB, 2514 tensors). The layout is that of the models' authors; the **random float16 weights** are written by the tests. This
shows names, shapes, sizes, precision and memory of what people load. It cannot show pictures: random weights give noise.
**This page is written by the tests**, the nightly lane:

```bash
VITRINE_FULL_SIZE=1 VITRINE_WRITE_DOCS=1 pytest tests/full_size          # both; an hour or two on one CPU core
VITRINE_FULL_SIZE=sd15 pytest tests/full_size                             # 6 GB of memory; sdxl: 14 GB
```

The files are written once, below `~/.cache/vitrine-full-size` or `$VITRINE_FULL_SIZE_DIR`; ComfyUI is needed (`$COMFYUI_PATH`), for its
networks say which tensors a checkpoint has and its folder has CLIP's vocabulary. Nothing is downloaded. Names and shapes of both files are
those of the authors' layout; both libraries read every tensor of either file and miss none (`test_checkpoint.py`), and their taps are
compared with each other (`test_doors.py`). A dash marks what is run on the other family alone. "Not run yet" marks a case that was added since the last run.

Seconds and peak memory of the process (mapped files included) of each run: few steps, pictures of 96 px (`$VITRINE_FULL_SIZE_SIDE` for others),
one CPU thread on a busy machine. SD1.5's UNet is kept in float32, as ComfyUI does on a CPU, SDXL's in float16 and computed in
float32 (ComfyUI's `--fp16-unet`, diffusers' `enable_layerwise_casting`).
"""


def render(figures: dict[str, Any]) -> str:
    """The page for these figures."""
    parts = [HEAD]
    for door, title in DOORS.items():
        named = {name for name, _ in CASES} if door == "diffusers" else set()
        rows = sorted(named | {key.split(" | ")[1] for key in figures if key.startswith(door)})
        header = [title, *(f"{name}: s, GiB" for name in FAMILIES.values())]
        table = [header, ["---"] * 3, *([f"`{r}`", *(_cell(figures, door, r, f) for f in FAMILIES)] for r in rows)]
        parts += ["", *(f"| {' | '.join(row)} |" for row in table)]
    return "\n".join([*parts, ""])


def _cell(figures: dict[str, Any], door: str, row: str, family: str) -> str:
    found = figures.get(f"{door} | {row} | {family}")
    if found is None:
        return "not run yet" if (row, family) in CASES else "–"
    return f"{found[0]:g}, {found[1] / 1024:.1f}"


def write() -> None:
    """Write figures and page."""
    PAGE.write_text(render(measure.write()), encoding="utf-8")
