"""Draw the variety claims' pictures: one prompt, a row for each way, a column for each seed. Run from anywhere."""

from pathlib import Path

import torch
from PIL import Image
from vitrine.evidence.contact_sheet import tile
from vitrine.evidence.emd.flow_student import draw_flow
from vitrine.evidence.emd.variety import SEEDS, draw

FOLDER = Path(__file__).parent / "pictures"
WIDTH = 768
"""At most, in pixels."""


def main() -> None:
    """Write docs/pictures/emd_variety.jpg and emd_variety_flow.jpg, of the first of the claims' eight prompts."""
    for name, drawn in (("emd_variety", draw()), ("emd_variety_flow", draw_flow())):
        pictures = torch.cat([of_prompts[0] for of_prompts in drawn.pictures.values()])
        sheet = Image.fromarray(tile(pictures, SEEDS).numpy())
        share = min(1, WIDTH / sheet.width)
        size = (round(sheet.width * share), round(sheet.height * share))
        sheet.resize(size, Image.Resampling.BOX).save(FOLDER / f"{name}.jpg", quality=88)


if __name__ == "__main__":
    main()
