"""docs/full_size.md is what was measured; this runs without the checkpoints."""

from vitrine_tests.full_size import measure, page


def test_the_page_is_what_was_measured():
    written = page.PAGE.read_text(encoding="utf-8")
    assert written == page.render(measure.known()), "VITRINE_FULL_SIZE=1 VITRINE_WRITE_DOCS=1 pytest tests/full_size"
