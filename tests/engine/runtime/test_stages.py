"""Stages of a long command: their numbers, and the time left by the speed so far."""

import itertools

import pytest
from vitrine.engine.errors import did_you_mean, refuse
from vitrine.engine.runtime.stages import Stages


def lines(expected, seconds, capsys, **more):
    """What is printed when each stage takes so many seconds."""
    stages = Stages(expected, clock=itertools.accumulate([0.0, 0.0, *seconds]).__next__, **more)
    for name in list(expected)[: len(seconds) + 1]:
        stages.begin(name)
    return capsys.readouterr().out.splitlines()


def test_the_time_left_follows_the_measured_speed(capsys):
    three = {"read": 100, "search": 300, "write": 200}
    assert lines(three, [200, 600], capsys, trust=0.001) == [
        "1 of 3  read: about 10 min left",
        "2 of 3  search: about 17 min left",
        "3 of 3  write: about 7 min left",
    ]
    assert lines(three, [200], capsys, trust=100)[1] == "2 of 3  search: about 12 min left", "half of it is believed"


def test_another_unit_than_seconds_needs_one_stage_first(capsys):
    assert lines({"rows": 10, "more": 20}, [40], capsys) == ["1 of 2  rows", "2 of 2  more: about 80 s left"]


def test_what_an_earlier_call_finished_says_nothing_of_the_speed(capsys):
    assert lines({"a": 100, "b": 100, "c": 100}, [0.1, 100], capsys, trust=10)[1:] == [
        "2 of 3  b: about 3 min left",
        "3 of 3  c: about 100 s left",
    ]


def test_without_expectations_only_the_names(capsys):
    assert lines({"a": None, "b": None}, [60], capsys) == ["1 of 2  a", "2 of 2  b"]
    assert lines({"only": None}, [], capsys) == ["only"] and lines({"a": 1}, [], capsys, shown=False) == []
    with pytest.raises(ValueError):
        Stages({"a": 1}).begin("b")


@pytest.mark.parametrize("accepted", [["vitrine", "nemo"], "vitrine, nemo", {"nemo": 1}, {"vitrine", "nemo"}])
def test_a_refusal_names_the_nearest_of_the_accepted(accepted):
    assert str(refuse("protocol", "Nmo", accepted, "pick one")).endswith(". Did you mean nemo? pick one")
    assert "Did you mean" not in str(refuse("protocol", "beard", accepted, "pick one"))


def test_texts_and_numbers_suggest_nothing():
    assert "mean" not in str(refuse("steps", 9, [1, 2, 90], "choose")) + str(refuse("a", "1 or mor", "1 or more", "x"))
    assert did_you_mean("a\x1bbc", ["a\x1bbd"]) == "Did you mean a\\x1bbd? ", "escapes as everywhere"
