# ruff: noqa: E501 - lines of the page
"""``docs/full_size.md``: what ran on the full-size checkpoints, and what it took."""

from __future__ import annotations

from typing import Any

from . import measure
from .notes import NAMES, ROOT, families_of
from .pipeline_cases import CASES

PAGE = ROOT / "docs" / "full_size.md"
DOORS = {
    "ComfyUI": "Nodes in ComfyUI",
    "diffusers": "Pipelines",
    "note": "Workflows, changed as their notes say",
    "own": "Templates on your model, as they are",
}
FAMILIES = {"sd15": "SD1.5", "sdxl": "SDXL"}
REFUSED = {
    ("ComfyUI", "VitrineApplyGammaSchedule", "sd15"): "refused: it takes no size",
    ("ComfyUI", "VitrineEMDDistill", "sdxl"): "SD1.x only",
}

HEAD = """# At full size

Nodes, pipelines and the notes "Your own model" on single-file checkpoints of full size: SD1.5 (2.1 GB, 1130 tensors) and
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
compared with each other (`test_doors.py`). A dash marks a pipeline of the other family (`XL` or `Around` in its name is SDXL's), or a node that
the run did not reach. "Not run yet" marks a case that was added since the last run.

Seconds and peak memory of the process (mapped files included) of each run: few steps, pictures of 96 px (`$VITRINE_FULL_SIZE_SIDE` for others),
one CPU thread on a busy machine. SD1.5's UNet is kept in float32, as ComfyUI does on a CPU, SDXL's in float16 and computed in
float32 (ComfyUI's `--fp16-unet`, diffusers' `enable_layerwise_casting`). A node's seconds include what it needs of nodes that had not run before.
"""


def render(figures: dict[str, Any]) -> str:
    """The page for these figures."""
    parts = [HEAD]
    for door, title in DOORS.items():
        named = {name for name, _ in CASES} if door == "diffusers" else set()
        rows = sorted(named | {key.split(" | ")[1] for key in figures if key.startswith(door)}, key=_shown)
        header = [title, *(f"{name}: s, GiB" for name in FAMILIES.values())]
        table = [header, ["---"] * 3, *([_shown(r), *(_cell(figures, door, r, f) for f in FAMILIES)] for r in rows)]
        parts += ["", *(f"| {' | '.join(row)} |" for row in table)]
    return "\n".join([*parts, ""])


def _shown(row: str) -> str:
    return NAMES[row]["display_name"] if row in NAMES else f"`{row}`"


def _cell(figures: dict[str, Any], door: str, row: str, family: str) -> str:
    if (door, row, family) in REFUSED:
        return REFUSED[door, row, family]
    found = figures.get(f"{door} | {row} | {family}")
    if found is None:
        if (row, family) in CASES:
            return "not run yet"
        only = door == "note" and family not in families_of(row)
        return "for SDXL" if only else "–"
    return f"{found[0]:g}, {found[1] / 1024:.1f}"


def write() -> None:
    """Write figures and page."""
    PAGE.write_text(render(measure.write()), encoding="utf-8")
