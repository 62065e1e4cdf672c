"""Cut the README's six pictures from the gallery's, which the workflows drew. Run from anywhere."""

from PIL import Image
from sheets import DOCS, crop, sheet, squares

Row = tuple[str, int, int]
"""Row of a sheet, the first of its squares, and how many."""
TILES: dict[str, tuple[str, Row, Row]] = {
    "see": ("See what the model sees (demo)", ("The pictures", 0, 4), ("Second place", 0, 4)),
    "find": (
        "Find the same part (demo)",
        ("The same points in other faces", 0, 4), ("The same points in other faces", 4, 4),
    ),
    "edit": ("Pull sliders on a person (demo)", ("The person", 0, 4), ("Edited", 0, 4)),
    "forget": (
        "Stop the model copying a picture (demo)",
        ("One memorized picture, four times", 0, 4), ("With the neurons off", 0, 4),
    ),
    "hurry": ("Draw in one step (demo)", ("60 network calls a picture", 0, 4), ("One network call a picture", 0, 4)),
    "size": (
        "Say how large a picture should look (demo)",
        ("Power-cosine, told 16 px", 0, 3), ("Power-cosine, told 256 px", 0, 3),
    ),
}  # fmt: skip
"""Tile -> template, and what stands above and below."""
SIZE = (458, 226)


def tile(name: str) -> Image.Image:
    """Two rows of samples, one above the other."""
    title, *rows = TILES[name]
    image = Image.new("RGB", SIZE, "white")
    for k, (row, first, count) in enumerate(rows):
        part = crop(sheet(title), *squares(title, row)[first : first + count])
        image.paste(part, ((SIZE[0] - part.width) // 2, 114 * k))
    return image


def main() -> None:
    """Write docs/pictures/tile_*.jpg."""
    for name in TILES:
        tile(name).save(DOCS / "pictures" / f"tile_{name}.jpg", quality=90)


if __name__ == "__main__":
    main()
