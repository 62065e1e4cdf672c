"""Every pipeline keeps diffusers' conventions, or refuses what it cannot honour. Writes the table of docs/python.md.

``VITRINE_WRITE_DOCS=1 pytest tests/conventions`` writes it anew.
"""

import os

import pytest
from vitrine.engine import pipelines
from vitrine.engine.errors import VitrineError
from vitrine_tests.conventions import page
from vitrine_tests.conventions.checks import CHECKS, cells
from vitrine_tests.conventions.doors import DOORS
from vitrine_tests.lanes import nightly_but

pytestmark = pytest.mark.rounding


FILES, BY_DAY = ("from_pretrained", "save_pretrained"), ("EMD", "NEMO XL", "Tap, transformers", "W2W")
"""What reads and writes whole pipelines takes seconds; these stand for the others by day."""


@pytest.mark.parametrize(
    ("name", "title"),
    nightly_but(cells(), [c for i, c in enumerate(cells()) if (i % 5 == 0 if c[0] not in FILES else c[1] in BY_DAY)]),
)
def test_convention(name, title):
    door = DOORS[title]
    if name not in door.refused:
        CHECKS[name][0](door)
        return
    arguments, reason = door.refused[name]
    with pytest.raises(VitrineError, match=reason):
        door.run(door.shared(), **arguments)


def test_every_pipeline_is_in_the_table():
    kinds = {getattr(pipelines, name) for name in pipelines.__all__ if name.endswith("Pipeline")}
    assert kinds == {door.kind for door in DOORS.values()} and len(kinds) == 8


def test_the_page_has_the_table():
    if os.environ.get("VITRINE_WRITE_DOCS"):
        page.write()
    assert page.split(page.PAGE.read_text(encoding="utf-8"))[1] == page.render()
