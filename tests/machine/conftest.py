"""Writes the page when asked to, after the run that measured it."""

import gc

import pytest


@pytest.fixture(scope="session", autouse=True)
def page_is_written():
    """``VITRINE_WRITE_DOCS=1``: figures.json and docs/machine.md follow from this run."""
    yield
    from vitrine_tests.machine.table import WRITE

    if WRITE:
        from vitrine_tests.machine import page

        page.write()


@pytest.fixture(autouse=True)
def nothing_lingers():
    """Pipelines hold circles of hooks; collected at once, a whole run stays small. Figures are kept test by test: a run
    of an hour may be stopped."""
    yield
    from vitrine_tests.machine import measure, table

    if table.WRITE:
        measure.write()
    gc.collect(1)
