"""Make the templates' thumbnails in ComfyUI's template browser from the gallery's pictures, which the workflows drew.

The browser shows ``workflows/TITLE.jpg`` and nothing else of a pack; it decodes by content, so an animated WebP of that
name moves: before, after, before. A template on your own model has the pictures that the shipped model drew on the
same way. ``python docs/make_thumbnails.py [TITLE ...]``, from anywhere.
"""

import sys
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont
from sheets import DOCS, crop, sheet, squares

SIDE = 400
"""Pixels of a thumbnail."""
REST, FADE = 1500, 60
"""Milliseconds that a frame stands, and each of three between two frames."""

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
    "Check a model for copies (demo)": [
        ("samples, and what is copied", [("", "Sample, and what of it is copied", k) for k in range(4)]),
    ],
    "Sample a person in one step (demo)": [
        ("above one call, below forty", two_rows("One person, one call", "For comparison: 40 calls a picture")),
    ],
    "Sample at twice the size (demo)": [
        ("second pass, fitted", "128 px, second pass with dilation", 0, 1),
        ("second pass, plain", "128 px, plain second pass", 0, 1),
    ],
    "Sample in one step (demo)": [
        ("one network call", "One network call a picture", 0, 4),
        ("sixty network calls", "60 network calls a picture", 0, 4),
    ],
    "Find the same part (demo)": [
        ("click one, find the others", [("", "The same points in other faces", k) for k in (0, 1, 3, 5)]),
    ],
    "Make a picture look small or large (demo)": [
        ("above plain, below small", two_rows("strength 1", "Strength 3: blurrier, as a small original is")),
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
    "Pull sliders, four nodes (demo)": [
        ("a slider pulled", "In the panel", 1, 1), ("a person", "In the panel", 0, 1),
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
SAME_WAY = {
    "Sample at twice the size (your checkpoint)": "Sample at twice the size (demo)",
    "Sample in one step (your checkpoint)": "Sample in one step (demo)",
    "Find the same part (your checkpoint)": "Find the same part (demo)",
    "Is my LoRA overfitted (your checkpoint)": "Check a model for copies (demo)",
    "Say how large a picture should look (your checkpoint)": "Say how large a picture should look (demo)",
    "See what the model sees (your checkpoint)": "See what the model sees (demo)",
    "Stop the model copying a picture (your checkpoint)": "Stop the model copying a picture (demo)",
    "Turn a folder of LoRAs into sliders (your checkpoint)": "Turn a folder of LoRAs into sliders (demo)",
}
"""Template on your model -> the one whose pictures it shows."""


def frame(title: str, cut: Frame) -> Image.Image:
    """One square: the pictures of a template, and below them what they are."""
    caption, row, *chosen = cut
    tiles = row if isinstance(row, list) else [("", row, chosen[0] + k) for k in range(chosen[1])]
    image, side = Image.new("RGB", (SIDE, SIDE)), SIDE // 2 if len(tiles) == 4 else SIDE
    for k, (other, name, number) in enumerate(tiles):
        tile = crop(sheet(other or title), squares(other or title, name)[number])
        image.paste(tile.resize((side, side), Image.Resampling.BICUBIC), (k % 2 * side, k // 2 * side))
    bar = Image.new("RGBA", (SIDE, 44), (12, 14, 18, 190))
    image.paste(bar, (0, SIDE - 44), bar)
    font = ImageFont.load_default(size=22)
    ImageDraw.Draw(image).text((SIDE // 2, SIDE - 22), caption, fill="white", font=font, anchor="mm")
    return image


def frames(title: str) -> tuple[list[Image.Image], list[int]]:
    """Frames of a thumbnail, and the milliseconds each stands."""
    source = SAME_WAY.get(title, title)
    still = [frame(source, cut) for cut in FRAMES[source]]
    if title in SAME_WAY:
        for image in still:
            ImageDraw.Draw(image).rectangle((0, 0, SIDE, 34), fill=(96, 58, 150))
            place = {"anchor": "rm", "font": ImageFont.load_default(size=20)}  # the browser's badge covers the left
            ImageDraw.Draw(image).text((SIDE - 12, 17), "your checkpoint", fill="white", **place)
    if len(still) == 1:
        return still, [REST]
    images, times = [], []
    for k, image in enumerate(still):
        after = still[(k + 1) % len(still)]
        images += [image, *(Image.blend(image, after, share) for share in (0.25, 0.5, 0.75))]
        times += [REST, FADE, FADE, FADE]
    return images, times


def main(titles: Sequence[str]) -> None:
    """Write workflows/TITLE.jpg; of all templates if none is named."""
    for title in titles or (*FRAMES, *SAME_WAY):
        images, times = frames(title)
        target = DOCS.parent / "workflows" / f"{title}.jpg"
        with target.open("wb") as file:
            options = {"quality": 80, "method": 6}
            if len(images) > 1:
                options |= {"save_all": True, "append_images": images[1:], "duration": times, "loop": 0}
            images[0].save(file, "WEBP" if len(images) > 1 else "JPEG", **options)


if __name__ == "__main__":
    main(sys.argv[1:])
