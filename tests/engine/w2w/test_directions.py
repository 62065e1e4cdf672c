"""Directions from several labels at once, and models drawn along them, where the labels' effect is known."""

import numpy as np
import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.w2w import SampleConfig, joint_directions, sample, with_directions
from vitrine.engine.w2w.space.directions import beats_chance, score
from vitrine.engine.w2w.space.manifest import LoraLayer, Manifest
from vitrine.engine.w2w.space.principal_components import Matrix, principal_components
from vitrine.engine.w2w.space.space import WeightSpace

pytestmark = pytest.mark.rounding
D, EXCLUSIVE = 600, [("bald", "curly")]


def with_pattern(n, noise=0.5, seed=0):
    """n models of hair (bald, curly or neither), a beard that bald heads have more often, and who else they are."""
    g = torch.Generator().manual_seed(seed)
    hair, draw = torch.randint(3, (n,), generator=g), torch.rand(n, generator=g)
    table = {"bald": (hair == 0).float(), "curly": (hair == 1).float()}
    table["beard"] = (draw < torch.where(hair == 0, 0.7, 0.3)).float()
    patterns = {k: torch.randn(D, generator=g) for k in table}
    rows = sum(table[k][:, None] * patterns[k] for k in table) + noise * torch.randn(n, D, generator=g)
    rows = rows + torch.randn(n, 8, generator=g) @ torch.randn(8, D, generator=g)
    made = principal_components(Matrix(rows))
    lora = {"only.to_q": LoraLayer(torch.zeros(1, D - 32), torch.zeros(32, 1), 27.0)}
    parts = (made.mean, made.scale, made.basis, made.singular_values, made.coefficients)
    return WeightSpace(Manifest.of(lora), *parts, n, tuple(f"m{i}" for i in range(n))), table, patterns


def in_weights(space, d):
    return space.decode(d[None])[0] - space.decode(torch.zeros_like(d)[None])[0]


def cosine(a, b):
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def test_what_goes_along_with_a_label_is_left_alone():
    space, table, patterns = with_pattern(400)
    found = joint_directions(space, table, EXCLUSIVE)
    assert cosine(in_weights(space, found["beard"]), patterns["beard"]) > 0.97
    bearded = table["beard"] > 0
    apart = space.coefficients[bearded].mean(0) - space.coefficients[~bearded].mean(0)  # mixes bald heads in
    assert cosine(in_weights(space, apart), patterns["beard"]) < 0.97


def test_exclusive_labels_are_traded_for_each_other():
    """Towards bald: away from what others have on their heads; without the group, away from the unnamed hair only."""
    space, table, patterns = with_pattern(400)
    traded = in_weights(space, joint_directions(space, table, EXCLUSIVE)["bald"])
    added = in_weights(space, joint_directions(space, table)["bald"])
    mixed = patterns["bald"] - 0.5 * patterns["curly"]
    assert cosine(traded, mixed) > 0.95 > cosine(added, mixed) + 0.05
    assert cosine(added, patterns["bald"]) > 0.95 > cosine(traded, patterns["bald"]) + 0.05


def test_equals_the_formula_written_out():
    space, table, _ = with_pattern(90)
    y = np.stack([v.numpy() - v.numpy().mean() for v in (table["beard"], table["bald"], table["curly"])], 1)
    y = y.astype(np.float64)
    p = space.coefficients.double().numpy()
    p = p - p.mean(0)
    shrunk = []
    for k in range(p.shape[1]):
        slope, left, *_ = np.linalg.lstsq(y, p[:, k], rcond=None)
        error = left[0] / (len(y) - 4) * np.linalg.inv(y.T @ y)[0, 0]  # squared standard error of the slope
        shrunk.append(slope[0] * max(0.0, 1 - error / slope[0] ** 2))
    found = joint_directions(space, table)["beard"].double().numpy()
    np.testing.assert_allclose(found / np.linalg.norm(found), shrunk / np.linalg.norm(shrunk), atol=1e-6)


def test_shrinking_brings_few_models_nearer_to_the_truth():
    gains = []
    for seed in range(5):
        space, table, patterns = with_pattern(40, noise=2.0, seed=seed)
        y = torch.stack([v - v.mean() for v in table.values()], 1).double()
        plain = torch.linalg.lstsq(y, space.coefficients.double()).solution[2].float()
        ours = joint_directions(space, table)["beard"]
        gains.append([cosine(in_weights(space, d), patterns["beard"]) for d in (ours, plain)])
    ours, plain = np.mean(gains, 0)
    assert ours > plain + 0.01


def test_numbers_are_labels_too_and_unknown_ones_count_as_average():
    space, table, patterns = with_pattern(400)
    table["beard"][::7] = float("nan")
    found = joint_directions(space, table | {"height": torch.randn(400)})
    assert cosine(in_weights(space, found["beard"]), patterns["beard"]) > 0.95
    assert float(score(found["beard"], space.coefficients).std()) == pytest.approx(1, rel=0.01)


def test_a_slider_at_chance_is_useless():
    """Guessing gives 60 % of ten models often, of a thousand never."""
    assert not beats_chance(0.33, 8) and not beats_chance(0.6, 10)
    assert beats_chance(0.6, 1000) and beats_chance(0.9, 20)


def test_what_is_refused():
    space, table, _ = with_pattern(30)
    with pytest.raises(VitrineError, match="one value for all models"):
        joint_directions(space, table | {"same": torch.ones(30)})
    with pytest.raises(VitrineError, match="labels"):
        joint_directions(space, {"short": torch.ones(3)})
    many = {f"l{i}": torch.rand(30) for i in range(29)}
    with pytest.raises(VitrineError, match="more than 30"):
        joint_directions(space, many)


def test_joined_samples_have_one_models_attributes_and_a_share_of_its_rest():
    space, table, _ = with_pattern(200)
    space = with_directions(space, joint_directions(space, table, EXCLUSIVE))
    directions = torch.stack(list(space.directions.values()), 1).double().numpy()
    inside = directions @ np.linalg.pinv(directions)  # projector onto their span, written another way
    config = SampleConfig(components=space.dimension, attributes="joined", emphasis=1.5, inherit=0.4)
    rows = sample(space, range(60), config).double().numpy()
    free = sample(space, range(60), SampleConfig(components=space.dimension, attributes="gaussian")).double().numpy()
    trained, shares = space.coefficients.double().numpy(), []
    for row, drawn in zip(rows, free, strict=True):
        gaps = np.abs((1.5 * trained - row) @ inside).max(1)
        donor = trained[gaps.argmin()]
        assert gaps.min() < 1e-4 * np.abs(row).max()
        outside = np.eye(len(row)) - inside
        np.testing.assert_allclose(row @ outside, (0.84**0.5 * drawn + 0.4 * donor) @ outside, atol=2e-4)
        shares.append(np.corrcoef(row @ outside, donor @ outside)[0, 1])
    assert 0.3 < np.mean(shares) < 0.5
    assert torch.equal(sample(space, [7], config)[0], sample(space, [3, 7], config)[1])


def test_joined_samples_need_directions_and_no_copies():
    space, _, _ = with_pattern(30)
    with pytest.raises(VitrineError, match="directions"):
        sample(space, [0], SampleConfig(attributes="joined"))
    with pytest.raises(VitrineError, match="training model"):
        SampleConfig(inherit=1.0)
