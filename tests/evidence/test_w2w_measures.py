"""What counts as a change of other attributes: pictures rendered with one attribute changed must show none."""

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.portraits import render
from vitrine.evidence.portraits.identities import FIRST_IDENTITY, portraits_of
from vitrine.evidence.w2w.even_strengths import StrengthMap, fit_strengths
from vitrine.evidence.w2w.graded import Graded
from vitrine.evidence.w2w.measures import side_effects, variation
from vitrine.evidence.w2w.people import LABELS, Studio, lacking, people_space


@pytest.fixture(scope="module")
def studio():
    return Studio.open(None, people_space())


@pytest.mark.parametrize("label", ["dark skin", "pale skin", "red hair", "bald", "glasses"])
def test_a_perfect_edit_changes_nothing_else(studio, label):
    names, (attribute, value) = people_space().names, LABELS[label]
    lacks = lacking(names, label)
    people = [FIRST_IDENTITY + int(names[i].rsplit("-", 1)[1]) for i in range(400, 440) if bool(lacks[i])]
    scenes = [portraits_of(person, 1, 5000) for person in people]
    before = torch.cat([render(s).images for s in scenes])[:, None]
    after = torch.cat([render(s.with_attributes(**{attribute: value})).images for s in scenes])[:, None]
    old, new = (studio.read(pictures)[1] for pictures in (before, after))
    assert studio.likelihood(new, label).mean() > 0.95
    assert max(map(variation, side_effects(old, new, attribute).values())) < 0.03
    if attribute == "skin":  # what is said of the hair of bald heads follows their skin
        raw = new["hair_color"] - old["hair_color"]
        assert variation(raw) > 0.05
        assert side_effects(old, new, attribute)["hair_color"].isnan().any()


def test_intervals_leave_out_the_same_people():
    gaps = torch.full((2, 40, 1), 0.2)
    gaps[:, ::2] = torch.nan
    graded = Graded(torch.zeros(2, 40), {"hair_color": torch.cat([gaps, -gaps], 2)}, torch.ones(2, 40))
    assert graded.others == pytest.approx([0.2, 0.2])
    assert graded.most_others()[:3] == pytest.approx((0.2, 0.2, 0.2))


def test_positions_share_out_a_sigmoid():
    strengths = [0.1 * i for i in range(61)]
    curve = [float(torch.sigmoid(torch.tensor(4 * (s - 3)))) for s in strengths]
    fitted = fit_strengths(strengths, curve, start=700)
    seen = [float(torch.sigmoid(torch.tensor(4 * (s - 3)))) for s in fitted.strengths]
    assert seen == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=0.01)
    assert fitted.strengths[1] > 2 and fitted.start == 700


def test_noise_does_not_turn_a_slider_back():
    fitted = fit_strengths([0, 1, 2, 3, 4], [0.1, 0.05, 0.5, 0.4, 0.9])
    assert list(fitted.strengths) == sorted(fitted.strengths)
    # least squares: 0.075, 0.075, 0.45, 0.45, 0.9
    assert fitted.at(0.5) == pytest.approx(3 + (0.4875 - 0.45) / 0.45) and fitted.at(1.0) == 4


def test_maps_that_do_not_rise_and_positions_beyond_them_are_refused():
    with pytest.raises(VitrineError, match="rise"):
        fit_strengths([0, 1, 2], [0.5, 0.4, 0.3])
    with pytest.raises(VitrineError, match="strength map"):
        StrengthMap((0.0, 2.0, 1.0))
    for position in (-0.1, 1.01, float("nan")):
        with pytest.raises(VitrineError, match="position"):
            StrengthMap((0.0, 2.0)).at(position)
