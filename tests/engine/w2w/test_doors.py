"""Sampling draws the same people by default at every door, as the space's own file says; models re-factored."""

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.portraits.shipped import PEOPLE_SPACE
from vitrine.engine.w2w import (
    DeltaSpace,
    LoraLayer,
    SampleConfig,
    fraction_kept,
    load_space,
    materialise,
    sample,
    usual_sampling,
    with_sampling,
)
from vitrine.engine.w2w.loras.low_rank import SMALL, refactor
from vitrine_tests.engine.small_loras import deltas, lora, same


# --- one default ----------------------------------------------------------------------------------------------------
def test_the_default_takes_attributes_together_where_there_are_directions(space):
    plain = sample(space, [0, 5])
    assert torch.equal(plain, sample(space, [0, 5], SampleConfig(attributes="joined")))
    assert not torch.equal(plain, sample(space, [0, 5], SampleConfig(attributes="gaussian")))
    from dataclasses import replace

    bare = replace(space, directions={})
    assert torch.equal(sample(bare, [0]), sample(bare, [0], SampleConfig(attributes="gaussian")))


def test_a_space_says_how_it_is_drawn(space, tmp_path):
    wanted = SampleConfig(components=9, attributes="joined", emphasis=1.5, inherit=0.4)
    told = with_sampling(space, wanted)
    again = load_space(told.save(tmp_path / "s.w2w.safetensors"))
    assert usual_sampling(again) == wanted and usual_sampling(space) == SampleConfig()
    assert torch.equal(sample(told, [3]), sample(space, [3], wanted))
    assert usual_sampling(told, inherit=None, emphasis=1.0) == SampleConfig(
        components=9, attributes="joined", emphasis=1.0, inherit=0.4
    )
    assert told.identity == space.identity, "models stay models of it"
    with pytest.raises(VitrineError, match="inherit"):
        usual_sampling(space, inherit=2.0)


def test_the_spread_covers_joined_attributes_too(space):
    assert not sample(space, [1], SampleConfig(spread=0.0, attributes="joined")).any()
    half, whole = (sample(space, [1], SampleConfig(spread=f, attributes="joined")) for f in (0.5, 1.0))
    torch.testing.assert_close(half, whole / 2, atol=1e-4, rtol=1e-4)


def test_the_shipped_people_stay_who_they_are():
    """Seed 0, as New Person (W2W) has drawn it from the first version on."""
    shipped = load_space(PEOPLE_SPACE)
    assert usual_sampling(shipped) == SampleConfig()
    row = sample(shipped, [0])[0]
    assert torch.equal(row, sample(shipped, [0], SampleConfig(attributes="joined"))[0])


# --- factors --------------------------------------------------------------------------------------------------------
def test_large_layers_are_never_decomposed_whole(monkeypatch):
    """12 LoRAs of rank 64 on one layer of 640 x 640: their sum has 768 factors, more than the layer has rows."""
    loras = []
    for i in range(12):
        g = torch.Generator().manual_seed(i)
        down, up = torch.randn(64, 640, generator=g) / 25, torch.randn(640, 64, generator=g) * 0.05
        loras.append({"mid_block.attentions.0.to_q": LoraLayer(down, up, 32.0)})
    space = DeltaSpace.of(loras)
    sides, plain = [], torch.linalg.svd

    def counted(matrix, **how):
        sides.append(min(matrix.shape))
        return plain(matrix, **how)

    monkeypatch.setattr(torch.linalg, "svd", counted)
    beta = sample(space, [0])[0]
    exact, wanted = materialise(space, beta), space.stacked(beta)
    assert same(deltas(exact), deltas(wanted), 1e-5) and max(v.rank for v in exact.values()) == 640
    member = materialise(space, space.coefficients[3])
    assert same(deltas(member), deltas(loras[3]), 1e-5) and max(v.rank for v in member.values()) == 64
    few = materialise(space, beta, 64)
    assert {v.rank for v in few.values()} == {64} and max(sides) < SMALL
    monkeypatch.undo()
    s = torch.linalg.svdvals(next(iter(deltas(wanted).values())))
    best = float(s[:64].square().sum() / s.square().sum())
    assert best - 0.02 < fraction_kept(exact, few) <= best + 1e-6


def test_a_rank_is_kept_in_factors_mode_too(space):
    beta = sample(space, [2])[0]
    with pytest.raises(VitrineError, match="rank"):
        materialise(space, beta, 0)
    wide = {p: LoraLayer(v.down, v.up, 4.0) for p, v in lora(1, rank=4).items()}
    narrow = {p: refactor(v, 2) for p, v in wide.items()}
    assert (
        {v.rank for v in narrow.values()} == {2}
        and 0 < fraction_kept(wide, narrow) < 1
        and fraction_kept(wide, wide) == 1
    )
    assert all(torch.equal(v.up, space.lora(beta)[p].up) for p, v in materialise(space, beta, 3).items())
