"""``repr`` of every artefact is one short line, whatever is in it: a space's was 156,621 characters."""

import dataclasses
import importlib
import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vitrine.engine.settings.one_line import LONGEST, brief, one_line

PACKAGES = ("activations", "control", "copies", "emd", "nemo", "w2w", "w2w.loras.lora_folders", "w2w.space.manifest")
LONG = {"tensor": torch.zeros(300, 300), "text": "x" * 900, "table": {str(n): n for n in range(900)}}


def public():
    """Dataclasses of the methods that hold tensors or collections: settings have neither."""
    kinds = {}
    for package in PACKAGES:
        module = importlib.import_module(f"vitrine.engine.{package}")
        for name in getattr(module, "__all__", vars(module)):
            kind = getattr(module, name)
            if inspect.isclass(kind) and dataclasses.is_dataclass(kind) and kind.__module__.startswith("vitrine"):
                kinds[name] = kind
    return kinds


ARTEFACTS = (
    "Agreement", "Built", "Calibration", "CheckedPrompt", "Copies", "CopyCheck", "DeltaSpace", "Encoded", "FolderLook",
    "FolderScan", "Inversion", "LoraReport", "Manifest", "NeuronSet", "NeuronStatistics", "PCABasis", "Posterior",
    "Preset", "Quality", "Result", "SampleThreshold", "Score", "ScoreThreshold", "Slider", "SpaceMap", "StudentPreset",
    "StudentSampling", "TapInfo", "Verification", "W2WModel",
)  # fmt: skip
"""Spaces, models of them, neurons, presets, calibrations, students, reports: what is saved, or comes back of a call."""


def filled(kind, value):
    """An instance whose fields are all ``value``, without its checks."""
    made = object.__new__(kind)
    for field in dataclasses.fields(kind):
        object.__setattr__(made, field.name, value)
    return made


@pytest.mark.parametrize("name", ARTEFACTS)
def test_artefacts_are_one_line(name):
    kind = public()[name]
    for value in LONG.values():
        text = repr(filled(kind, value))
        assert text.startswith(f"{name}(") and "\n" not in text and len(text) <= LONGEST < 200


LEAVES = st.none() | st.integers() | st.floats() | st.text()


@given(st.recursive(LEAVES, lambda inner: st.lists(inner) | st.tuples(inner)))
def test_any_value_is_brief(value):
    assert len(brief(value)) <= 40 and "\n" not in brief(value)


def test_a_space_is_one_line():
    from vitrine.engine.portraits.shipped import PEOPLE_SPACE
    from vitrine.engine.w2w import load_space

    text = repr(load_space(PEOPLE_SPACE))
    assert "\n" not in text and len(text) <= LONGEST


def test_what_is_small_is_shown():
    @one_line
    @dataclasses.dataclass
    class Pair:
        first: float
        second: torch.Tensor
        hidden: str = dataclasses.field(default="", repr=False)

    assert repr(Pair(0.5, torch.zeros(2, 3))).endswith("Pair(first=0.5, second=<(2, 3) float32>)")
