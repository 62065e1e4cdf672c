"""README and the pages it leads to: short, every node named, every command exists."""

import json
import re
from pathlib import Path

from vitrine.evidence import registry as claims

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "docs" / "claims.md"]


def test_two_screens():
    assert len(README.splitlines()) <= 110 and README.count("```python") == 1


def test_every_node_is_named():
    names = json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8"))
    assert not [n["display_name"] for n in names.values() if f"*{n['display_name']}*" not in README]


def test_every_command_exists(subtests):
    for page in PAGES:
        with subtests.test(page.stem):
            text = page.read_text(encoding="utf-8")
            cells = [row.split("|")[-2] for row in text.splitlines() if row.startswith("|")]
            commands = [cell for cell in cells if "`" in cell]
            named = re.findall(r"(?:vitrine reproduce |`)(\w+\.\w+)`", "".join(commands))
            files = re.findall(r"pytest ([\w/]+\.py)", "".join(commands))
            assert len(commands) >= 9 and not set(named) - set(claims.all_claims())
            assert files and all((ROOT / f).is_file() for f in files)


def test_claims_in_short_are_claims_in_full():
    """A figure of README's table stands in docs/claims.md, in a row with the same command."""
    full = PAGES[1].read_text(encoding="utf-8").splitlines()
    table = README[README.index("| claim |") : README.index("## Install")].splitlines()[2:]
    for line in filter(None, table):
        _, _, measured, command, _ = line.split("|")
        rows = [r for name in re.findall(r"\w+\.\w+(?=`)|test_\w+(?=\.py)", command) for r in full if f"{name}" in r]
        figures = re.findall(r"\d+(?:\.\d+)?(?:e-\d+)?", measured)
        assert rows and figures and all(any(f in r for r in rows) for f in figures), line
