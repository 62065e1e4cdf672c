"""README and the pages it leads to: short, every node named, every command exists."""

import json
import re
from pathlib import Path

from vitrine.engine import pipelines
from vitrine.evidence import registry as claims

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted((ROOT / "docs" / "results").glob("*.md"))


def test_two_screens():
    assert len(README.splitlines()) <= 120 and README.count("```python") == 1


def test_every_node_is_named_where_one_looks_for_it():
    names = json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "nodes.md").read_text(encoding="utf-8")
    assert not [n["display_name"] for n in names.values() if f"*{n['display_name']}*" not in page]


def test_it_counts_nodes_and_pipelines():
    names = json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8"))
    classes = [name for name in pipelines.__all__ if name.endswith("Pipeline")]
    assert f"{len(names)} ComfyUI nodes and {len(classes)} diffusers pipelines" in README


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
