"""Cut the README's six pictures from the gallery's, which the workflows drew. Run from anywhere."""

from pathlib import Path

from PIL import Image

FOLDER = Path(__file__).parent / "pictures"
LEFT, RIGHT, FIRST, SECOND = (8, 466), (484, 942), (28, 139), (169, 280)
"""Columns and rows of a gallery picture of four samples each, from and to."""
TILES = {
    "see": ("see_what_the_model_sees", (RIGHT, FIRST), (LEFT, FIRST)),
    "find": ("find_the_same_part_in_every_picture", ((8, 460), (452, 564)), ((462, 914), (452, 564))),
    "edit": ("pull_sliders_on_a_person", (LEFT, FIRST), (RIGHT, FIRST)),
    "forget": ("stop_the_model_copying_a_picture", (LEFT, FIRST), (LEFT, SECOND)),
    "hurry": ("draw_in_one_step", (RIGHT, FIRST), (LEFT, SECOND)),
    "size": ("say_how_large_a_picture_should_look", ((584, 926), (169, 280)), ((369, 711), (310, 421))),
}
"""Tile -> gallery picture, and what stands above and below: (from, to) across and down."""
SIZE = (458, 226)


def tile(name: str) -> Image.Image:
    """Two rows of samples, one above the other."""
    source, *rows = TILES[name]
    sheet, image = Image.open(FOLDER / f"{source}.jpg"), Image.new("RGB", SIZE, "white")
    for k, ((left, right), (top, bottom)) in enumerate(rows):
        image.paste(sheet.crop((left, top, right, bottom)), ((SIZE[0] - right + left) // 2, 114 * k))
    return image


def main() -> None:
    """Write docs/pictures/tile_*.jpg."""
    for name in TILES:
        tile(name).save(FOLDER / f"tile_{name}.jpg", quality=90)


if __name__ == "__main__":
    main()
