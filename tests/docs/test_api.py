"""docs/api says what the source says. ``VITRINE_WRITE_DOCS=1 pytest tests/docs/test_api.py`` writes it anew."""

import os

from vitrine_tests.docs import api_page as page


def test_the_pages_are_the_docstrings():
    if os.environ.get("VITRINE_WRITE_DOCS"):
        page.write()
    written = {file.name: file.read_text(encoding="utf-8") for file in page.FOLDER.iterdir()}
    assert written == page.pages(), "VITRINE_WRITE_DOCS=1 pytest tests/docs/test_api.py"


def test_sections_become_lists():
    text = page.prose(
        "Do it.\n\n    Args:\n        x, y: where, and\n            how.\n\n    Example:\n        >>> do(1, 2)\n"
    )
    assert (
        text == "Do it.\n\n**Args**\n\n- `x, y`: where, and\n    how.\n\n**Example**\n\n```python\n>>> do(1, 2)\n```\n"
    )
