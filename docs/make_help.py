"""Cut the help pages' pictures from the gallery's, which the workflows drew; small files. Run from anywhere.

ComfyUI's page looks for them beside the pages, ``nodes/web/docs/pictures``, whatever the language of the page.
"""

from make_thumbnails import DOCS, LEFT, RIGHT, ROWS, STEP, TILE, slug
from PIL import Image
from vitrine.engine.portraits import render, sample_scenes

HELP = DOCS.parent / "nodes" / "web" / "docs" / "pictures"
FIRST, SECOND, THIRD = ROWS
GAP = 18

Cut = tuple[str, int, int, int, int]
"""Gallery picture of a template, and left, top, width and height in it."""


def tiles(title: str, x: int, y: int, count: int = 2) -> Cut:
    """``count`` samples side by side."""
    return title, x, y, (count - 1) * STEP + TILE, TILE


PERSON, INSIDE, ONE_STEP = "Pull sliders on a person", "See what the model sees", "Draw in one step"
COPIED, SIZE = "Stop the model copying a picture", "Say how large a picture should look"
FIND, OWN = "Find the same part in every picture", "Make your own slider, threshold and space"
LATE, GUIDED = "Change a person halfway through", "Guide the size apart from the prompt"
PICTURES: dict[str, list[Cut]] = {
    "tap": [tiles(INSIDE, RIGHT, FIRST), tiles(INSIDE, LEFT, SECOND)],
    "inside": [tiles(INSIDE, RIGHT, FIRST), tiles(INSIDE, LEFT, FIRST)],
    "steps": [tiles("Look inside a copied picture", LEFT, SECOND), tiles("Look inside a copied picture", LEFT, THIRD)],
    "points": [(FIND, LEFT, 453, 450, TILE)],
    "places": [(FIND, LEFT, FIRST, 336, 19), (FIND, LEFT, 187, 336, 19)],
    "sizes": [tiles(SIZE, LEFT, FIRST, 1), tiles(SIZE, 370, FIRST, 1), tiles(SIZE, LEFT, SECOND, 1)],
    "weighted": [tiles(SIZE, 584, SECOND, 1), tiles(SIZE, LEFT, THIRD, 1), tiles(SIZE, 370, THIRD, 1)],
    "guided": [tiles(GUIDED, LEFT, FIRST), tiles(GUIDED, 255, FIRST)],
    "padded": [tiles(GUIDED, LEFT, FIRST), tiles(GUIDED, 501, FIRST)],
    "entropy": [tiles("Guide without a negative prompt", LEFT, y) for y in (FIRST, SECOND)],
    "larger": [tiles("Leave the trained size", x, FIRST, 1) for x in (LEFT, 255, 747)],
    "one_step": [tiles(ONE_STEP, RIGHT, FIRST), tiles(ONE_STEP, LEFT, SECOND)],
    "repaired": [tiles(ONE_STEP, LEFT, SECOND), tiles(ONE_STEP, LEFT, FIRST)],
    "student": [tiles(OWN, LEFT, 429, 4)],
    "noises": [tiles(OWN, LEFT, SECOND, 4)],
    "edited": [tiles(PERSON, LEFT, FIRST), tiles(PERSON, RIGHT, FIRST)],
    "person": [tiles(PERSON, LEFT, FIRST, 4)],
    "late": [tiles(LATE, LEFT, FIRST), tiles(LATE, RIGHT, FIRST)],
    "child": [tiles(PERSON, LEFT, FIRST), tiles(PERSON, LEFT, THIRD)],
    "own_slider": [tiles(OWN, LEFT, FIRST, 4)],
    "own_space": [tiles("Turn a folder of LoRAs into sliders", LEFT, FIRST, 4)],
    "neurons": [(COPIED, RIGHT, FIRST, 336, 37)],
    "blocked": [tiles(COPIED, LEFT, FIRST), tiles(COPIED, LEFT, SECOND)],
    "comes_back": [tiles(COPIED, LEFT, SECOND), tiles(COPIED, RIGHT, SECOND)],
    "copies": [tiles("Check a model for copies", 463, FIRST)],
    "portraits": [tiles(ONE_STEP, RIGHT, FIRST, 4)],
    "found": [tiles(PERSON, RIGHT, SECOND, 4)],
    "map": [("widget_people", 18, 106, 214, 190)],
    "clicks": [("widget_points", 16, 42, 389, 248)],
    "transformer": [tiles(SIZE, 370, FIRST, 3)],
}  # fmt: skip
"""Picture -> what stands in it, from left to right; strips stand below each other."""


def picture(name: str) -> Image.Image:
    """The cuts on white."""
    cuts = [
        Image.open(DOCS / "pictures" / f"{slug(title)}.jpg").convert("RGB").crop((x, y, x + w, y + h))
        for title, x, y, w, h in PICTURES[name]
    ]
    strips = cuts[0].width > 8 * cuts[0].height
    across, down = [c.width + GAP for c in cuts], [c.height + 4 for c in cuts]
    size = (max(across), sum(down) - 4) if strips else (sum(across), max(down) - 4)
    image, x, y = Image.new("RGB", (size[0] - GAP, size[1]), "white"), 0, 0
    for cut in cuts:
        image.paste(cut, (x, y))
        x, y = (x, y + cut.height + 4) if strips else (x + cut.width + GAP, y)
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
    for name in PICTURES:
        picture(name).save(HELP / f"{name}.jpg", quality=88)


if __name__ == "__main__":
    main()
