"""How often a call waits for the device, and sends data to it, a step: held by the numbers of the table."""

import math

import pytest
from vitrine_tests.machine import measure
from vitrine_tests.machine.calls import CALLS
from vitrine_tests.machine.modes import pairs, traffic
from vitrine_tests.machine.pretend import UPLOAD
from vitrine_tests.machine.table import BUDGETS, FULL

JOBS = ("tap.stream", "nemo.copies", "copy_check")
"""These, ``rank`` and ``nemo.attack`` write files, or fit networks and embeddings of their own."""
LATER = ("tap.later", "nemo.later.call", "w2w.later.call")
"""The same code as for the families that have a budget."""


def cells():
    return pairs(*(n for n in BUDGETS if FULL or not CALLS[n].slow))


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "family"), list(cells()))
def test_a_call_keeps_to_its_budget(name, family):
    syncs, uploads = measure.exchanged(name, family)
    measure.note(name, family, "traffic", [syncs, uploads])
    _, most_syncs, most_uploads = BUDGETS[name]
    assert syncs <= most_syncs and uploads <= most_uploads, f"{syncs}, {uploads}{traffic(name, family).seen}"


def test_every_call_has_a_budget():
    assert set(CALLS) - set(BUDGETS) <= {"rank", "nemo.attack", *JOBS, *LATER}


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "family"), list(pairs("w2w.invert_image")))
def test_an_inversion_uploads_no_basis(name, family):
    few, many = (
        sum(math.prod(note.shape) for note in traffic(name, family, steps).seen.notes if note.kind == UPLOAD)
        for steps in (2, 3)
    )
    assert 0 < many - few < 10_000, "numbers a step; the space's basis has 400 x 3,808"
