"""The people of the copy check's claim."""

from vitrine.evidence.nemo.copy_claims import MEASURED, TUNING


def test_people_that_were_tuned_on_are_never_measured():
    assert not set(range(TUNING, TUNING + 100)) & set(range(MEASURED, MEASURED + 100))
