"""``docs/published.md`` says what was measured; the files themselves are not needed."""

from vitrine_tests.published import page
from vitrine_tests.published.bring import table
from vitrine_tests.published.weights import WRITE, known


def test_the_page_is_that_of_the_figures():
    if WRITE:
        page.write()
    assert page.PAGE.read_text(encoding="utf-8") == page.render(known())


def test_every_file_has_a_figure():
    figures = known()
    for entry in table():
        name = f"{entry['repository']}/{entry['path']}"
        assert entry["kind"] in page.OTHER or figures[name]["outcome"] in ("read", "refused"), name
