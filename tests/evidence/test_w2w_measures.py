"""What counts as a change of other attributes: pictures rendered with one attribute changed must show none."""

import pytest
import torch
from vitrine.engine.portraits import render
from vitrine.evidence.portraits.identities import FIRST_IDENTITY, portraits_of
from vitrine.evidence.w2w.graded import Graded
from vitrine.evidence.w2w.measures import side_effects, variation
from vitrine.evidence.w2w.pair_sliders import lacking
from vitrine.evidence.w2w.people import LABELS, Studio, people_space


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
