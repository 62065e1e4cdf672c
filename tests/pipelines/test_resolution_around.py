"""Resolution transfer around every transformer's own pipeline: whole sampling runs."""

import pytest
import torch
from vitrine.engine.pipelines import ResolutionTransferPipeline
from vitrine.engine.resolution import ResolutionTransferConfig
from vitrine_tests.pipelines.encoded import SOURCES, drawn, source

POSITIONS = {"sd3": "grid", "pixart": "grid"}
TRANSFORMERS = [name for name in SOURCES if name != "sdxl"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_the_trained_size_is_untouched_and_others_change(name):
    stock, told = source(name)
    side = told["height"]
    train, size = (side, side), (side * 3 // 2, 2 * side)
    bare = {k: v for k, v in told.items() if k not in ("height", "width")}
    before, large = drawn(stock, told), drawn(stock, told | {"width": size[0], "height": size[1]})
    same = ResolutionTransferPipeline.from_pipe(stock, ResolutionTransferConfig(train, train))
    assert torch.equal(drawn(same, bare), before)
    wide = ResolutionTransferPipeline.from_pipe(stock, ResolutionTransferConfig(size, train))
    assert wide.plan.positions == POSITIONS.get(name, "rope_pi") and wide.plan.ratio == pytest.approx(3**0.5)
    moved = drawn(wide, bare)
    assert moved.shape == large.shape and bool(torch.isfinite(moved).all())
    places = ResolutionTransferConfig(size, train, "none")
    placed = drawn(ResolutionTransferPipeline.from_pipe(stock, places), bare)
    if name == "pixart":  # diffusers fits its table into the built size by itself: at that size `grid` is no news
        assert torch.equal(placed, large)
    pairs = ((moved, large),) if name == "pixart" else ((moved, large), (placed, large), (moved, placed))
    change = [float((a - b).abs().max()) for a, b in pairs]
    assert min(change) > 1e-4 * float(large.abs().max()), ("positions and schedule each act", change)
    assert torch.equal(drawn(stock, told), before), "and it is untouched again"


def test_an_attribute_that_is_missing_is_named_itself():
    """Not "has no attribute 'plan'", as if the plan itself were unknown."""
    stock, _ = source("wan")
    wide = ResolutionTransferPipeline.from_pipe(stock, ResolutionTransferConfig((64, 64), (32, 32)))
    wide.scheduler = None
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'config'"):
        wide.plan  # noqa: B018 - worked out anew at each look
