"""Make the templates' thumbnails in ComfyUI's template browser from the gallery's pictures, which the workflows drew.

The browser shows ``workflows/TITLE.jpg`` and nothing else of a pack; it decodes by content, so an animated WebP of that
name moves: before, after, before. A template on your own model has the pictures that the shipped model drew on the
same way. Run from anywhere.
"""

import re
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

DOCS = Path(__file__).parent
SIDE, TILE, STEP = 400, 110, 115
"""Pixels of a thumbnail; of a picture in the gallery's sheets; from one to the next."""
LEFT, RIGHT = 9, 485
ROWS = (27, 169, 311)
REST, FADE = 1500, 60
"""Milliseconds that a frame stands, and each of three between two frames."""

Frame = tuple[str, int, int, int]
"""Caption, place of the first picture in the sheet, across and down, and how many: four as a square, else one."""
FRAMES: dict[str, list[Frame]] = {
    "Change a person halfway through": [("the person", LEFT, 27, 4), ("edited from the middle on", RIGHT, 27, 4)],
    "Check a model for copies": [("a sample", 463, 27, 1), ("what of it is copied", 575, 27, 1)],
    "Draw a person in one step": [("forty network calls", LEFT, 169, 4), ("one network call", RIGHT, 27, 4)],
    "Draw at twice the size": [("twice the size, untouched", LEFT, 27, 1), ("positions fitted", 255, 27, 1)],
    "Draw in one step": [("sixty network calls", RIGHT, 27, 4), ("one network call", LEFT, 169, 4)],
    "Find the same part in every picture": [
        ("click here", LEFT, 453, 1), ("found", 121, 453, 1), ("found", 348, 453, 1), ("found", 575, 453, 1),
    ],
    "Guide the size apart from the prompt": [("size guided by 1", LEFT, 27, 1), ("told small, by 3", 255, 27, 1)],
    "Guide without a negative prompt": [("no guidance", LEFT, 27, 4), ("away from flat attention", LEFT, 169, 4)],
    "Leave the trained size": [("twice the size, untouched", LEFT, 27, 1), ("positions and fine-tuning", 747, 27, 1)],
    "Look inside a copied picture": [
        ("four seeds, one picture", LEFT, 27, 4), ("inside, at step 10", LEFT, 311, 4), ("blocked", RIGHT, 27, 4),
    ],
    "Make your own slider, threshold and space": [("forty labels made a slider", LEFT, 27, 4)],
    "Pull sliders on a person": [
        ("a person", LEFT, 27, 4), ("sliders pulled", RIGHT, 27, 4), ("the same person elsewhere", RIGHT, 169, 4),
    ],
    "Save and load what you found": [("a person from a file", RIGHT, 27, 4), ("activations, too", RIGHT, 169, 4)],
    "Say how large a picture should look": [("told 16 pixels", 585, 169, 1), ("told 256 pixels", 370, 311, 1)],
    "See what the model sees": [("the pictures", RIGHT, 27, 4), ("what the model sees", LEFT, 27, 4)],
    "Stop the model copying a picture": [("four seeds, one picture", LEFT, 27, 4), ("neurons off", LEFT, 169, 4)],
    "Turn a folder of LoRAs into sliders": [("in none of the files", LEFT, 27, 4)],
}  # fmt: skip
SAME_WAY = {
    "Draw at twice the size with your model": "Draw at twice the size",
    "Draw in one step with your model": "Draw in one step",
    "Find the same part with your model": "Find the same part in every picture",
    "Say how large with your SDXL": "Say how large a picture should look",
    "See what your model sees": "See what the model sees",
    "Stop your model copying a picture": "Stop the model copying a picture",
    "Turn your LoRAs into a space": "Turn a folder of LoRAs into sliders",
}
"""Template on your model -> the one whose pictures it shows."""


def slug(title: str) -> str:
    """File name of a template's sheet in docs/pictures."""
    return re.sub(r"\W+", "_", title.lower())


def frame(sheet: Image.Image, cut: Frame) -> Image.Image:
    """One square: the pictures, and below them what they are."""
    caption, x, y, count = cut
    image, side = Image.new("RGB", (SIDE, SIDE)), SIDE // 2 if count == 4 else SIDE
    for k in range(4 if count == 4 else 1):
        tile = sheet.crop((x + k * STEP, y, x + k * STEP + TILE, y + TILE))
        image.paste(tile.resize((side, side), Image.Resampling.BICUBIC), (k % 2 * side, k // 2 * side))
    bar = Image.new("RGBA", (SIDE, 44), (12, 14, 18, 190))
    image.paste(bar, (0, SIDE - 44), bar)
    font = ImageFont.load_default(size=22)
    ImageDraw.Draw(image).text((SIDE // 2, SIDE - 22), caption, fill="white", font=font, anchor="mm")
    return image


def frames(title: str) -> tuple[list[Image.Image], list[int]]:
    """Frames of a thumbnail, and the milliseconds each stands."""
    source = SAME_WAY.get(title, title)
    sheet = Image.open(DOCS / "pictures" / f"{slug(source)}.jpg").convert("RGB")
    still = [frame(sheet, cut) for cut in FRAMES[source]]
    if len(still) == 1:
        return still, [REST]
    images, times = [], []
    for k, image in enumerate(still):
        after = still[(k + 1) % len(still)]
        images += [image, *(Image.blend(image, after, share) for share in (0.25, 0.5, 0.75))]
        times += [REST, FADE, FADE, FADE]
    return images, times


def main() -> None:
    """Write workflows/TITLE.jpg."""
    for title in (*FRAMES, *SAME_WAY):
        images, times = frames(title)
        target = DOCS.parent / "workflows" / f"{title}.jpg"
        with target.open("wb") as file:
            options = {"quality": 80, "method": 6}
            if len(images) > 1:
                options |= {"save_all": True, "append_images": images[1:], "duration": times, "loop": 0}
            images[0].save(file, "WEBP" if len(images) > 1 else "JPEG", **options)


if __name__ == "__main__":
    main()
