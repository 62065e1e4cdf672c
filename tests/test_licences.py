"""Every shipped weight stands in a folder whose card names its licence, as the hub reads it and in a sentence."""

import re
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[1]
WEIGHTS = ROOT / "engine" / "portraits" / "weights"
AVATAAARS = ROOT / "tests" / "data" / "avataaars"
PAGE = (ROOT / "LICENSES.md").read_text(encoding="utf-8")
FRONT = re.compile(r"\A---\n(.*?)\n---\n", re.S)


def card_of(path):
    """The nearest README.md above a file."""
    return next(folder / "README.md" for folder in path.parents if (folder / "README.md").is_file())


def test_every_weight_has_a_card_that_names_its_licence():
    files = [p for p in (*WEIGHTS.rglob("*"), *AVATAAARS.rglob("*")) if p.suffix in (".safetensors", ".npy")]
    cards = {card_of(path) for path in files} | set(WEIGHTS.rglob("README.md"))
    assert len(files) > 50 and len(cards) >= 8
    assert all(card.is_relative_to(WEIGHTS) or card.is_relative_to(AVATAAARS) for card in cards)
    for card in cards:
        text = card.read_text(encoding="utf-8")
        front = FRONT.match(text)
        assert front and re.search(r"^license: apache-2\.0$", front[1], re.M), card
        assert re.search(r"Licence: Apache-2\.0", text), card


def test_the_page_says_it_of_every_kind_of_file():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["license"] == "Apache-2.0" and "LICENSES.md" in project["license-files"]
    for kind in ("code", "weights", "tokenizers", "pictures", "screenshots", "fonts", "Facts of others"):
        assert kind in PAGE
    named = set(re.findall(r"`((?:engine|docs|nodes|workflows)/[\w./*-]+)`", PAGE))
    assert len(named) >= 5 and all(list(ROOT.glob(name)) for name in named)


def test_there_are_no_fonts_and_no_pictures_elsewhere():
    folders = {p.parent.relative_to(ROOT).as_posix() for kind in ("jpg", "png", "webp") for p in files_of(kind)}
    assert folders <= {
        "docs",
        "docs/pictures",
        "engine/portraits/weights/flow",
        "nodes/web/docs/pictures",
        "tests/data/avataaars",
        "workflows",
    }
    assert not [p for kind in ("ttf", "otf", "woff", "woff2") for p in files_of(kind)]


def files_of(ending):
    """Files of the repository with an ending, without what builds leave."""
    left = {"build", "dist", ".git", ".venv"}
    return [p for p in ROOT.rglob(f"*.{ending}") if not left & set(p.relative_to(ROOT).parts)]
