"""docs/machine.md says what the tests hold."""

from vitrine_tests.machine import measure, page
from vitrine_tests.machine.modes import MODES, pairs
from vitrine_tests.machine.table import BUDGETS, LEFT_OUT, PENDING, PENDING_TRAFFIC


def test_the_page_is_what_the_table_promises():
    written = page.PAGE.read_text(encoding="utf-8")
    assert written == page.render(measure.known()), "VITRINE_WRITE_DOCS=1 VITRINE_MACHINE=full pytest tests/machine"


def test_every_figure_of_the_page_was_measured_and_keeps_its_bound():
    for name, family in pairs():
        figures = measure.known()[f"{name} {family}"]
        for dtype in ("fp16", "bf16"):
            assert (name, dtype) in PENDING or figures[dtype] <= page.bound(name, dtype), (name, family, dtype)
        for mode in MODES:
            if (name, mode) not in LEFT_OUT and (name, mode) not in PENDING:
                assert figures[mode] <= page.equal(name), (name, family, mode)
        if name in BUDGETS and name not in PENDING_TRAFFIC:
            _, syncs, uploads = BUDGETS[name]
            assert figures["traffic"][0] <= syncs and figures["traffic"][1] <= uploads, (name, family)
