"""All sliders at five positions on held-out people, as one picture: what ``w2w.sliders`` measures, for the eye."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw

from ...engine.io.files import write_whole
from ...engine.runtime.progress import Progress, silent
from ...engine.w2w.edit.even_strengths import POSITIONS, StrengthMap
from ..contact_sheet import tile
from .flow_claims import EDITED, end_of, first_people, held_out, studio_of
from .graded import MEASURED, TUNED_ON, Sitting, smaller_space
from .pair_sliders import shipped_change
from .people import LABELS, Studio, people_space

COLUMNS, TITLE, GAP = 4, 14, 8
"""Sliders side by side, height of a title, and pixels between two sliders."""


@dataclass(frozen=True)
class Sheet:
    """Sliders on people who are in neither the space nor the tuning.

    Attributes:
        pictures: label -> (people, positions, 3, S, S) in [0, 1]; the first position is the picture before the edit.
        probability: label -> (positions,) of the label by the attribute classifier, mean over these people.
        calibrated: whether positions are even in what is seen (see ``strengths.py``), or even strengths.
    """

    pictures: dict[str, torch.Tensor]
    probability: dict[str, list[float]]
    calibrated: bool

    @classmethod
    def draw(
        cls, labels: Sequence[str] = tuple(LABELS), people: int = 6, calibrated: bool = False, tuning: int = 24,
        steps: int = 10, progress: Progress = silent, table: Mapping[str, Any] | None = None,
    ) -> Sheet:  # fmt: skip
        """For each label the first ``people`` from number 400 on who lack it.

        Args:
            tuning: the number of people before them who say which direction, from labels or pairs, is used, and how.
            table: ``details`` of ``w2w.sliders``' result, where they have said so already.
        """
        studio = Studio.open(None, smaller_space())
        positions = [i / (POSITIONS - 1) for i in range(POSITIONS)]
        pictures, probability = dict[str, torch.Tensor](), dict[str, list[float]]()
        for done, label in enumerate(labels):
            pairs = shipped_change(people_space(), label)
            if label in (table or {}):
                entry = (table or {})[label]
                points, change = StrengthMap.from_dict(entry["map"]), pairs if entry["from pairs"] else None
            else:
                tuners = Sitting.open(studio, label, TUNED_ON, tuning, steps)
                chosen = tuners.tuned().or_better(None if pairs is None else tuners.tuned(pairs))
                points, change = chosen.whole, chosen.change
            strengths = [points.at(v) if calibrated else v * points.strengths[-1] for v in positions]
            sitting = Sitting.open(studio, label, MEASURED, people, steps)
            drawn = torch.cat([sitting.moved(s, change, points.start) for s in strengths], 1)
            pictures[label] = drawn
            probability[label] = studio.likelihood(studio.read(drawn)[1], label).mean(0).tolist()
            progress(done + 1, len(labels), None)
        return cls(pictures, probability, calibrated)

    @classmethod
    def draw_flow(
        cls, labels: Sequence[str] = EDITED, people: int = 6, tuning: int = 16, progress: Progress = silent
    ) -> Sheet:  # fmt: skip
        """As :meth:`draw` with even strengths, of the flow portraits' people; ends read on ``tuning`` others."""
        studio = studio_of(None, first_people())
        pictures, probability = dict[str, torch.Tensor](), dict[str, list[float]]()
        for done, label in enumerate(labels):
            top, sitting = end_of(studio, label, tuning), held_out(studio, label, people)
            drawn = torch.cat([sitting.moved(top * i / (POSITIONS - 1)) for i in range(POSITIONS)], 1)
            pictures[label] = drawn
            probability[label] = studio.likelihood(studio.read(drawn)[1], label).mean(0).tolist()
            progress(done + 1, len(labels), None)
        return cls(pictures, probability, False)

    def write(self, path: str | Path) -> Path:
        """One picture: a block for each slider, a row for each person, a column for each position."""
        blocks = [Image.fromarray(tile(v.flatten(0, 1), v.shape[1]).numpy()) for v in self.pictures.values()]
        width, height = blocks[0].width + GAP, blocks[0].height + TITLE + GAP
        rows = -(-len(blocks) // COLUMNS)
        sheet = Image.new("RGB", (width * min(COLUMNS, len(blocks)), height * rows), "white")
        pen = ImageDraw.Draw(sheet)
        for number, (label, block) in enumerate(zip(self.pictures, blocks, strict=True)):
            left, top = number % COLUMNS * width, number // COLUMNS * height
            pen.text((left + 2, top), f"{label}: {self.shown(label)}", fill="black")
            sheet.paste(block, (left, top + TITLE))
        kind = "PNG" if Path(path).suffix == ".png" else "JPEG"
        return write_whole(path, lambda scratch: sheet.save(scratch, format=kind, quality=82))

    def shown(self, label: str) -> str:
        """The attribute classifier's probabilities at the positions."""
        return " ".join(f"{v:.2f}" for v in self.probability[label])
