"""Draw the variety claim's pictures: one prompt, a row for each way, a column for each seed. Run from anywhere."""

from pathlib import Path

import torch
from PIL import Image
from vitrine.evidence.contact_sheet import tile
from vitrine.evidence.emd.flow_student import draw_flow
from vitrine.evidence.emd.variety import SEEDS

FOLDER = Path(__file__).parent / "pictures"
WIDTH = 768
"""At most, in pixels."""


def main() -> None:
    """Write docs/pictures/emd_variety_flow.jpg, of the first of the claim's eight prompts."""
    pictures = torch.cat([of_prompts[0] for of_prompts in draw_flow().pictures.values()])
    sheet = Image.fromarray(tile(pictures, SEEDS).numpy())
    share = min(1, WIDTH / sheet.width)
    size = (round(sheet.width * share), round(sheet.height * share))
    sheet.resize(size, Image.Resampling.BOX).save(FOLDER / "emd_variety_flow.jpg", quality=88)


if __name__ == "__main__":
    main()
