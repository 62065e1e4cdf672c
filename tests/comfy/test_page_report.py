"""Pages that ComfyUI opens for us are in a sandbox: a file that somebody put into the output folder runs nothing."""

import re
from pathlib import Path

import pytest

WEB = Path(__file__).parents[2] / "nodes" / "web"
OPENED = {"report.js": "the LoRA report"}
"""Script -> the page that it opens. Copy Check's page and the others are opened from their folder, outside ComfyUI."""


@pytest.mark.parametrize("script", sorted(p.name for p in WEB.glob("*.js")))
def test_every_page_that_is_opened_is_sandboxed(script):
    """A script that opens a tab, a frame or a page of its own is listed above, and shows it in a sandbox."""
    text = (WEB / script).read_text(encoding="utf-8")
    opens = re.search(r"window\.open|createElement\(\"iframe\"\)|srcdoc|createObjectURL|document\.write", text)
    assert bool(opens) == (script in OPENED)
    if opens:
        assert 'setAttribute("sandbox", "")' in text and "default-src 'none'" in text
        assert "createObjectURL" not in text and "allow-scripts" not in text
