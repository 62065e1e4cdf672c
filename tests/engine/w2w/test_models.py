"""Directions, sampling, editing: each against the published formulas written out plainly here."""

import copy
import math

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.w2w import (
    BatchedLora,
    DeltaSpace,
    EditConfig,
    LoraLayer,
    SampleConfig,
    blend,
    closeness,
    conditioned,
    difference,
    direction,
    edit,
    edited_lora,
    fraction_inside,
    materialise,
    nearest,
    quality,
    reach,
    sample,
    score,
    with_directions,
    without,
)
from vitrine.engine.w2w.space.directions import published_direction, spread_along

pytestmark = pytest.mark.rounding


# --- directions (checks 9, 10) ------------------------------------------------------------------------------------
def test_closed_form_equals_the_pseudo_inverse(space):
    y = torch.randint(0, 2, (space.count,), generator=torch.Generator().manual_seed(3)).float()
    p = space.coefficients[:, :20]
    plain = torch.linalg.pinv(p.double()) @ y.double()  # the official get_direction
    found = published_direction(space, y, 20)
    assert (found[:20] - plain).norm() / plain.norm() < 1e-4
    assert torch.equal(found[20:], torch.zeros(space.dimension - 20))  # return_dim pads with zeros
    signs = published_direction(space, 2 * y - 1, 20)
    torch.testing.assert_close(signs, 2 * found, atol=1e-6, rtol=1e-4)


def test_debias_one_after_another_and_together(space):
    g = torch.Generator().manual_seed(4)
    n, others = torch.randn(20, generator=g), list(torch.randn(3, 20, generator=g))
    plain = n.clone()
    for d in others:
        plain = plain - (plain @ d) / (d.norm() ** 2) * d
    found = without(n, others, "official_sequential")
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=0)

    def cosines(v):
        return [abs(float(torch.nn.functional.cosine_similarity(v, d, dim=0))) for d in others]

    assert cosines(found)[-1] < 1e-6 < max(cosines(found)[:-1])
    assert max(cosines(without(n, others))) < 1e-6


def test_a_direction_is_one_deviation_long(space):
    for label in space.directions:
        d = space.directions[label]
        scores = score(d, space.coefficients)
        assert abs(float(scores.std()) - 1) < 1e-3
        assert abs(float(d.norm()) - spread_along(space, d)) < 1e-5
        assert abs(float(scores.abs().max()) - reach(space, d)) < 1e-3
        assert abs(float(score(d, 2.5 * d)) - 2.5) < 1e-5


@pytest.mark.parametrize("method", ["least_squares", "logistic", "means"])
def test_methods_find_a_known_attribute(space, method):
    y = (space.coefficients[:, 0] > 0).float()
    found = direction(space, y, method, 12)
    assert abs(float(torch.nn.functional.normalize(found, dim=0)[0])) > 0.7
    told = quality(space, {"first": y, "noise": (torch.arange(space.count) % 2).float()}, method, 12)
    assert told.accuracy["first"] > 0.8 > told.accuracy["noise"]
    assert told.entanglement.shape == (2, 2) and abs(float(told.entanglement[0, 0]) - 1) < 1e-5


def test_unknown_labels_are_left_out(space):
    y = (space.coefficients[:, 0] > 0).float()
    y[::3] = torch.nan
    assert abs(float(torch.nn.functional.normalize(direction(space, y, components=8), dim=0)[0])) > 0.7
    with pytest.raises(VitrineError, match="models of two kinds"):
        direction(space, torch.ones(space.count))
    with pytest.raises(VitrineError, match="labels"):
        direction(space, torch.ones(3))


# --- sampling (check 8) -------------------------------------------------------------------------------------------
def test_official_draw_is_a_scalar_loop(space):
    """The published sample_weights: one torch.normal a component, global generator."""
    torch.manual_seed(11)
    mean, std = space.coefficients.mean(0), space.coefficients.std(0)
    plain = torch.stack([torch.normal(mean[k], std[k]) for k in range(20)])
    found = sample(space, [11], SampleConfig(components=20, rng="official"))[0, :20]
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-4)
    vector = sample(space, [11], SampleConfig(components=20, attributes="gaussian"))[0, :20]
    assert (vector - plain).abs().max() > 0.1


def test_moments_and_independence_of_the_batch(space):
    rows = (
        sample(space, range(2000), SampleConfig(components=10, attributes="gaussian"))[:, :10] / space.deviations[:10]
    )
    assert rows.mean(0).abs().max() < 4 / math.sqrt(2000)
    assert (rows.var(0) - 1).abs().max() < 4 * math.sqrt(2 / 2000)
    assert torch.equal(sample(space, [5, 9])[1], sample(space, [9])[0])
    trimmed = SampleConfig(components=10, truncation=1.5, attributes="gaussian")
    cut = sample(space, range(300), trimmed)[:, :10] / space.deviations[:10]
    assert cut.abs().max() <= 1.5 + 1e-5
    assert torch.equal(sample(space, [1], SampleConfig(spread=0.0)), torch.zeros(1, space.dimension))


def test_conditioned_hits_its_targets_by_the_least_change(space):
    beta = sample(space, [0, 1], SampleConfig(components=space.dimension))
    wanted = {"odd": 1.5, "big": -2.0}
    found = conditioned(space, beta, wanted)
    for label, value in wanted.items():
        got = score(space.directions[label], found)
        torch.testing.assert_close(got, torch.full((2,), value), atol=1e-3, rtol=0)
    # any other way to the same targets is longer in units of the deviations
    free = without(torch.randn(space.dimension), list(space.directions.values())[:2]) * 0.05
    own = ((found - beta) / space.deviations).norm(dim=1)
    other = ((found - beta + free) / space.deviations).norm(dim=1)
    assert (own < other).all()


def test_neighbours(space):
    (near,) = nearest(space, space.coefficients[7:8], 3)
    assert near[0].name == "m07" and near[0].cosine > 0.999 and len(near) == 3
    assert -1 < closeness(space) < 1


# --- editing (checks 6, 7, 11, 23) --------------------------------------------------------------------------------
def test_zero_edit_is_the_same_bits(space):
    beta = sample(space, [3])[0]
    assert torch.equal(edit(space, beta, {"odd": 0.0, "big": 0.0}), beta)


def test_edit_in_weights_is_the_published_sum(space):
    beta, n = sample(space, [3])[0], space.directions["odd"]
    plain = space.decode(beta) + 1.7 * space.scale * (n @ space.components)
    torch.testing.assert_close(space.decode(edit(space, beta, {"odd": 1.7})), plain, atol=1e-6, rtol=0)


def test_protected_labels_keep_their_score(space):
    beta = sample(space, [3])[0]
    moved = edit(space, beta, {"odd": 2.0}, EditConfig(protect=("big", "tall")))
    for label in ("big", "tall"):
        d = space.directions[label]
        assert abs(float(score(d, moved) - score(d, beta))) < 1e-4
    assert abs(float(score(space.directions["odd"], moved) - score(space.directions["odd"], beta))) > 0.5


def test_materialised_equals_peft_style_forward(space, unet):
    """Check 6: the runtime way (W x + 27 B A x) and the merged weights give one picture."""
    beta = sample(space, [5])[0]
    x, text, t = torch.randn(2, 4, 8, 8), torch.randn(2, 5, 12), torch.tensor([10, 700])
    with BatchedLora(unet, space.manifest, space.decode(beta)[None]):
        runtime = unet(x, t, text).sample
    merged = copy.deepcopy(unet)
    for path, layer in space.lora(beta).items():
        merged.get_submodule(path).weight += layer.delta()
    assert (runtime - unet(x, t, text).sample).abs().max() > 0.05
    torch.testing.assert_close(merged(x, t, text).sample, runtime, atol=1e-4, rtol=0)


def test_difference_lora(space):
    a, b = (space.lora(row) for row in sample(space, [1, 2]))
    for path, layer in difference(a, b).items():
        torch.testing.assert_close(layer.delta(), a[path].delta() - b[path].delta(), atol=1e-5, rtol=0)
        assert layer.rank == 2
    assert difference(a, a) == {}


def test_edits_of_some_blocks_only(space):
    beta = sample(space, [1])[0]
    found = edited_lora(space, beta, {"odd": 2.0}, EditConfig(blocks=("up_blocks",)))
    plain, full = space.lora(beta), edited_lora(space, beta, {"odd": 2.0})
    for path in found:
        wanted = full if path.startswith("up_blocks") else plain
        assert torch.equal(found[path].up, wanted[path].up)


def test_blend_and_share_inside(space, loras):
    a, b = sample(space, [1, 2])
    torch.testing.assert_close(blend([a, b], [3, 1]), 0.75 * a + 0.25 * b)
    with pytest.raises(VitrineError, match="weights"):
        blend([a, b], [1, -1])
    g = torch.Generator().manual_seed(999)
    foreign = {
        p: LoraLayer(torch.randn(v.down.shape, generator=g), torch.randn(v.up.shape, generator=g), 1.0)
        for p, v in space.lora(a).items()
    }
    assert fraction_inside(space, foreign) < 0.2 < 0.99 < fraction_inside(space, space.lora(a))
    delta = DeltaSpace.of(loras(12))
    assert fraction_inside(delta, foreign) < 0.1 and fraction_inside(delta, delta.lora(sample(delta, [0])[0])) > 0.99


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"strengths": {"beard": 1.0}}, "beard"),
        ({"strengths": {"odd": float("nan")}}, "strength"),
        ({"strengths": {"odd": 1.0}, "config": EditConfig(protect=("odd",))}, "protect"),
    ],
)
def test_bad_edits_are_refused(space, given, told):
    with pytest.raises(VitrineError, match=told):
        edit(space, torch.zeros(space.dimension), **given)


def test_delta_spaces_do_the_same_things(loras):
    made = loras(12)
    space = DeltaSpace.of(made, [f"m{i}" for i in range(12)])
    space = with_directions(space, {"odd": direction(space, (torch.arange(12) % 2).float())})
    beta = sample(space, [0])[0]
    assert torch.equal(edit(space, beta, {"odd": 0}), beta)
    lora = edited_lora(space, beta, {"odd": 1.0}, rank=4)
    assert all(layer.rank == 4 for layer in lora.values())
    assert nearest(space, space.coefficients[3:4])[0][0].name == "m3"


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e308, 1e30])
def test_no_model_is_made_of_what_is_no_number(space, value):
    """1e308 times the spread was infinite, and a LoRA of NaN came out."""
    with pytest.raises(VitrineError, match="spread"):
        sample(space, [0], SampleConfig(spread=value))
    row = sample(space, [0])[0]
    with pytest.raises(VitrineError, match="strength of"):
        edit(with_directions(space, {"hat": torch.ones(space.dimension)}), row[None], {"hat": value})
    with pytest.raises(VitrineError, match="coefficients: given"):
        materialise(space, row * (value if math.isnan(value) else math.inf))
    with pytest.raises(VitrineError, match="seeds: given none"):
        sample(space, [])
