"""Renew the gallery's pictures from what the page test photographed; look at each before you commit.

VITRINE_SHOT=FOLDER pytest tests/comfy/test_page.py -k opens_and_runs && python docs/make_gallery.py FOLDER

Writes docs/pictures/graph_*.jpg, the graphs after their run, the sheets of what they drew, and what stands where on
them, and the panel of *Person Sliders (W2W)*, widget_people.jpg. Then
make_thumbnails.py and make_help.py cut theirs anew.
"""

import json
import shutil
import sys
from pathlib import Path

from make_thumbnails import FRAMES, PARTED
from PIL import Image
from sheets import DOCS, PLACES, slug

WIDTH = 1200


def graph(shot: Path) -> Image.Image:
    """A photograph of the page, small enough for the gallery."""
    whole = Image.open(shot).convert("RGB")
    return whole.resize((WIDTH, round(WIDTH * whole.height / whole.width)), Image.Resampling.LANCZOS)


def main(folder: Path) -> None:
    """Take over what was photographed; templates without a photograph stay as they are."""
    places = json.loads(PLACES.read_text(encoding="utf-8")) if PLACES.is_file() else {}
    for title in (*FRAMES, *PARTED):
        if (shot := folder / f"{title}.png").is_file():
            graph(shot).save(DOCS / "pictures" / f"graph_{slug(title)}.jpg", quality=85)
            shutil.copyfile(folder / f"{title}.pictures.jpg", DOCS / "pictures" / f"{slug(title)}.jpg")
            places[slug(title)] = json.loads((folder / f"{title}.pictures.json").read_text(encoding="utf-8"))
    if (panel := folder / "widget_people.png").is_file():
        Image.open(panel).convert("RGB").save(DOCS / "pictures" / "widget_people.jpg", quality=88)
    PLACES.write_text(json.dumps(places, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
