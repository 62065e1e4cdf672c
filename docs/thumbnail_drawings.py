"""What a template on one's own checkpoint does, drawn: no picture of the shipped model stands for another model's."""

import random
from collections.abc import Callable

from PIL import Image, ImageDraw, ImageFilter

SIDE, BAR = 400, 44
"""Pixels of a drawing, and of the caption's bar at its end, which stays empty."""
FINE = 3
"""Drawn at so many times the side and made smaller, for smooth edges."""
BACK, INK, CARD, GOOD, BAD, MARK = "#20242c", "#e8eaf0", "#39404d", "#2fbf71", "#e0534f", "#ffb02e"
Box = tuple[float, float, float, float]
"""Left, top, right and bottom, pixels of the drawing."""


class Drawing:
    """A square with rounded shapes; all measures in pixels of the thumbnail."""

    def __init__(self) -> None:
        self.image = Image.new("RGB", (SIDE * FINE, SIDE * FINE), BACK)
        self.pen = ImageDraw.Draw(self.image)

    def paste(self, picture: Image.Image, box: Box, edge: str = INK) -> None:
        """A picture in a frame."""
        left, top, right, bottom = (round(v * FINE) for v in box)
        self.image.paste(picture.resize((right - left, bottom - top), Image.Resampling.LANCZOS), (left, top))
        self.pen.rectangle((left, top, right, bottom), outline=edge, width=4 * FINE)

    def box(self, box: Box, fill: str, radius: float = 8) -> None:
        """A filled rectangle with round corners."""
        self.pen.rounded_rectangle([v * FINE for v in box], radius * FINE, fill=fill)

    def dot(self, x: float, y: float, radius: float, fill: str, edge: str = "white") -> None:
        """A disc with an edge."""
        box = [v * FINE for v in (x - radius, y - radius, x + radius, y + radius)]
        self.pen.ellipse(box, fill=fill, outline=edge, width=3 * FINE)

    def line(self, *points: tuple[float, float], fill: str = INK, width: float = 5) -> None:
        """A line through points."""
        self.pen.line([(x * FINE, y * FINE) for x, y in points], fill=fill, width=round(width * FINE), joint="curve")

    def arrow(self, x: float, y: float, length: float = 44) -> None:
        """An arrow to the right, from its middle."""
        self.line((x - length / 2, y), (x + length / 2 - 6, y), width=7)
        tip = [(x + length / 2, y), (x + length / 2 - 16, y - 14), (x + length / 2 - 16, y + 14)]
        self.pen.polygon([(a * FINE, b * FINE) for a, b in tip], fill=INK)

    def done(self) -> Image.Image:
        """At the thumbnail's size."""
        return self.image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def landscape(side: int = 600, sky: str = "#86b9e8", hills: tuple[str, str] = ("#5c8f5a", "#3d6b4a")) -> Image.Image:
    """Hills below a sun."""
    image = Image.new("RGB", (side, side), sky)
    pen = ImageDraw.Draw(image)
    pen.ellipse([side * v for v in (0.62, 0.14, 0.84, 0.36)], fill="#ffe08a")
    pen.polygon([(side * x, side * y) for x, y in ((-0.1, 1), (0.32, 0.36), (0.8, 1))], fill=hills[0])
    pen.polygon([(side * x, side * y) for x, y in ((0.25, 1), (0.72, 0.5), (1.2, 1))], fill=hills[1])
    return image


def portrait(side: int = 600, sky: str = "#8fa8c8", turn: float = 0, heads: int = 1) -> Image.Image:
    """Somebody's outline; ``heads`` one above the other, as a model repeats them at twice its size."""
    image = Image.new("RGB", (side, side), sky)
    pen = ImageDraw.Draw(image)
    pen.ellipse([side * v for v in (0.14, 0.72, 0.86, 1.4)], fill="#4b5a78")
    for k in range(heads):
        middle, high = 0.5 + turn, 0.44 - 0.3 * k if heads == 1 else 0.6 - 0.34 * k
        size = 0.2 if heads == 1 else 0.15
        pen.rectangle([side * v for v in (middle - 0.06, high, middle + 0.06, high + 0.32)], fill="#d9b08c")
        pen.ellipse(
            [side * v for v in (middle - size * 1.12, high - size * 1.4, middle + size * 1.12, high + size * 0.75)],
            fill="#5a4334",
        )
        face = (middle - size * 0.84, high - size, middle + size * 0.84, high + size * 1.15)
        pen.ellipse([side * v for v in face], fill="#e8c4a0")
    return image


def noise(side: int = 600) -> Image.Image:
    """What sampling begins with."""
    small = Image.frombytes("L", (24, 24), random.Random(0).randbytes(24 * 24)).convert("RGB")
    return small.resize((side, side), Image.Resampling.NEAREST)


def _same_part() -> Drawing:
    """One point in a picture, the same in two others."""
    drawing = Drawing()
    cards = [
        (26, 60, 186, 300, 0.0, "#8fa8c8"),
        (234, 26, 374, 176, 0.16, "#d8b27a"),
        (234, 190, 374, 340, -0.14, "#8fbf9a"),
    ]
    for left, top, right, bottom, turn, sky in cards:
        wide = portrait(turn=turn, sky=sky)
        share = (bottom - top) / (right - left)
        drawing.paste(wide.crop((90, 0, 510, 600)) if share > 1.2 else wide, (left, top, right, bottom))
    points = [(106, 160), (234 + 140 * 0.66, 26 + 150 * 0.44), (234 + 140 * 0.36, 190 + 150 * 0.44)]
    for point in points[1:]:
        drawing.line(points[0], point, fill=MARK, width=4)
    for k, (x, y) in enumerate(points):
        drawing.dot(x, y, 12 if k == 0 else 9, MARK)
    return drawing


def _overfitted() -> Drawing:
    """A sample that is a training picture, and the report's five answers."""
    drawing = Drawing()
    for left, edge in ((24, INK), (216, BAD)):
        drawing.paste(portrait(turn=0.06), (left, 24, left + 160, 184), edge)
    drawing.dot(200, 104, 22, BACK, INK)
    for y in (98, 110):
        drawing.line((190, y), (210, y), fill=BAD)
    for k, (fill, share) in enumerate(((BAD, 0.95), (GOOD, 0.45), (MARK, 0.7), (GOOD, 0.3), ("#8a909c", 0.1))):
        y = 214 + 28 * k
        drawing.dot(40, y, 9, fill, fill)
        drawing.box((64, y - 6, 376, y + 6), CARD, 6)
        drawing.box((64, y - 6, 64 + 312 * share, y + 6), fill, 6)
    return drawing


def _twice() -> Drawing:
    """At twice the size: two heads, and one."""
    drawing = Drawing()
    drawing.paste(portrait(), (20, 132, 100, 212))
    drawing.arrow(122, 172, 30)
    drawing.paste(portrait(heads=2), (146, 24, 306, 184), BAD)
    drawing.paste(portrait(), (146, 194, 306, 354), GOOD)
    drawing.line((324, 90), (354, 120), fill=BAD, width=9)
    drawing.line((354, 90), (324, 120), fill=BAD, width=9)
    drawing.line((322, 274), (336, 290), (362, 256), fill=GOOD, width=9)
    return drawing


def _one_step() -> Drawing:
    """Noise, one step, a picture."""
    drawing = Drawing()
    drawing.paste(noise(), (20, 100, 170, 250))
    drawing.paste(landscape(), (230, 100, 380, 250))
    drawing.arrow(200, 175, 44)
    drawing.dot(200, 60, 30, GOOD, GOOD)
    drawing.line((192, 52), (202, 42), (202, 78), fill="white", width=7)
    return drawing


def _size_told() -> Drawing:
    """One picture as if from a small, a middle and a large original."""
    drawing, sharp = Drawing(), landscape()
    for k, blur in enumerate((34, 12, 0)):
        left = 20 + 124 * k
        picture = sharp.filter(ImageFilter.GaussianBlur(blur))
        drawing.paste(picture, (left, 96, left + 112, 208))
        drawing.box((left, 240, left + 112, 252), CARD, 6)
        drawing.dot(left + 16 + 40 * k, 246, 13, GOOD)
    return drawing


def _inside() -> Drawing:
    """A picture, and where a word is in it."""
    drawing, picture = Drawing(), portrait()
    drawing.paste(picture, (20, 86, 190, 256))
    heat = Image.new("RGB", picture.size, "#1b2a6b")
    pen = ImageDraw.Draw(heat)
    for size, fill in ((0.36, "#2a7f9e"), (0.27, "#5ec27a"), (0.19, "#f2d04b"), (0.11, "#e0534f")):
        pen.ellipse([600 * v for v in (0.5 - size, 0.47 - size, 0.5 + size, 0.47 + size)], fill=fill)
    heat = heat.filter(ImageFilter.GaussianBlur(34))
    drawing.paste(Image.blend(picture, heat, 0.66), (210, 86, 380, 256))
    drawing.box((128, 284, 272, 324), CARD, 20)
    drawing.pen.text((200 * FINE, 304 * FINE), "face", fill=INK, anchor="mm", font_size=24 * FINE)
    return drawing


def _not_copied() -> Drawing:
    """Four times one picture; with neurons off, four pictures."""
    drawing = Drawing()
    looks = ((0.0, "#d8b27a"), (0.14, "#8fbf9a"), (-0.14, "#8fa8c8"), (0.07, "#c39ac9"))
    for k, (turn, sky) in enumerate(looks):
        x, y = 20 + 84 * (k % 2), 92 + 84 * (k // 2)
        drawing.paste(portrait(turn=0.05), (x, y, x + 76, y + 76), BAD)
        drawing.paste(portrait(turn=turn, sky=sky), (x + 200, y, x + 276, y + 76), GOOD)
    drawing.arrow(200, 172, 26)
    return drawing


def _sliders() -> Drawing:
    """A folder of LoRAs becomes sliders."""
    drawing = Drawing()
    drawing.box((24, 96, 92, 130), MARK, 8)
    drawing.box((24, 112, 168, 248), MARK, 10)
    for k in range(3):
        drawing.box((40, 138 + 34 * k, 152, 164 + 34 * k), "#fff3d6", 5)
        drawing.pen.text((96 * FINE, (151 + 34 * k) * FINE), "LoRA", fill="#6b4a00", anchor="mm", font_size=16 * FINE)
    drawing.arrow(200, 172, 40)
    for k, share in enumerate((0.75, 0.3, 0.55, 0.9)):
        y, end = 106 + 46 * k, 232 + 140 * share
        drawing.box((232, y - 5, 372, y + 5), CARD, 5)
        drawing.box((min(302, end), y - 5, max(302, end), y + 5), GOOD, 2)
        drawing.dot(end, y, 13, GOOD)
    return drawing


DRAWINGS: dict[str, tuple[str, Callable[[], Drawing]]] = {
    "Find the same part (your checkpoint)": ("click one, find the others", _same_part),
    "Is my LoRA overfitted (your checkpoint)": ("is it a copy? five answers", _overfitted),
    "Sample at twice the size (your checkpoint)": ("twice the size, one head", _twice),
    "Sample in one step (your checkpoint)": ("one network call", _one_step),
    "Say how large a picture should look (your checkpoint)": ("as a small or a large original", _size_told),
    "See what the model sees (your checkpoint)": ("where a word is", _inside),
    "Stop the model copying a picture (your checkpoint)": ("four copies, then none", _not_copied),
    "Turn a folder of LoRAs into sliders (your checkpoint)": ("LoRAs become sliders", _sliders),
}
"""Template -> its caption, and its drawing."""
