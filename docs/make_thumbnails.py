"""Make the templates' thumbnails in ComfyUI's template browser: from the gallery's pictures, which the workflows drew,
from larger ones that thumbnail_parts.py draws, and for one's own checkpoint from thumbnail_drawings.py.

The browser shows ``workflows/TITLE.jpg`` and nothing else of a pack; it decodes by content, so an animated WebP of that
name moves: before, after, before. ``python docs/make_thumbnails.py [TITLE ...]``, from anywhere.
"""

import sys
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFilter, ImageFont
from sheets import DOCS, crop, sheet, squares
from thumbnail_drawings import BACK, BAD, BAR, DRAWINGS, GOOD, SIDE

REST, FADE, BANNER = 1500, 80, 34
"""Milliseconds that a frame stands, and the one between two frames; height of the line "your checkpoint"."""

Tile = tuple[str, str, int]
"""Title whose sheet it is on (empty: the template's own), row of the sheet, and which of its squares."""
Frame = tuple[str, str, int, int] | tuple[str, list[Tile]]
"""Caption, row of the sheet, the first of its squares, and how many: four as a square, else one; or caption and four
tiles. What a template gives comes first: titles are told apart by it before the frames move."""


def two_rows(above: str, below: str, title: str = "", count: int = 2) -> list[Tile]:
    """Two squares of one row of a sheet above two of another."""
    return [(title, row, k) for row in (above, below) for k in range(count)]


FRAMES: dict[str, list[Frame]] = {
    "Change a person halfway through (demo)": [
        ("edited from the middle on", "Edited from t = 700 on", 0, 4), ("the person", "The person", 0, 4),
    ],
    "Sample in one step (demo)": [
        ("one network call", "One network call a picture", 0, 4),
        ("sixty network calls", "60 network calls a picture", 0, 4),
    ],
    "Look inside a copied picture (demo)": [
        ("pictures, and inside", two_rows("Untouched: one picture, four times", "Inside, step 10 of 20")),
        ("blocked", "Blocked: what the caption says", 0, 4),
        ("four seeds, one picture", "Untouched: one picture, four times", 0, 4),
    ],
    "Make your own slider, threshold and space (demo)": [
        ("forty labels made a slider", "Forty labels made a slider", 0, 4),
    ],
    "Make a slider from pictures (demo)": [
        ("the new slider", "With the new slider", 0, 4), ("painted by hand", "Before, painted over", 0, 4),
        ("somebody else", "The person", 0, 4),
    ],
    "Pull sliders on a person (demo)": [
        ("sliders pulled", "Edited", 0, 4), ("the same person elsewhere", "The same person elsewhere", 0, 4),
        ("a person", "The person", 0, 4),
    ],
    "Reuse saved neurons, people and layers (demo)": [
        ("all from files", two_rows("A person from a file", "From a file, no model needed")),
    ],
    "Say how large a picture should look (demo)": [
        ("told 16, 64 and 256 pixels", [
            ("", "Power-cosine, 16 px", 0), ("", "Power-cosine, 64 px", 0), ("", "Power-cosine, 256 px", 0),
            ("", "Power-cosine, 256 px", 1),
        ]),
    ],
    "See what the model sees (demo)": [
        ("what the model sees", two_rows("The pictures", "Second layer")),
        ("for one word: hair", "One word: hair", 0, 4),
        ("the pictures", "The pictures", 0, 4),
    ],
    "Stop the model copying a picture (demo)": [
        ("above copied, below blocked", two_rows(
            "Untouched: one picture, four times",
            "Blocked: what the caption says",
            "Look inside a copied picture (demo)",
        )),
        ("the training picture", "With and without the neurons", 0, 1),
        ("it comes back", "With and without the neurons", 1, 1),
    ],
    "Turn a folder of LoRAs into sliders (demo)": [("in none of the files", "Somebody new, with glasses", 0, 4)],
}  # fmt: skip
PARTED: dict[str, tuple[str, list[tuple[str, str, str]]]] = {
    "Check a model for copies (demo)": (
        "which samples are copies?",
        [
            ("training picture", "training picture", ""),
            ("sample: a copy", "copy", BAD),
            ("training picture", "training picture", ""),
            ("sample: no copy", "no copy", GOOD),
        ],
    ),
    "Sample a person in one step (demo)": (
        "a person in one network call",
        [
            ("1 call", "one call", ""),
            ("40 calls", "forty calls", ""),
        ],
    ),
    "Sample at twice the size (demo)": (
        "a second pass at twice the size",
        [
            ("plain", "second pass", BAD),
            ("with dilation", "second pass with dilation", GOOD),
        ],
    ),
    "Find the same part (demo)": (
        "click one, find the others",
        [
            ("clicked", "point 0", ""),
            ("matched", "point 1", ""),
            ("matched", "point 2", ""),
            ("matched", "point 3", ""),
        ],
    ),
    "Make a picture look small or large (demo)": (
        "as from a large or a small original",
        [
            ("large", "a large original", ""),
            ("small", "a small original", ""),
        ],
    ),
    "Pull sliders, four nodes (demo)": (
        "pull a slider: glasses",
        [
            ("glasses 0", "person", ""),
            ("glasses 3", "person with glasses", ""),
        ],
    ),
}
"""Title -> caption, and two or four pictures: a label, the picture's name, the colour of its edge or nothing."""
CUT = (0.22, 0.0, 0.78, 1.0)
"""Of a picture that takes half a thumbnail: left, top, right and bottom of what is shown."""


def captioned(image: Image.Image, caption: str) -> Image.Image:
    """With its caption in the bar below."""
    bar = Image.new("RGBA", (SIDE, BAR), (12, 14, 18, 190))
    image.paste(bar, (0, SIDE - BAR), bar)
    font = ImageFont.load_default(size=22)
    ImageDraw.Draw(image).text((SIDE // 2, SIDE - BAR // 2), caption, fill="white", font=font, anchor="mm")
    return image


def labelled(label: str, picture: Image.Image, size: tuple[int, int], edge: str) -> Image.Image:
    """A picture enlarged without blur, its label above."""
    if size[0] < size[1]:
        left, top, right, bottom = (share * picture.width for share in CUT)
        high = (right - left) * size[1] / size[0]
        picture = picture.crop((round(left), round(bottom - high), round(right), round(bottom)))
    picture = picture.resize(size, Image.Resampling.BICUBIC).filter(ImageFilter.UnsharpMask(3, 60, 2))
    pen = ImageDraw.Draw(picture, "RGBA")
    pen.rectangle((0, 0, size[0] - 1, size[1] - 1), outline=edge or "white", width=4 if edge else 1)
    font = ImageFont.load_default(size=19)
    wide = pen.textlength(label, font=font) + 16
    pen.rounded_rectangle((8, 8, 8 + wide, 36), 6, fill=(12, 14, 18, 190))
    pen.text((8 + wide / 2, 22), label, fill="white", font=font, anchor="mm")
    return picture


def parted(title: str) -> Image.Image:
    """Two pictures side by side, or four."""
    from thumbnail_parts import PARTS

    caption, parts = PARTED[title]
    image, high = Image.new("RGB", (SIDE, SIDE)), (SIDE - BAR) * 2 // len(parts)
    for k, (label, name, edge) in enumerate(parts):
        tile = labelled(label, PARTS[name](), (SIDE // 2, high), edge)
        image.paste(tile, (k % 2 * SIDE // 2, k // 2 * high))
    return captioned(image, caption)


def drawn(title: str) -> Image.Image:
    """What the template does on one's own checkpoint."""
    caption, draw = DRAWINGS[title]
    image, high = Image.new("RGB", (SIDE, SIDE), BACK), SIDE - BAR - BANNER
    picture = draw().done().crop((0, 16, SIDE, SIDE - BAR))
    wide = round(SIDE * high / picture.height)
    image.paste(picture.resize((wide, high), Image.Resampling.LANCZOS), ((SIDE - wide) // 2, BANNER))
    pen = ImageDraw.Draw(image)
    pen.rectangle((0, 0, SIDE, BANNER), fill=(96, 58, 150))
    place = {"anchor": "rm", "font": ImageFont.load_default(size=20)}  # the browser's badge covers the left
    pen.text((SIDE - 12, BANNER // 2), "your checkpoint", fill="white", **place)
    return captioned(image, caption)


def frame(title: str, cut: Frame) -> Image.Image:
    """One square: the pictures of a template, and below them what they are."""
    caption, row, *chosen = cut
    tiles = row if isinstance(row, list) else [("", row, chosen[0] + k) for k in range(chosen[1])]
    image, side = Image.new("RGB", (SIDE, SIDE)), SIDE // 2 if len(tiles) == 4 else SIDE
    for k, (other, name, number) in enumerate(tiles):
        tile = crop(sheet(other or title), squares(other or title, name)[number])
        image.paste(tile.resize((side, side), Image.Resampling.BICUBIC), (k % 2 * side, k // 2 * side))
    return captioned(image, caption)


def frames(title: str) -> tuple[list[Image.Image], list[int]]:
    """Frames of a thumbnail, and the milliseconds each stands."""
    if title in PARTED or title in DRAWINGS:
        return [parted(title) if title in PARTED else drawn(title)], [REST]
    still = [frame(title, cut) for cut in FRAMES[title]]
    if len(still) == 1:
        return still, [REST]
    images, times = [], []
    for k, image in enumerate(still):
        after = still[(k + 1) % len(still)]
        images += [image, Image.blend(image, after, 0.5)]
        times += [REST, FADE]
    return images, times


def main(titles: Sequence[str]) -> None:
    """Write workflows/TITLE.jpg; of all templates if none is named."""
    for title in titles or (*FRAMES, *PARTED, *DRAWINGS):
        images, times = frames(title)
        target = DOCS.parent / "workflows" / f"{title}.jpg"
        with target.open("wb") as file:
            options = {"quality": 74, "method": 6}
            if len(images) > 1:
                options |= {"save_all": True, "append_images": images[1:], "duration": times, "loop": 0}
            images[0].save(file, "WEBP" if len(images) > 1 else "JPEG", **options)


if __name__ == "__main__":
    main(sys.argv[1:])
