"""README and the pages it leads to: short, every node named, every command exists."""

import json
import re
from pathlib import Path

from vitrine.evidence import registry as claims

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted((ROOT / "docs" / "results").glob("*.md"))


def test_two_screens():
    assert len(README.splitlines()) <= 110 and README.count("```python") == 1


def test_every_node_is_named():
    names = json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8"))
    assert not [n["display_name"] for n in names.values() if f"*{n['display_name']}*" not in README]


def test_every_command_exists(subtests):
    """Of the pages of results; each command stands on a line with the claim's target."""
    seen = 0
    for page in PAGES:
        with subtests.test(page.stem):
            text = page.read_text(encoding="utf-8")
            named = re.findall(r"`vitrine reproduce ([\w.]+)", text)
            files = re.findall(r"(?:pytest|\s)(tests/[\w/]+\.py)", text)
            assert not set(named) - set(claims.all_claims()) and all((ROOT / f).is_file() for f in files)
            seen += len(named) + len(files)
    assert seen >= 60
