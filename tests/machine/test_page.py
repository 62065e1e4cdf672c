"""docs/machine.md says what the tests hold."""

from vitrine_tests.machine import measure, page
from vitrine_tests.machine.calls import CALLS
from vitrine_tests.machine.modes import MODES, pairs
from vitrine_tests.machine.table import BUDGETS, promised


def test_the_page_is_what_the_table_promises():
    written = page.PAGE.read_text(encoding="utf-8")
    assert written == page.render(measure.known()), "VITRINE_WRITE_DOCS=1 VITRINE_MACHINE=full pytest tests/machine"


def measured(name, family):
    """Its figures; none of a row that has not been run yet, which may be a slow one, or of another family than its
    call's first."""
    figures = measure.known().get(f"{name} {family}")
    assert figures or CALLS[name].slow or family != next(iter(CALLS[name].kinds)), f"{name} {family} has no figures"
    return figures or {}


def test_every_figure_of_the_page_keeps_its_bound_and_no_row_has_a_part_alone():
    for name, family in pairs():
        figures = measured(name, family)
        columns = {c: page.bound(name, c) for c in ("fp16", "bf16")} | dict.fromkeys(MODES, page.equal(name))
        for column, most in columns.items():
            if figures and promised(name, family, column):
                assert figures[column] <= most, (name, family, column)
        if figures and name in BUDGETS:
            _, syncs, uploads = BUDGETS[name]
            assert figures["traffic"][0] <= syncs and figures["traffic"][1] <= uploads, (name, family)
