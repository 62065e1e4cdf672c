"""What the page about matching shows: parts by colour, and pairs that count once."""

import torch
from vitrine.engine.portraits import PARTS
from vitrine.evidence.activations.matching_page import colour_parts
from vitrine.evidence.activations.measures import by_pair


def test_parts_have_a_colour_each():
    drawn = colour_parts(torch.arange(len(PARTS))[None])
    assert drawn.shape == (3, 1, len(PARTS)) and len(drawn[:, 0].unique(dim=1).T) == len(PARTS)


def test_a_pair_there_and_back_counts_once():
    assert by_pair(torch.tensor([1.0, 0.0, 0.0, float("nan")])).tolist() == [0.5, 0.0]
