"""What a refusal looks like to who reads it."""

import torch
from vitrine.engine.errors import readable, refuse


def test_values_are_written_for_readers():
    said = str(refuse("model", ("UNet2DConditionModel", 1280), ("factors", "delta"), "choose"))
    assert said == "model: given UNet2DConditionModel, 1280; accepted: factors, delta. choose"
    assert readable((1, 4, 8, 8)) == "(1, 4, 8, 8)" and readable([0.5, 2]) == "[0.5, 2]"
    assert readable(((3, 8), None, torch.float16, dict)) == "(3, 8), none, float16, dict"
    assert readable({"a": [], "b": ("c",)}) == "a none, b c" and readable(()) == "none" and readable(True) == "True"
