"""The score of a choice of places is measured on held-out pictures."""

import pytest
import torch
from vitrine.engine.activations.correspondence import feature_maps
from vitrine.engine.activations.ranked_pictures import Pair, known_pairs
from vitrine.engine.activations.ranking import RankingConfig
from vitrine.engine.activations.segmentation import fit_probe, mean_iou
from vitrine.engine.activations.site_search import (
    Fold,
    choosing_and_held_out,
    choosing_and_held_out_pairs,
    folds_of,
    nested,
    stratified,
)
from vitrine.engine.pipelines import ActivationTapPipeline
from vitrine.engine.portraits import load_portraits, render, sample_scenes

pytestmark = pytest.mark.rounding
PLACES = "up-level0-repeat0-*-q up-level0-repeat0-vit-out down-level0-repeat0-res-out up-level0-upsampler-out"


def test_the_saved_score_is_measured_on_pictures_that_chose_nothing():
    drawn = render(sample_scenes(range(7_900_000, 7_900_008)))
    images, masks = drawn.images * 2 - 1, (drawn.parts > 0).long()
    pipe = ActivationTapPipeline.from_pipe(load_portraits().pipeline())
    ranking = pipe.rank(images, masks, "a face", config=RankingConfig(PLACES, most=2))
    taps = pipe.tap(images, "a face", list(ranking.chosen), timestep=50, output_type="none")
    features = feature_maps(taps.activations)
    probe = fit_probe(features[:4], masks[:4])
    choosing, held = ([4 + n for n in part] for part in stratified([{0, 1}] * 4, 2))
    expected = [mean_iou(probe.predict(features[p], (64, 64)), masks[p], 2)[0] for p in (held, choosing)]
    numbers = ranking.preset("mine", pipe.unet, 50.0).preset.numbers
    assert [numbers["score"], numbers["score where chosen"]] == pytest.approx(expected, abs=5e-3)
    assert f"score: {ranking.held_out:.3f} held out, {ranking.search.score:.3f} where chosen" in ranking.summary()


def test_held_out_pictures_are_not_among_those_that_choose():
    present = [{0, 1}, {0, 2}] * 4
    for split in ("halves", "stratified"):
        (fold,) = folds_of(present, split)
        choosing, held = choosing_and_held_out(fold, present)
        assert choosing.fitted == held.fitted == fold.fitted
        assert sorted(choosing.judged + held.judged) == sorted(fold.judged)
        assert all({c for n in part.judged for c in present[n]} == {0, 1, 2} for part in (choosing, held))
    assert choosing_and_held_out(Fold((0,), (1,)), present)[1].judged == ()
    for folds in (2, 4):
        whole = folds_of(present, "crossed", folds)
        for inner, held in nested(whole, present):
            seen = {n for fold in inner for n in (*fold.fitted, *fold.judged)}
            assert seen == set(range(8)) - set(held.judged)
            assert all(fold.fitted and not set(fold.fitted) & set(fold.judged) for fold in inner)


def test_held_out_pairs_share_no_picture_with_those_that_choose():
    point = torch.rand(1, 2)
    for count in (4, 5, 7, 8):
        pairs = known_pairs(torch.rand(count, 3, 2), count)
        choosing, held = choosing_and_held_out_pairs(pairs)
        shown = [{n for p in part for n in (p.source, p.target)} for part in (choosing, held)]
        assert choosing and held and not shown[0] & shown[1]
    star = [Pair(0, n, point, point) for n in range(1, 5)]
    assert [[p.target for p in part] for part in choosing_and_held_out_pairs(star)] == [[1, 3], [2, 4]]
    assert choosing_and_held_out_pairs(star[:1]) == (star[:1], [])
