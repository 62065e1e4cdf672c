"""Draw what `vitrine reproduce nemo.copy_check` measures, for the eye, with its figures as JSON.

python docs/make_nemo.py [FOLDER]     minutes; a person's three LoRAs, kept in the folder with their reports
"""

import json
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw
from vitrine.engine.copies import CheckedPrompt
from vitrine.engine.runtime.progress import TqdmProgress
from vitrine.evidence.nemo import copy_claims

FOLDER = Path(__file__).parent / "pictures"
LABEL = 220
"""Width of the words beside the rows, in pixels."""
SIDE = 128
"""Of a picture of the copy check."""


def sheet(strips: list[tuple[str, Image.Image]]) -> Image.Image:
    """One strip below another, words on the left."""
    height = strips[0][1].height
    image = Image.new("RGB", (LABEL + max(s.width for _, s in strips), height * len(strips)), "white")
    pen = ImageDraw.Draw(image)
    for number, (words, strip) in enumerate(strips):
        pen.text((4, number * height + height // 2 - 14), words, fill="black")
        image.paste(strip, (LABEL, number * height))
    return image


def copies(work: Path, folder: Path = FOLDER) -> None:
    """Write docs/pictures/nemo_copies.jpg: the first caption of each LoRA, whatever came out."""
    budget, strips, figures = copy_claims.SampleBudget(people=1), [], {}
    for name in copy_claims.train(work, copy_claims.people_sets([copy_claims.MEASURED]), TqdmProgress("LoRAs")):
        checked = copy_claims.check(work, name, budget)
        figures[name] = [{"copies": p.copies, "samples": len(p.ratios), "score": p.score} for p in checked.prompts]
        first, size = checked.prompts[0], name.rsplit("-", 1)[1]
        words = f"trained on {size}: {first.copies} of {len(first.ratios)} copied,\nscore {first.score:.2f}"
        strips.append((words, beside(first, work / name / checked.names[int(first.numbers[first.closest])])))
    say(figures)
    sheet(strips).save(folder / "nemo_copies.jpg", quality=88)


def beside(prompt: CheckedPrompt, picture: Path) -> Image.Image:
    """The nearest sample, what of it is copied in colour, and the training picture."""
    strip = Image.new("RGB", (3 * SIDE, SIDE))
    for i, file in enumerate((prompt.file, prompt.overlay_file, picture)):
        strip.paste(Image.open(file).convert("RGB").resize((SIDE, SIDE), Image.Resampling.NEAREST), (i * SIDE, 0))
    return strip


def say(figures: dict) -> None:
    """As JSON."""
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    copies(Path(sys.argv[1]) if sys.argv[1:] else Path(tempfile.mkdtemp()))
