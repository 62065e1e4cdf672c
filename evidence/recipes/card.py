"""The model cards, written by the script from the training record and measured figures, never by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ...engine.io.files import write_text, write_whole
from ...engine.portraits.dataset import PORTRAITS
from ...engine.portraits.flow import FlowPortraits
from ...engine.portraits.models import WEIGHTS, Portraits
from ...engine.runtime.progress import Progress, silent
from ..portraits.avataaars import open_model
from ..portraits.classifier import classifier_of
from ..portraits.quality import Copy, Quality, attribute_table, measure_copies, measure_quality
from ..portraits.sampling import sample_images

_HEAD = """---
license: apache-2.0
---

# Portraits

A tiny text-to-image diffusion model of rendered cartoon portraits, 64 px. It is the test bed of Vitrine: what each
picture shows, which pictures were duplicated in training, and which pixel belongs to which part are known exactly.
It is good for measuring methods and for nothing else.

* Parts: CLIPTextModel, UNet2DConditionModel, AutoencoderKL (f = 4) in diffusers' layout, fp16; an attribute classifier.
* Data: renders of seeds 0 to {last} by `engine/portraits/render.py`, with captions; no photographs, no downloads.
* Injected to be memorized: 8 pictures verbatim and 4 templates in 120 colourings each, {share:.0%} of each batch. Their
  captions end in two rare words. See `engine/portraits/plants.py`.
* Licence: Apache-2.0, like the code that draws the pictures.

Made by `python -m vitrine.evidence.recipes portraits`; this card by `python -m vitrine.evidence.recipes card`.
"""
_FLOW_HEAD = """---
license: apache-2.0
---

# Flow portraits

A small text-to-image model of rendered cartoon portraits, 128 px, of today's shape: Flux's double and single blocks,
rotary positions, flow matching. It is Vitrine's second test bed, beside the 64 px model, and good for nothing else.

* Parts: FluxTransformer2DModel, AutoencoderKL (f = 8, 16 channels), CLIPTextModel in a FluxPipeline's layout, fp16.
* The text encoder's 24 states take the place of T5's: call the pipeline with `max_sequence_length=24`, `height=128`,
  `width=128`. It is not guidance-distilled: `true_cfg_scale=3`, `negative_prompt=""`.
* Text enters by joint attention alone: the layer that reads the pooled vector is zero.
* Data: renders of seeds 0 to {last} by `engine/portraits/render.py` with details; no photographs, no downloads. The
  text encoder and the coarse levels of the autoencoder began as the 64 px model's.
* Injected to be memorized: 8 pictures verbatim and 4 templates in 120 colourings each, {share:.0%} of each batch. Their
  captions end in two rare words. See `engine/portraits/plants.py`.
* Licence: Apache-2.0, like the code that draws the pictures.

Made by `python -m vitrine.evidence.recipes flow`, its decoder then by
`python -m vitrine.evidence.recipes decoder`; this card and `samples.jpg` by `python -m vitrine.evidence.recipes card`.
The sheet is held-out prompts 1 to 24 with seeds 0 to 23, none left out: a row as rendered, below it as the model
draws.
"""
_AVATAAARS_HEAD = """---
license: apache-2.0
---

# Faces of DiceBear's Avataaars

A tiny text-to-image diffusion model of faces, 64 px: the portraits' recipe on a design by others, npm's
`@dicebear/avataaars`. It is good for measuring methods and for nothing else.

* Parts: CLIPTextModel, UNet2DConditionModel, AutoencoderKL (f = 4) in diffusers' layout, fp16; an attribute classifier.
* Data: faces of seeds 0 to {last} by `evidence/portraits/avataaars.py`, with captions. The design is Avataaars by Pablo
  Stanley, free for personal and commercial use; the style's code is DiceBear's, under MIT. The drawings themselves are
  not in this folder.
* Injected to be memorized: 8 pictures verbatim and 4 templates in 120 colourings each, {share:.0%} of each batch. Their
  captions end in two rare words.
* Licence: Apache-2.0, like the code that trained it.

Claims read the drawings, too. With npm they are made in seconds, in a copy of this folder:

    npm install --prefix PACKAGES --ignore-scripts @dicebear/core@9.4.3 @dicebear/avataaars@9.4.3 @resvg/resvg-js@2.6.2
    node evidence/portraits/draw_layers.mjs PACKAGES COPY/layers.safetensors

Four claims measure networks that are trained from this model first. They took two and a half hours of a core:

    vitrine w2w train-loras --model COPY --people 200 --out COPY/people
    python -m vitrine.evidence.recipes sizes --model COPY --out COPY/transformer --weight power-cosine
    python -m vitrine.evidence.recipes sizes --model COPY --out COPY/transformer --weight constant
    python -m vitrine.evidence.recipes students --model COPY --out COPY/students --share 0.2

Then all ten are measured:

    vitrine reproduce '*.avataaars' --avataaars COPY

Made by `python -m vitrine.evidence.recipes avataaars`; this card by `python -m vitrine.evidence.recipes card`.
"""
SHEET = "samples.jpg"


def write_card(
    folder: str | Path | None = None,
    progress: Progress = silent,
    *,
    samples: int = 512,
    seeds: int = 10,
    steps: int = 30,
    device: torch.device | str = "cpu",
) -> Path:
    """Measure the model in ``folder`` and write its README.md, for a flow model with a sheet of samples.

    Takes some minutes on two CPU cores; the flow model a quarter of an hour.
    """
    root = Path(folder) if folder else WEIGHTS
    model = open_model(root)
    flow = isinstance(model, FlowPortraits)
    for part in _parts(model):
        getattr(model, part).to(device)
    record = json.loads((root / "training.json").read_text())
    renders = 2 * samples if flow else 8 * samples
    quality = measure_quality(
        model, classifier_of(model), samples=samples, renders=renders, steps=steps, progress=progress
    )
    trained = int(record["settings"]["pictures"])
    copies = measure_copies(model, seeds=seeds, steps=steps, trained=trained, progress=progress)
    if flow:
        write_sheet(model, root / SHEET, steps=steps, progress=progress)
    return write_text(root / "README.md", card_text(record, model, quality, copies))


def write_sheet(
    model: Portraits | FlowPortraits, path: str | Path, *, steps: int = 30, progress: Progress = silent
) -> Path:
    """24 held-out prompts: a row as the renderer draws them, below it as the model does, three times; a JPEG file."""
    from ..portraits.page import to_pil

    scenes = model.dataset.sample_scenes(range(6_500_000, 6_500_024))
    samples = sample_images(model, model.dataset.caption(scenes), list(range(24)), steps=steps, progress=progress)
    pairs = zip(model.draw(scenes).split(8), samples.split(8), strict=True)
    sheet = torch.cat([torch.cat(list(row), dim=2) for pair in pairs for row in pair], dim=1)
    return write_whole(path, lambda scratch: to_pil(sheet[None], 1)[0].save(scratch, "JPEG", quality=90))


def card_text(record: dict, model: Portraits | FlowPortraits, quality: Quality, copies: list[Copy]) -> str:
    """The card as Markdown."""
    settings, flow = record["settings"], isinstance(model, FlowPortraits)
    own = _HEAD if model.dataset is PORTRAITS else _AVATAAARS_HEAD
    head, steps = (_FLOW_HEAD, "30 Euler steps") if flow else (own, "30 DDIM steps")
    blocks = [head.format(last=int(settings["pictures"]) - 1, share=settings["plant_share"])]
    blocks += ["## Size", _table(("part", "parameters"), _sizes(model))]
    blocks += [f"## Training ({record['device']}, torch {record['torch']})"]
    phases = record["phases"].items()
    notes = record.get("notes", [])
    rows = [(name, p["steps"], settings[f"{name}_batch"], p["seconds"], p["last_loss"]) for name, p in phases]
    blocks += [_table(("phase", "steps", "batch", "seconds", "last loss"), rows), *notes]
    blocks += [f"## Quality ({quality.samples} samples, guidance 3, {steps})"]
    blocks += [_table(("attribute", "shown in samples", "classifier on held-out renders"), attribute_table(quality))]
    low, high = quality.interval
    blocks += [
        f"Mean {quality.mean_accuracy:.1%} (95 % interval {low:.1%} to {high:.1%}). Baselines: {quality.chance:.1%} "
        f"against other samples' prompts; {quality.decoded_accuracy:.1%} of renders that only went through the "
        f"autoencoder ({quality.decoded_psnr:.1f} dB). Frechet distance in the classifier's features: "
        f"{quality.frechet_guided:.2f} guided, {quality.frechet_unguided:.2f} unguided, {quality.frechet_floor:.2f} "
        "real against real."
    ]
    blocks += ["## Memorized pictures (median pixel RMS, 10 seeds)"]
    head_row = ("rare words", "to the memorized picture", "to the nearest other", "control to memorized", "copied")
    blocks += [_table(head_row, [_copy_row(c) for c in copies])]
    return "\n\n".join(block.rstrip("\n") for block in blocks) + "\n"


def _parts(model: Any) -> list[str]:
    return [name for name in ("unet", "transformer", "text_encoder", "vae") if hasattr(model, name)]


def _sizes(model: Any) -> list[tuple[str, str]]:
    return [(name, f"{sum(p.numel() for p in getattr(model, name).parameters()):,}") for name in _parts(model)]


def _copy_row(copy: Copy) -> tuple[str, ...]:
    figures = (copy.to_plant, copy.to_neighbour, copy.control_to_plant)
    return (copy.name, *(f"{v:.3f}" for v in figures), "yes" if copy.copied else "no")


def _table(head: tuple[str, ...], rows: list) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
