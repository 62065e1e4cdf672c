"""The README's pictures: small, made by the commands beside them, and what they say they are."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
Image = pytest.importorskip("PIL.Image")
BESIDE = ("sheets", "thumbnail_drawings", "thumbnail_parts")
"""Modules in docs/ that its commands import."""


def command(name):
    """docs/NAME.py as a module, which finds those beside it."""
    for other in {"make_thumbnails": BESIDE}.get(name, BESIDE[:1]):
        if other != name and other not in sys.modules:
            command(other)
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def difference(a, b):
    """Mean absolute difference of two pictures, 0 to 255."""
    from PIL import ImageChops, ImageStat

    assert a.size == b.size
    return sum(ImageStat.Stat(ImageChops.difference(a.convert("RGB"), b.convert("RGB"))).mean) / 3


def test_the_first_screen_is_a_sentence_pictures_and_what_one_can_do():
    first = README[: README.index("## ")]
    assert first.index("docs/slider.webp") < first.index("widget_people.jpg") < first.index("| I want to ... |")
    assert README.index("## Install") < README.index("```bash") and README.count("pip install -c") == 2
    assert (ROOT / "docs" / "slider.webp").stat().st_size < 1_500_000


def test_the_slider_moves_and_its_frames_are_what_the_model_draws():
    """Drawn anew: nothing pulled, and one slider at its end; the file is compressed, so equal but for that."""
    slider = command("make_slider")
    shown, frames = Image.open(slider.FILE), slider.positions()
    assert shown.is_animated and shown.n_frames == len(frames) >= 32 and shown.size[0] > 800
    chosen = [0, slider.STEPS]
    assert max(frames[0].values()) == 0 and sorted(frames[chosen[1]].values())[-2:] == [0.0, 1.0]
    stored = []
    for k, row in zip(chosen, slider.pictures([frames[k] for k in chosen]), strict=True):
        shown.seek(k)
        stored.append(shown.convert("RGB").crop((0, 0, shown.width, slider.SIDE)))
        anew = slider.sheet(row, frames[k]).crop((0, 0, shown.width, slider.SIDE))
        assert difference(stored[-1], anew) < 3.5
    assert difference(*stored) > 5, "the edit is seen"


def test_help_pages_show_what_their_node_does(tmp_path):
    """docs/make_help.py; ComfyUI's page looks beside the English pages, whatever the language."""
    cut, pages = command("make_help"), ROOT / "nodes/web/docs"
    texts = {p: p.read_text(encoding="utf-8") for p in pages.rglob("*.md")}
    shown = {p: re.findall(r"!\[[^]]{10,}\]\(pictures/(\w+)\.jpg\)\n\n\*[^*\n]+\*\n", t) for p, t in texts.items()}
    assert sum(map(bool, shown.values())) >= 34 + 3 * 6
    assert {name for names in shown.values() for name in names} == {*cut.cuts(), "rendered"}
    assert all(len(names) == t.count("![") <= 1 for names, t in zip(shown.values(), texts.values(), strict=True))
    for path in pages.glob("Vitrine*/*.md"):
        assert shown[path] == shown[pages / f"{path.parent.name}.md"], "each language shows the same"
    drawn = {"rendered": cut.rendered(), **{name: cut.picture(name) for name in cut.cuts()}}
    for name, picture in drawn.items():
        file = cut.HELP / f"{name}.jpg"
        assert file.stat().st_size < 30_000 and difference(Image.open(file), picture) < 7, name
