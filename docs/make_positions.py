"""Draw the flow portraits at twice their side in every way that docs/any_size.md has a row for, for the eye.

python docs/make_positions.py
"""

from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch.nn.functional import interpolate
from vitrine.engine.portraits.flow import load_flow_portraits
from vitrine.engine.portraits.scenes import sample_scenes
from vitrine.engine.runtime.progress import TqdmProgress, silent
from vitrine.evidence.resolution import positions

FIRST, COUNT = 8_650_000, 8
"""Scenes of the prompts: not of the tables."""
SIDE, LABEL = 112, 128
"""Pixels of a picture on the sheet, and of the words beside its row."""


def rows() -> dict[str, torch.Tensor]:
    """Words -> (8, 3, 256, 256) pictures."""
    flow, scenes = load_flow_portraits(), sample_scenes(range(FIRST, FIRST + COUNT))
    arms = (positions.ENLARGED, *positions.ARMS)
    progress, drawn = TqdmProgress("drawing"), {}
    for done, arm in enumerate(arms):
        drawn[arm] = positions.draw(flow, arm, (2 * positions.TRAINED_SIDE,) * 2, scenes, silent)
        progress(done + 1, len(arms), None)
    return drawn


def sheet(drawn: dict[str, torch.Tensor]) -> Image.Image:
    """A row for each arm, a column for each prompt."""
    image = Image.new("RGB", (LABEL + COUNT * SIDE, len(drawn) * SIDE), "white")
    pen = ImageDraw.Draw(image)
    for row, (words, pictures) in enumerate(drawn.items()):
        pen.text((4, row * SIDE + SIDE // 2 - 12), words.replace("_dynamic", "\ndynamic"), fill="black")
        small = (255 * interpolate(pictures, (SIDE, SIDE), mode="area")).round().byte().permute(0, 2, 3, 1)
        for column, picture in enumerate(small):
            image.paste(Image.fromarray(picture.numpy()), (LABEL + column * SIDE, row * SIDE))
    return image


if __name__ == "__main__":
    sheet(rows()).save(Path(__file__).parent / "pictures" / "positions.jpg", quality=88)
