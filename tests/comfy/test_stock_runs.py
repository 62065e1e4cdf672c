"""Every node of core that changes a MODEL, before our nodes and behind them, in a run: the plain run, and the rows."""

import pytest
from vitrine.engine.errors import VitrineError
from vitrine_tests.comfy.test_sampling_graphs import (
    ByHand,
    asks_for_nothing,
    blocked,
    same,
    samples,
    scene,  # noqa: F401 - a fixture
    tapped,
)
from vitrine_tests.comfy.test_stock_wrappers import ON_A_FORWARD, ON_A_RUN
from vitrine_tests.lanes import nightly_but

WITHOUT_TIMESTEPS = {"ModelSamplingContinuousEDM", "ModelSamplingContinuousV", "ModelSamplingStableCascade"}
"""A late model begins at a timestep, which these models do not have."""
NO_NEGATIVE = {"CFGOverride", "SkipLayerGuidanceDiTSimple"}
"""Their runs have the prompt alone."""
NAMES = [name for name in (*ON_A_RUN, *ON_A_FORWARD) if not name.startswith("LoraLoader")]


@pytest.mark.parametrize("first", ["ours", "theirs"])
@pytest.mark.parametrize("name", nightly_but(NAMES, ["Mahiro"]))
def test_a_run_with_a_stock_node(scene, name, first):  # noqa: F811
    if name not in scene.comfy.nodes.NODE_CLASS_MAPPINGS:
        pytest.skip("not in this ComfyUI")

    def patched(model):
        return scene.core(name, model=model)[0]

    def run(change):
        """The plain run's latents with ``change`` on the MODEL, on either side of the stock node."""
        model = patched(change(scene.model)) if first == "ours" else change(patched(scene.model))
        return samples([scene.sample(model, scene.empty())])

    plain, recorders = run(lambda model: model), []

    def tap(model):
        watched, recorder = tapped(scene, asks_for_nothing(scene, model))
        recorders.append(recorder)
        return watched

    if name in WITHOUT_TIMESTEPS:
        with pytest.raises(VitrineError, match="timesteps"):
            run(tap)
    else:
        assert same(run(tap), plain)
        halves = {"cond"} if name in NO_NEGATIVE else {"cond", "uncond"}
        assert [set(halves_of) for halves_of in recorders[0].record.values()] == [halves] * 3
    found = run(lambda model: blocked(scene, model, start_percent=0.3))
    assert same(found, run(lambda model: ByHand(scene).blocks(model, 0.3))) and not same(found, plain)
