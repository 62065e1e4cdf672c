"""Draw the variety claims' pictures: one prompt, a row for each way, a column for each seed. Run from anywhere."""

from pathlib import Path

from PIL import Image
from vitrine.evidence.emd.flow_student import draw_flow
from vitrine.evidence.emd.variety import contact_sheet, draw

FOLDER = Path(__file__).parent / "pictures"
WIDTH = 768
"""At most, in pixels."""


def main() -> None:
    """Write docs/pictures/emd_variety.jpg and emd_variety_flow.jpg, of the first of the claims' eight prompts."""
    for name, drawn in (("emd_variety", draw()), ("emd_variety_flow", draw_flow())):
        path = contact_sheet(drawn, FOLDER / f"{name}.png")
        with Image.open(path) as sheet:
            share = min(1, WIDTH / sheet.width)
            size = (round(sheet.width * share), round(sheet.height * share))
            small = sheet.convert("RGB").resize(size, Image.Resampling.BOX)
        small.save(FOLDER / f"{name}.jpg", quality=88)
        path.unlink()


if __name__ == "__main__":
    main()
