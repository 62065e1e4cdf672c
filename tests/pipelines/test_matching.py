"""CorrespondencePipeline and SegmentationPipeline on the portraits model."""

import pytest
import torch
from vitrine.engine.activations.correspondence import feature_maps
from vitrine.engine.activations.segmentation import mask_like_clicks
from vitrine.engine.errors import VitrineError
from vitrine.engine.pipelines import ActivationTapPipeline, CorrespondencePipeline, SegmentationPipeline
from vitrine.engine.portraits import load_portraits, render, sample_scenes
from vitrine_tests.machine.stock import deep_sdxl

pytestmark = pytest.mark.rounding
TAP = {"addresses": ["up-level0-repeat0-res-increment"], "timestep": 50, "seeds": [0]}


@pytest.fixture(scope="module")
def stock():
    return load_portraits().pipeline()


@pytest.fixture(scope="module")
def drawn():
    return render(sample_scenes(range(7_000_000, 7_000_004)))


def test_a_picture_matches_itself_and_flips_are_averaged(stock, drawn):
    pipe = CorrespondencePipeline.from_pipe(stock)
    asked = drawn.keypoints[0, :3]
    (same,) = pipe.match(drawn.images[:1], drawn.images[:1], asked, temperature=0.0, **TAP)
    assert float((same.points - asked).abs().max()) <= 0.5 / 8 + 1e-6 and bool(same.mutual.all())
    (plain,) = pipe.match(drawn.images[:1], drawn.images[1:2], asked, **TAP)
    (flipped,) = pipe.match(drawn.images[:1], drawn.images[1:2], asked, flip=True, **TAP)
    assert not torch.equal(plain.similarity, flipped.similarity)


def test_background_is_learned_from_two_pictures(stock, drawn):
    pipe = SegmentationPipeline.from_pipe(stock)
    truth = (drawn.parts == 0).long()
    labels = pipe.segment(drawn.images[:2], truth[:2], drawn.images[2:], **TAP)
    assert labels.shape == (2, 64, 64) and float((labels == truth[2:]).float().mean()) > 0.8


def random_clicks(mask, count, seed):
    """``count`` points inside the mask (H, W) and as many outside, and which are which."""
    g, (height, width) = torch.Generator().manual_seed(seed), mask.shape
    pixels = []
    for kind in (mask, ~mask):
        inside = torch.nonzero(kind.flatten()).flatten()
        pixels.append(inside[torch.randperm(len(inside), generator=g)[:count]])
    chosen = torch.cat(pixels)
    points = torch.stack([(chosen % width + 0.5) / width, (chosen // width + 0.5) / height], 1)
    return points, torch.arange(2 * count) < count


def test_clicks_find_a_person_better_than_their_colours_do(stock):
    """Four clicks of a kind on one portrait, masks of 20 others; the figures of the node's help page."""
    drawn = render(sample_scenes(range(7_100_000, 7_100_024)))
    tap = TAP | {"addresses": ["up-level0-repeat0-vit-block0-cross-q", *TAP["addresses"]], "output_type": "none"}
    features = feature_maps(ActivationTapPipeline.from_pipe(stock).tap(drawn.images, "", **tap).activations)
    colours, person = drawn.images - drawn.images.mean(), drawn.parts > 0
    overlap = torch.zeros(4, 3)
    for n in range(4):
        clicks = random_clicks(person[n], 4, seed=n)
        masks = [mask_like_clicks(maps[n], *clicks, maps[4:], (64, 64)) > 0.5 for maps in (features, colours)]
        for k, mask in enumerate([*masks, torch.ones_like(person[4:])]):
            overlap[n, k] = (mask & person[4:]).sum() / (mask | person[4:]).sum()
    ours, theirs, everything = overlap.mean(0).tolist()
    assert ours > 0.55 and ours > max(theirs, everything) + 0.1, (ours, theirs, everything)


def test_bad_input_is_refused(stock, drawn):
    pipe = SegmentationPipeline.from_pipe(stock)
    with pytest.raises(VitrineError, match="one per picture"):
        pipe.segment(drawn.images[:2], torch.zeros(2, 32, 32), drawn.images[2:], **TAP)
    with pytest.raises(VitrineError, match="at least one"):
        CorrespondencePipeline.from_pipe(stock).match(drawn.images[:1], drawn.images[1:], torch.zeros(0, 2), **TAP)


@pytest.mark.nightly
def test_sdxl_has_the_same_pipelines(drawn):
    """SDXL's two text encoders and time ids, at tiny size: matches, masks and ranking as for SD."""
    from vitrine.engine.activations.ranking import RankingConfig
    from vitrine.engine.settings.ranking_options import FilterRule

    place = {"addresses": ["up-level0-repeat0-vit-block1-out"], "timestep": 50, "seeds": [0]}
    source = deep_sdxl()
    (match,) = CorrespondencePipeline.from_pipe(source).match(drawn.images[:1], drawn.images[:1], [[0.4, 0.4]], **place)
    assert match.points.shape == (1, 2) and bool(match.mutual.all())
    masks = (drawn.parts > 0).long()
    pipe = SegmentationPipeline.from_pipe(source)
    found = pipe.segment(drawn.images[:2], masks[:2], drawn.images[2:], classes=2, **place)
    assert found.shape == (2, 64, 64)
    config = RankingConfig("up-level0-*-out", rule=FilterRule(None, None, (None, None)))
    ranking = pipe.rank(drawn.images, masks, config=config)
    assert ranking.search is not None and set(ranking.chosen) <= set(ranking.properties)
