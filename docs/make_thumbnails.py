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

Frame = tuple[str, str, int, int]
"""Caption, row of the sheet, the first of its squares, and how many: four as a square, else one. What a template gives
comes first: titles are told apart by it before the frames move."""
FRAMES: dict[str, list[Frame]] = {
    "Change a person halfway through (demo)": [
        ("edited from the middle on", "Edited from t = 700 on", 0, 4), ("the person", "The person", 0, 4),
    ],
    "Check a model for copies (demo)": [
        ("what of it is copied", "Sample, and what of it is copied", 5, 1),
        ("a sample", "Sample, and what of it is copied", 4, 1),
    ],
    "Sample a person in one step (demo)": [
        ("one network call", "One person, one call", 0, 4),
        ("forty network calls", "For comparison: 40 calls a picture", 0, 4),
    ],
    "Sample at twice the size (demo)": [
        ("positions fitted", "256 px, static", 0, 1), ("twice the size, untouched", "256 px, untouched", 0, 1),
    ],
    "Sample in one step (demo)": [
        ("one network call", "One network call a picture", 0, 4),
        ("sixty network calls", "60 network calls a picture", 0, 4),
    ],
    "Find the same part (demo)": [
        ("click here", "The same points in other faces", 0, 1),
        *(("found", "The same points in other faces", k, 1) for k in (1, 3, 5)),
    ],
    "Make a picture look small or large (demo)": [
        ("made to look small", "Strength 3: blurrier, as a small original is", 0, 1),
        ("as trained", "strength 1", 0, 1),
    ],
    "Sample at twice the size, transformer (demo)": [
        ("positions and fine-tuning", "128 px, after fine-tuning", 0, 1),
        ("twice the size, untouched", "128 px, positions run on", 0, 1),
    ],
    "Look inside a copied picture (demo)": [
        ("inside, at step 10", "Inside, step 10 of 20", 0, 4),
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
        ("activations from a file", "From a file, no model needed", 0, 4),
        ("a person, too", "A person from a file", 0, 4),
    ],
    "Say how large a picture should look (demo)": [
        ("size 256 pixels", "Power-cosine, 256 px", 0, 1), ("size 16 pixels", "Power-cosine, 16 px", 0, 1),
    ],
    "See what the model sees (demo)": [
        ("what the model sees", "Second layer", 0, 4), ("for one word: hair", "One word: hair", 0, 4),
        ("the pictures", "The pictures", 0, 4),
    ],
    "Stop the model copying a picture (demo)": [
        ("neurons off", "With and without the neurons", 2, 1),
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
    caption, row, first, count = cut
    image, side = Image.new("RGB", (SIDE, SIDE)), SIDE // 2 if count == 4 else SIDE
    for k, box in enumerate(squares(title, row)[first : first + count]):
        tile = crop(sheet(title), box)
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
