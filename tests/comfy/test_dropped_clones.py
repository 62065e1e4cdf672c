"""Clones of a MODEL that nodes make for themselves die with their last reference, not by Python's garbage collector.

Clones that die together by the collector leave ComfyUI a loaded network without an owner. From then on it collects all
garbage of the process, a second or more, each time any model is loaded.
"""

import gc
import json
import weakref

import pytest
from vitrine_tests.templates import FOLDER


@pytest.fixture
def uncollected():
    """Without the collector; called, it says which MODELs only the collector would have freed."""
    import comfy.model_patcher

    def garbage():
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        cyclic = [type(o).__name__ for o in gc.garbage if isinstance(o, comfy.model_patcher.ModelPatcher)]
        gc.garbage.clear()
        return cyclic

    gc.collect()
    gc.disable()
    yield garbage
    gc.enable()


def test_a_denoiser_lets_its_clone_go(comfy, uncollected):
    from vitrine.nodes.comfy import model as bridge

    model, _, _ = comfy.call("VitrineLoadPortraits", model="portraits, 64 px")
    clone = model.clone()
    gone, denoiser = weakref.ref(clone), bridge.denoiser_of(clone)
    assert denoiser.call
    del clone, denoiser
    assert gone() is None and not uncollected()


def test_a_panels_drags_leave_no_network_without_an_owner(comfy, uncollected):
    """Each drag drew with a clone of a clone, and took 1.1 s instead of 0.2 s once the collector had run."""
    from comfy.model_management import current_loaded_models
    from vitrine.nodes import w2w
    from vitrine.nodes.comfy import people

    space = comfy.call("VitrineLoadW2WSpace", space_file="portraits people (shipped)", components=0)[0]
    person = comfy.call("VitrineW2WSample", space=space, seed=4, spread=1.0, components=0, truncation=0.0, wanted="")[0]
    renderer = people.renderer_of(space, None, None, None, None, "")[0]
    panel = people.PanelSession(space, w2w.usual_map, person, lambda inputs: w2w.moved(space, person, inputs), renderer)
    for strength in (1.0, 2.0):
        assert people.portrait(panel, {"label_1": "beard", "strength_1": strength}, "", 7)["picture"]
    assert not uncollected()
    assert not [loaded for loaded in current_loaded_models if loaded.is_dead()]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", ["Pull sliders on a person (demo)", "Sample a person in one step (demo)", "Sample at twice the size (demo)"]
)
def test_a_run_leaves_no_clones_to_the_collector(comfy, uncollected, name):
    executor = comfy.executor()  # its cache of outputs is cyclic by itself, so it stays
    _, error = comfy.run(json.loads((FOLDER / "api" / f"{name}.json").read_text(encoding="utf-8")), executor)
    assert error is None and not uncollected()
