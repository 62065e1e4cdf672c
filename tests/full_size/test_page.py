"""docs/full_size.md is what was measured, of everything there is; this runs without the checkpoints."""

from vitrine.engine import pipelines
from vitrine_tests.full_size import measure, page
from vitrine_tests.full_size.pipeline_cases import CASES


def test_the_page_is_what_was_measured():
    written = page.PAGE.read_text(encoding="utf-8")
    assert written == page.render(measure.known()), "VITRINE_FULL_SIZE=1 VITRINE_WRITE_DOCS=1 pytest tests/full_size"


def test_every_pipeline_has_its_case():
    ours = {name for name in pipelines.__all__ if name.endswith("Pipeline")}
    assert ours == {name for name, _ in CASES if "." not in name}


def test_what_did_not_run_is_on_the_page():
    """A pipeline without a figure was left out of the table without a word."""
    lines = page.render({}).splitlines()
    for name, family in CASES:
        (line,) = [line for line in lines if line.startswith(f"| `{name}` |")]
        assert line.split(" | ")[1 + (family == "sdxl")].strip(" |") == "not run yet"
