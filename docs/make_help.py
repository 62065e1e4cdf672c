"""Cut the help pages' pictures from the gallery's, which the workflows drew; small files. Run from anywhere.

ComfyUI's page looks for them beside the pages, ``nodes/web/docs/pictures``, whatever the language of the page.
"""

from PIL import Image
from sheets import DOCS, Box, crop, pictures, sheet, squares
from vitrine.engine.portraits import render, sample_scenes

HELP = DOCS.parent / "nodes" / "web" / "docs" / "pictures"
TILE, STEP, GAP = 112, 115, 18
"""Pixels of a picture, from one to the next, and between two cuts."""

Cut = tuple[str, Box]
"""Template or picture of a widget, which has two pixels for one of the page, and the part of it."""


def tiles(title: str, row: str, count: int = 2) -> Cut:
    """The first ``count`` squares of a row, side by side."""
    boxes = squares(title, row)[:count]
    (left, top, *_), (x, _, width, height) = boxes[0], boxes[-1]
    return title, (left, top, x + width - left, height)


def strip(title: str, row: str) -> Cut:
    """The first picture of a row, whole."""
    return title, pictures(title, row)[0]


def part(title: str, row: str, number: int) -> Cut:
    """One square of a picture that holds several."""
    return title, squares(title, row)[number]


PERSON, INSIDE, ONE_STEP = (
    "Pull sliders on a person (demo)",
    "See what the model sees (demo)",
    "Sample in one step (demo)",
)
COPIED, SIZE = "Stop the model copying a picture (demo)", "Say how large a picture should look (demo)"
FIND, OWN = "Find the same part (demo)", "Make your own slider, threshold and space (demo)"
LATE, GUIDED = "Change a person halfway through (demo)", "Make a picture look small or large (demo)"
LOOK, LARGER = "Look inside a copied picture (demo)", "Sample at twice the size (demo)"
CALLS, CALL = "60 network calls a picture", "One network call a picture"
COPY = "Sample, and what of it is copied"
BOTH = "With and without the neurons"
PAIRS = "Make a slider from pictures (demo)"


def cuts() -> dict[str, list[Cut]]:
    """Picture -> what stands in it, from left to right; strips stand below each other."""
    return {
        "tap": [tiles(INSIDE, "The pictures"), tiles(INSIDE, "Tap of the finished pictures")],
        "inside": [tiles(INSIDE, "The pictures"), tiles(INSIDE, "Second layer")],
        "steps": [tiles(LOOK, "Inside, step 2 of 20"), tiles(LOOK, "Inside, step 10 of 20")],
        "points": [tiles(FIND, "The same points in other faces", 4)],
        "places": [strip(FIND, "Kept layers: one strip each"), strip(FIND, "Dropped layers")],
        "sizes": [tiles(SIZE, f"Constant, {pixels} px", 1) for pixels in (16, 64, 256)],
        "weighted": [tiles(SIZE, f"Power-cosine, {pixels} px", 1) for pixels in (16, 64, 256)],
        "guided": [tiles(GUIDED, "strength 1"), tiles(GUIDED, "Strength 3: blurrier, as a small original is")],
        "padded": [tiles(GUIDED, "strength 1"), tiles(GUIDED, "padded with its own tokens")],
        "larger": [tiles(LARGER, f"128 px, {p}", 1) for p in ("plain second pass", "second pass with dilation")],
        "one_step": [tiles(ONE_STEP, CALLS), tiles(ONE_STEP, CALL)],
        "student": [tiles(OWN, "The student's first pictures", 4)],
        "noises": [tiles(OWN, "Ten noises, one step each: one picture", 4)],
        "edited": [tiles(PERSON, "The person"), tiles(PERSON, "Edited")],
        "late": [tiles(LATE, "The person"), tiles(LATE, "Edited from t = 700 on")],
        "child": [tiles(PERSON, "The person"), tiles(PERSON, "The child")],
        "own_slider": [tiles(OWN, "Forty labels made a slider", 4)],
        "own_space": [tiles("Turn a folder of LoRAs into sliders (demo)", "Somebody new, with glasses", 4)],
        "neurons": [strip(COPIED, "Neurons found: one band a layer")],
        "compared": [strip(COPIED, BOTH)],
        "blocked": [part(COPIED, BOTH, 1), part(COPIED, BOTH, 2)],
        "comes_back": [part(COPIED, BOTH, 2), tiles(COPIED, "It comes back: blocking is not erasing")],
        "pairs_slider": [tiles(PAIRS, "The person"), tiles(PAIRS, "With the new slider")],
        "word": [tiles(INSIDE, "The pictures", 1), part(INSIDE, "One word: hair", 0)],
        "copies": [("Check a model for copies (demo)", pictures("Check a model for copies (demo)", COPY)[2])],
        "person": [tiles(PERSON, "The person", 4)],
        "portraits": [tiles(ONE_STEP, CALL, 4)],
        "found": [tiles(PERSON, "The same person elsewhere", 4)],
        "map": [strip("widget_people", ".vitrine-map")],
        "clicks": [strip("widget_points", ".vitrine-shown")],
        "transformer": [tiles(SIZE, "Constant, 64 px", 3)],
    }


def picture(name: str) -> Image.Image:
    """The cuts on white."""
    parts = [crop(sheet(title), box).reduce(2 if "widget_" in title else 1) for title, box in cuts()[name]]
    strips = parts[0].width > 8 * parts[0].height
    across, down = [c.width + GAP for c in parts], [c.height + 4 for c in parts]
    size = (max(across), sum(down) - 4) if strips else (sum(across), max(down) - 4)
    image, x, y = Image.new("RGB", (size[0] - GAP, size[1]), "white"), 0, 0
    for part in parts:
        image.paste(part, (x, y))
        x, y = (x, y + part.height + 4) if strips else (x + part.width + GAP, y)
    return image


def rendered() -> Image.Image:
    """Four scenes as *Render Portrait* draws them."""
    images = render(sample_scenes(range(4))).images
    image = Image.new("RGB", (3 * STEP + TILE, TILE), "white")
    for k, pixels in enumerate(images):
        drawn = Image.fromarray((pixels.permute(1, 2, 0) * 255).round().byte().numpy())
        image.paste(drawn.resize((TILE, TILE), Image.Resampling.LANCZOS), (k * STEP, 0))
    return image


def main() -> None:
    """Write nodes/web/docs/pictures/*.jpg."""
    HELP.mkdir(exist_ok=True)
    rendered().save(HELP / "rendered.jpg", quality=88)
    for name in cuts():
        picture(name).save(HELP / f"{name}.jpg", quality=88)


if __name__ == "__main__":
    main()
