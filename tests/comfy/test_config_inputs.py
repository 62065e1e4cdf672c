"""Node inputs are made from options, and settings from what a node is given."""

from dataclasses import dataclass
from typing import Annotated

import pytest


@pytest.fixture(scope="module")
def made(comfy):
    from vitrine.nodes import config_inputs

    return config_inputs


def test_each_kind_of_option_is_an_input(made):
    from comfy_api.latest import io
    from vitrine.engine.nemo import FewStepConfig, ProbeConfig, SearchConfig, VerifyConfig
    from vitrine.engine.w2w import SampleConfig

    effect, mode = made.inputs_of(SearchConfig, "effect_fraction", "mode")
    assert (effect.default, effect.min, effect.max, effect.step) == (0.98, 0.01, 1, 0.01)
    assert isinstance(mode, io.Combo.Input) and mode.options == ["parity", "chain", "fast"] and mode.default == "chain"
    assert mode.advanced and effect.advanced is None
    (seeds,) = made.inputs_of(ProbeConfig, "seeds", advanced=True, default=3)
    assert isinstance(seeds, io.Int.Input) and (seeds.default, seeds.min, seeds.max, seeds.advanced) == (3, 2, 64, True)
    (tau,) = made.inputs_of(VerifyConfig, "tau")
    assert (tau.default, tau.min) == (0.0, 0.0) and tau.tooltip.endswith(" 0: a score without a verdict.")
    guidance = made.input_of(FewStepConfig, "guidance", "cfg")
    assert guidance.id == "cfg" and guidance.step == 0.1
    spread, components = made.inputs_of(SampleConfig, "spread", "components")
    assert spread.max == 3
    assert (components.default, components.min) == (0, 0)


def test_the_label_of_an_input_is_its_id(comfy):
    pack = [node for name, node in comfy.nodes.NODE_CLASS_MAPPINGS.items() if name.startswith("Vitrine")]
    inputs = [entry for node in pack for entry in node.define_schema().inputs]
    assert len(pack) > 40 and len(inputs) > 200
    assert not [(entry.id, entry.display_name) for entry in inputs if entry.display_name not in (None, entry.id)]


def test_an_option_that_is_added_is_the_last_input(made, comfy):
    """One line in ``SearchConfig`` is an input of *Find Copying Neurons (NEMO)*, after those it had."""
    from vitrine.engine.nemo import SearchConfig
    from vitrine.engine.settings.option import Option

    @dataclass(frozen=True)
    class More(SearchConfig):
        patience: Annotated[int, Option("Attempts.", ge=1, top=9)] = 2

    inputs = made.inputs_of(More, without=("tau", "effect_fraction", "mode", "sample_steps"), optional=True)
    assert [entry.id for entry in inputs] == ["protocol", "patience"] and all(entry.optional for entry in inputs)
    assert (inputs[1].min, inputs[1].max, inputs[1].default) == (1, 9, 2)
    schema = comfy.nodes.NODE_CLASS_MAPPINGS["VitrineNEMOFindNeurons"].define_schema()
    assert {"theta", "k", "rows"}.isdisjoint(entry.id for entry in schema.inputs), "those are for Python"


def test_settings_come_from_what_a_node_is_given(made):
    from vitrine.engine.nemo import ProbeConfig, SearchConfig, VerifyConfig

    config = made.settings_from(SearchConfig, {"mode": "fast", "seeds": 3}, tau=0.5)
    assert config == SearchConfig(tau=0.5, mode="fast")
    assert made.settings_from(ProbeConfig, {"seeds": 3, "steps": 4}) == ProbeConfig(seeds=3), "steps of another class"
    assert made.settings_from(VerifyConfig, {"tau": 0.0}).tau is None
    assert made.settings_from(VerifyConfig, {"tau": 0.25}).tau == 0.25
