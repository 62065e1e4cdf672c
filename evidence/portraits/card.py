"""The model card, written by the script from the training record and measured figures, never by hand."""

from __future__ import annotations

import json
from pathlib import Path

from ...engine.files import write_text
from ...engine.portraits.models import WEIGHTS, Portraits, load_portraits
from ...engine.progress import Progress, silent
from .quality import Copy, Quality, attribute_table, measure_copies, measure_quality
from .readout import load_readout

_HEAD = """# Portraits

A tiny text-to-image diffusion model of rendered cartoon portraits, 64 px. It is the test bed of Vitrine: what each
picture shows, which pictures were duplicated in training, and which pixel belongs to which part are known exactly.
It is good for measuring methods and for nothing else.

* Parts: CLIPTextModel, UNet2DConditionModel, AutoencoderKL (f = 4) in diffusers' layout, fp16; a readout network.
* Data: renders of seeds 0 to {last} by `engine/portraits/render.py`, with captions; no photographs, no downloads.
* Planted on purpose: 8 pictures verbatim and 4 templates in 120 colourings each, {share:.0%} of each batch. Their
  captions end in two rare words. See `engine/portraits/plants.py`.
* Licence: Apache-2.0, like the code that draws the pictures.

Made by `vitrine train portraits`; this card by `vitrine card`.
"""


def write_card(folder: str | Path | None = None, progress: Progress = silent) -> Path:
    """Measure the model in ``folder`` and write its README.md. Takes some minutes on two CPU cores."""
    root = Path(folder) if folder else WEIGHTS
    model = load_portraits(root)
    record = json.loads((root / "training.json").read_text())
    quality = measure_quality(model, load_readout(root / "readout" / "readout.safetensors"), progress=progress)
    text = card_text(record, model, quality, measure_copies(model, progress=progress))
    return write_text(root / "README.md", text)


def card_text(record: dict, model: Portraits, quality: Quality, copies: list[Copy]) -> str:
    """The card as Markdown."""
    settings = record["settings"]
    blocks = [_HEAD.format(last=int(settings["pictures"]) - 1, share=settings["plant_share"])]
    blocks += ["## Size", _table(("part", "parameters"), _sizes(model))]
    blocks += [f"## Training ({record['device']}, torch {record['torch']})"]
    phases = record["phases"].items()
    notes = record.get("notes", [])
    rows = [(name, p["steps"], settings[f"{name}_batch"], p["seconds"], p["last_loss"]) for name, p in phases]
    blocks += [_table(("phase", "steps", "batch", "seconds", "last loss"), rows), *notes]
    blocks += [f"## Quality ({quality.samples} samples, guidance 3, 30 DDIM steps)"]
    blocks += [_table(("attribute", "shown in samples", "readout on held-out renders"), attribute_table(quality))]
    blocks += [
        f"Mean {quality.mean_accuracy:.1%}. Frechet distance in the readout's features: {quality.frechet_guided:.2f} "
        f"guided, {quality.frechet_unguided:.2f} unguided, {quality.frechet_floor:.2f} real against real."
    ]
    blocks += ["## Memorized pictures (median pixel RMS, 10 seeds)"]
    head = ("rare words", "to the planted picture", "to the nearest other", "control to planted", "copied")
    blocks += [_table(head, [_copy_row(c) for c in copies])]
    return "\n\n".join(block.rstrip("\n") for block in blocks) + "\n"


def _sizes(model: Portraits) -> list[tuple[str, str]]:
    return [
        (name, f"{sum(p.numel() for p in getattr(model, name).parameters()):,}")
        for name in ("unet", "text_encoder", "vae")
    ]


def _copy_row(copy: Copy) -> tuple[str, ...]:
    figures = (copy.to_plant, copy.to_neighbour, copy.control_to_plant)
    return (copy.name, *(f"{v:.3f}" for v in figures), "yes" if copy.copied else "no")


def _table(head: tuple[str, ...], rows: list) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
