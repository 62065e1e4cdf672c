"""What a call returns is known to an editor, so that `.images` completes."""

import inspect
import typing

import pytest
from vitrine.engine import pipelines

CLASSES = [name for name in pipelines.__all__ if name.endswith("Pipeline")]
WITHOUT_PICTURES = ("Correspondence", "Segmentation", "ActivationTap")


@pytest.mark.parametrize("name", CLASSES)
def test_calls_say_what_they_return(name):
    call = getattr(pipelines, name).__call__
    kind = typing.get_type_hints(inspect.unwrap(call))["return"]
    assert kind is not typing.Any and typing.get_origin(kind) is not typing.Union
    if not name.startswith(WITHOUT_PICTURES):
        assert "images" in kind.__annotations__
    if name.startswith("ActivationTap"):
        assert {"activations", "pictures"} <= set(kind.__annotations__)
