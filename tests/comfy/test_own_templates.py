"""The templates "... (your checkpoint)" on a small model of each transformer family.

Only what their notes say of transformers is changed. tests/full_size has them on full-size UNets.
"""

import re

import pytest
import torch
from vitrine_tests.comfy.tiny_checkpoints import WIDTHS
from vitrine_tests.comfy.tiny_user import Tiny
from vitrine_tests.lanes import EVERY_DAY

TEMPLATES = (
    "See what the model sees (your checkpoint)",
    "Find the same part (your checkpoint)",
    "Sample at twice the size (your checkpoint)",
    "Stop the model copying a picture (your checkpoint)",
    "Turn a folder of LoRAs into sliders (your checkpoint)",
    "Sample in one step (your checkpoint)",
)
WITHOUT_A_DERIVATIVE = ("anima", "Stop the model copying a picture (your checkpoint)")
"""Core's attention kernel has none, which the adversarial check needs; without it the graph runs."""


LONG = ("flux", "Stop the model copying a picture (your checkpoint)")
"""A search that finds no cure goes through all doses; Wan's ends at once."""


def of_each_family(workflows):
    """(family, workflow) of all, by day those of two families but the long one."""
    cases = [(family, workflow) for family in WIDTHS for workflow in workflows]
    night = {case for case in cases if case[0] not in EVERY_DAY or case == LONG}
    marked = [pytest.param(*case, marks=pytest.mark.nightly if case in night else ()) for case in cases]
    return pytest.mark.parametrize(("tiny", "workflow"), marked, indirect=["tiny"], scope="module")


@pytest.fixture(scope="module")
def tiny(request, comfy, tmp_path_factory):
    """A user with the small model of a family, whose loader every graph finds."""
    import comfy.sd as core

    user = Tiny(request.param, tmp_path_factory.mktemp(request.param), comfy)
    load, core.load_checkpoint_guess_config = core.load_checkpoint_guess_config, lambda *a, **k: (*user.parts, None)
    yield user
    core.load_checkpoint_guess_config = load


def shown(history, graph):
    previews = [i for i, node in graph.items() if node["class_type"] == "PreviewImage"]
    return previews and all(history["outputs"][i]["images"] for i in previews)


@of_each_family(TEMPLATES)
def test_the_template_runs(tiny, workflow):
    graph = tiny.template(workflow)
    history, error = tiny.run(graph)
    checks = [node["inputs"] for node in graph.values() if node["inputs"].get("attack_steps")]
    if (tiny.name, workflow) == WITHOUT_A_DERIVATIVE and checks:
        assert error and "a network that core can differentiate" in error, error
        for inputs in checks:
            inputs["attack_steps"] = 0
        history, error = tiny.run(graph)
    assert error is None, error
    assert shown(history, graph)


@of_each_family(TEMPLATES[:2])
def test_layers_of_a_unet_are_refused(tiny, workflow):
    """With the layers that are accepted in their place."""
    graph = tiny.template(workflow)
    for node in graph.values():
        node["inputs"].update({k: "up-*" for k, v in node["inputs"].items() if (k, v) == ("layers", "auto")})
    _, error = tiny.run(graph)
    assert error and re.search(r"address: given up-\*", error) and "layers of this model" in error, error


def test_a_video_has_no_score(comfy):
    """NEMO compares still pictures; a latent with several frames is refused, one frame is a picture."""
    from vitrine.engine.errors import VitrineError
    from vitrine.nodes.nemo import shape_of

    assert shape_of(torch.zeros(1, 16, 8, 12)) == shape_of(torch.zeros(1, 16, 1, 8, 12)) == (16, 8, 12)
    with pytest.raises(VitrineError, match="a video of 3 latent frames"):
        shape_of(torch.zeros(1, 16, 3, 8, 12))
