"""What a call returns is known to an editor, so that `.images` completes."""

import inspect
import typing

import pytest
from vitrine.engine import pipelines

CLASSES = [name for name in pipelines.__all__ if name.endswith("Pipeline")]


@pytest.mark.parametrize("name", CLASSES)
def test_calls_say_what_they_return(name):
    kind = typing.get_type_hints(inspect.unwrap(getattr(pipelines, name).__call__))["return"]
    assert "images" in kind.__annotations__


def test_a_tap_says_what_it_returns():
    kind = typing.get_type_hints(inspect.unwrap(pipelines.ActivationTapPipeline.tap))["return"]
    assert {"activations", "pictures"} <= set(kind.__annotations__)
