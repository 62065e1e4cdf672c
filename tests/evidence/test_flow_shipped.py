"""The shipped flow model, in small: prompts are followed and memorized pictures come back, one seed each.

``vitrine reproduce portraits.quality portraits.memorized --model engine/portraits/weights/flow`` measures both in full.
"""

import pytest
from vitrine.engine.portraits import caption, sample_scenes
from vitrine.engine.portraits.flow import FLOW_WEIGHTS, load_flow_portraits
from vitrine.evidence.portraits.classifier import load_classifier
from vitrine.evidence.portraits.quality import attribute_accuracy, look, measure_copies
from vitrine.evidence.portraits.sampling import sample_images

SAMPLES = 16
"""160 attributes; at 99.4 %, which the card measured, 95 % is missed once in 100,000 times."""


@pytest.fixture(scope="module")
def model():
    return load_flow_portraits(FLOW_WEIGHTS)


@pytest.mark.nightly
def test_prompted_attributes_are_shown(model):
    scenes = sample_scenes(range(7_950_000, 7_950_000 + SAMPLES))
    images = sample_images(model, caption(scenes), list(range(SAMPLES)), steps=30, guidance=3.0)
    shown = attribute_accuracy(look(load_classifier(), images), scenes)
    assert sum(shown.values()) / len(shown) >= 0.95, shown


@pytest.mark.nightly
def test_memorized_pictures_come_back(model):
    copies = measure_copies(model, seeds=1)
    assert len(copies) == 8 and sum(copy.copied for copy in copies) >= 6, copies
    assert not any(copy.control_copied for copy in copies)
