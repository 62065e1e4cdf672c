"""docs/examples: how they are written. tests/pipelines/test_examples.py runs them."""

import re
from pathlib import Path

from vitrine.engine import pipelines

EXAMPLES = sorted((Path(__file__).parents[2] / "docs" / "examples").glob("*.py"))


def test_is_short_and_says_what_to_change(subtests):
    for example in EXAMPLES:
        with subtests.test(example.stem):
            text = example.read_text(encoding="utf-8")
            lines = text.splitlines()
            assert len(lines) <= 100 and sum(line.startswith("# %% ") for line in lines) >= 5
            assert sum(line.endswith("  # your own checkpoint goes here") for line in lines) == 1
            assert lines[2].startswith("Your own checkpoint: change the one line marked below")


def test_every_pipeline_has_an_example():
    used = "".join(p.read_text(encoding="utf-8") for p in EXAMPLES)
    # Those for transformers, and around any pipeline, are made by ``from_pipe`` of the others.
    made = ("TransformerPipeline", "AroundPipeline")
    classes = [name for name in pipelines.__all__ if name.endswith("Pipeline") and not name.endswith(made)]
    assert not [name for name in classes if not re.search(rf"\b{name}\b", used)]
