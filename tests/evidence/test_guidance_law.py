"""How ``resolution.guidance`` judges Eq. 4 from what sets of pictures show; the pictures themselves are drawn by it."""

import pytest
from vitrine.evidence.resolution.law_claims import SCALES, Look, judged


def table(best, sets=3):
    """FIDs with their lowest value at a scale."""
    return {scale: [Look(10 + abs(scale - best) + n, 1.0) for n in range(sets)] for scale in SCALES}


def test_it_holds_where_the_optimum_moves_as_the_law_says():
    result = judged({64: table(1.5), 128: table(2.0)})
    assert result.holds and result.value == pytest.approx(-0.5) and result.interval == (-0.5, -0.5)
    assert result.details["judged"] == {"kept": 1.5, "by the law": 2.0}


def test_a_best_scale_that_stays_is_a_miss():
    assert not judged({64: table(2.0), 128: table(2.0)}).holds


def test_one_set_of_the_other_opinion_is_enough():
    large = table(2.0)
    large[2.0][1] = Look(99.0, 1.0)
    assert not judged({64: table(1.5), 128: large}).holds


def test_where_no_guidance_is_best_the_law_says_nothing():
    result = judged({64: table(1.0), 128: table(2.0)})
    assert not result.holds and result.details["judged"] == {"kept": 1.0, "by the law": 1.0}


def test_a_scale_whose_double_was_not_drawn_is_not_judged():
    result = judged({64: table(5.0), 128: table(5.0)})
    assert result.details["64 px"]["lowest FID at scale"] == 5.0 and result.details["judged"]["kept"] == 3.0
