"""Draw what `vitrine reproduce nemo.erase` measures, for the eye, with its figures as JSON. Half an hour.

With --smaller four of the eight pictures and no LoRA, in a third of the time.
"""

import json
import sys
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from vitrine.engine.emd.grids import tile
from vitrine.engine.progress import TqdmProgress
from vitrine.evidence.nemo.attacked import erasing_seen

FOLDER = Path(__file__).parent / "pictures"
LABEL = 220
"""Width of the words beside the rows, in pixels."""


def rows_of(target: torch.Tensor, seen: dict[str, dict[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """The planted pictures, then of each remedy what the prompt and each attack brings: words, (P, 3, S, S)."""
    rows = [("planted", target)]
    for remedy, kinds in seen.items():
        rows += [(f"{remedy},\n{kind}", pictures) for kind, pictures in kinds.items()]
    return rows


def sheet(rows: list[tuple[str, torch.Tensor]]) -> Image.Image:
    """One row of samples below another, words on the left."""
    strips = [(words, Image.fromarray(tile(pictures, len(pictures)).numpy())) for words, pictures in rows]
    height = strips[0][1].height
    image = Image.new("RGB", (LABEL + strips[0][1].width, height * len(strips)), "white")
    pen = ImageDraw.Draw(image)
    for number, (words, strip) in enumerate(strips):
        pen.text((4, number * height + height // 2 - 14), words, fill="black")
        image.paste(strip, (LABEL, number * height))
    return image


def main(quick: bool = False, smaller: bool = False, folder: Path = FOLDER) -> None:
    """Write docs/pictures/nemo_erase.jpg."""
    result, target, seen = erasing_seen(None, TqdmProgress("nemo.erase"), quick, smaller)
    sys.stdout.write(json.dumps({"value": result.value, "holds": result.holds, **result.details}, indent=1) + "\n")
    sheet(rows_of(target.pictures, seen)).save(folder / "nemo_erase.jpg", quality=85)


if __name__ == "__main__":
    main("--quick" in sys.argv, "--smaller" in sys.argv)
