"""Renamed functions and classes still import under their former names, with a warning."""

import importlib

import pytest

FORMER = {
    "engine.diffusion.sampling": {"walk": "sampling_loop"},
    "engine.activations.ranking": {"rank_places": "rank_sites", "spatial_places": "spatial_sites"},
    "engine.emd": {"Gap": "ScoreDifference", "StudentContract": "StudentPreset", "score_gap": "score_difference"},
    "engine.emd.student_preset": {"StudentContract": "StudentPreset"},
    "engine.control": {"delta_share": "weighted_delta"},
}


@pytest.mark.parametrize("module", FORMER)
def test_a_former_name_is_the_new_object(module):
    loaded = importlib.import_module(f"vitrine.{module}")
    for old, new in FORMER[module].items():
        with pytest.warns(DeprecationWarning, match=f"now called {new}"):
            assert getattr(loaded, old) is getattr(loaded, new)
    with pytest.raises(AttributeError, match="no_such_name"):
        loaded.no_such_name  # noqa: B018
