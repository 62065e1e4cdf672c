"""Draw what `vitrine reproduce nemo.erase` and `nemo.copy_check` measure, for the eye, with their figures as JSON.

python docs/make_nemo.py erase [--smaller]   three quarters of an hour; --smaller: four of the eight pictures, no LoRA
python docs/make_nemo.py copies [FOLDER]     minutes; a person's three LoRAs, kept in the folder with their reports
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from vitrine.engine.copies import CheckedPrompt
from vitrine.engine.runtime.progress import TqdmProgress
from vitrine.evidence.contact_sheet import tile
from vitrine.evidence.nemo import copy_claims
from vitrine.evidence.nemo.attacked import erasing_seen

FOLDER = Path(__file__).parent / "pictures"
LABEL = 220
"""Width of the words beside the rows, in pixels."""
SIDE = 128
"""Of a picture of the copy check."""


def rows_of(target: torch.Tensor, seen: dict[str, dict[str, torch.Tensor]]) -> list[tuple[str, Image.Image]]:
    """The memorized pictures, then what the prompt and each attack bring after each remedy: words, a strip."""
    rows = [("memorized", target)]
    for remedy, kinds in seen.items():
        rows += [(f"{remedy},\n{kind}", pictures) for kind, pictures in kinds.items()]
    return [(words, Image.fromarray(tile(pictures, len(pictures)).numpy())) for words, pictures in rows]


def sheet(strips: list[tuple[str, Image.Image]]) -> Image.Image:
    """One strip below another, words on the left."""
    height = strips[0][1].height
    image = Image.new("RGB", (LABEL + max(s.width for _, s in strips), height * len(strips)), "white")
    pen = ImageDraw.Draw(image)
    for number, (words, strip) in enumerate(strips):
        pen.text((4, number * height + height // 2 - 14), words, fill="black")
        image.paste(strip, (LABEL, number * height))
    return image


def erase(quick: bool = False, smaller: bool = False, folder: Path = FOLDER) -> None:
    """Write docs/pictures/nemo_erase.jpg."""
    result, target, seen = erasing_seen(None, TqdmProgress("nemo.erase"), quick, smaller)
    say({"value": result.value, "holds": result.holds, **result.details})
    sheet(rows_of(target.pictures, seen)).save(folder / "nemo_erase.jpg", quality=85)


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
    if sys.argv[1:2] == ["copies"]:
        copies(Path(sys.argv[2]) if sys.argv[2:] else Path(tempfile.mkdtemp()))
    else:
        erase("--quick" in sys.argv, "--smaller" in sys.argv)
