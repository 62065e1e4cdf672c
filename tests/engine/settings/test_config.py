"""The one Config: nested, infinite defaults, and files from before the rare settings were split off."""

import json
import math
from dataclasses import dataclass

import pytest
from vitrine.engine.errors import VitrineError
from vitrine.engine.settings.config import Config


@dataclass(frozen=True)
class Rare(Config):
    rate: float = 0.1
    pairs: tuple = (1, (2, 3))


@dataclass(frozen=True)
class Settings(Config):
    steps: int
    least: float = -math.inf
    advanced: Rare = Rare()


@pytest.mark.parametrize("settings", [Settings(3), Settings(3, 0.0, Rare(0.2, ((4, 5),)))])
def test_round_trip_through_json(settings):
    text = json.dumps(settings.to_dict(), allow_nan=False)
    assert Settings.from_dict(json.loads(text)) == settings


def test_rare_settings_may_stand_flat():
    assert Settings.from_dict({"steps": 2, "rate": 0.3}) == Settings(2, advanced=Rare(0.3))
    both = {"steps": 2, "rate": 0.3, "advanced": {"pairs": [1]}}
    assert Settings.from_dict(both) == Settings(2, advanced=Rare(0.3, (1,)))


@pytest.mark.parametrize(
    "values",
    [[1], {"steps": 1, "speed": 1}, {"steps": 1, "advanced": 3}, {"rate": 2}, {"steps": 1, "advanced": {"speed": 1}}],
)
def test_what_is_no_setting_is_refused(values):
    with pytest.raises(VitrineError):
        Settings.from_dict(values)
