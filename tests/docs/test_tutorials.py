"""docs/tutorials: every Python block runs in its order, prints what the page says and makes the pictures that it shows.

``VITRINE_WRITE_DOCS=1 pytest -m nightly tests/docs/test_tutorials.py`` copies the pictures to docs/pictures.
"""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.M | re.S)


def blocks(page):
    """(code, what it prints or "") of each Python block."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def test_a_tutorial_is_one_task_with_pictures(subtests):
    assert len(PAGES) >= 6
    for page in PAGES:
        with subtests.test(page.stem):
            text = page.read_text(encoding="utf-8")
            assert len(text.splitlines()) <= 110 and "## In Python" in text
            pictures = re.findall(r"!\[([^]]+)\]\(([^)]+)\)", text)
            assert pictures and all((page.parent / path).is_file() for _, path in pictures)


@pytest.mark.nightly
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.stem)
def test_runs_as_it_stands(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page.stem}
    for code, printed in blocks(page):
        exec(compile(code, str(page), "exec"), names)  # noqa: S102 - the page's own code
        out = capsys.readouterr().out
        assert not printed or out == printed
    shown = page.read_text(encoding="utf-8")
    for path in tmp_path.glob("*.png"):
        picture = Image.open(path).convert("RGB")
        assert np.asarray(picture).std() > 10, f"{path.name} is blank"
        copy = ROOT / "docs" / "pictures" / f"tutorial_{path.stem}.jpg"
        assert copy.name in shown, f"{page.name} does not show {path.name}"
        if os.environ.get("VITRINE_WRITE_DOCS"):
            picture.save(copy, quality=90)
