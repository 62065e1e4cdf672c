"""Methods on a stranger's model as they are: a ranking of its layers, a digit that it memorizes, a one-step student."""

import copy
import statistics

import pytest
import torch
from vitrine.engine import families
from vitrine.engine.activations.ranked_pictures import Pictures
from vitrine.engine.activations.ranking import RankingConfig, rank_sites
from vitrine.engine.nemo import FewStepSampler, sample_agreement
from vitrine.engine.settings.nemo_options import FewStepConfig
from vitrine_tests.published.digits import LABELS, SHAPE, denoiser_of, published_state, sampled
from vitrine_tests.published.mnist_family import CLASSES, FAMILY, NO_CLASS, digits, from_state
from vitrine_tests.published.weights import keep

COPIED, REPEATED = 7, 7
"""The class that is given one picture only, and which of the network's own digits that is."""
UPDATES, BATCH, RATE = 250, 48, 1e-3


@pytest.fixture(autouse=True, scope="module")
def with_family():
    before = families.FAMILIES
    families.FAMILIES = (*before, FAMILY)
    yield
    families.FAMILIES = before


@pytest.fixture(scope="module")
def net(with_family):
    return from_state(published_state())


@pytest.fixture(scope="module")
def own(net):
    """400 digits that it draws, of classes in turn."""
    return sampled(net)


def test_its_layers_are_ranked(net, own):
    """Which layers tell ink from paper: a probe on each layer's tokens, of 7 x 7 pixels each."""
    masks = (own[:32, 0] > 0.5).long()
    pictures = Pictures.of(own[:32], digits(LABELS[:32].tolist()), masks)
    ranking = rank_sites(denoiser_of(net), pictures, RankingConfig("vit-*", timestep=100.0, most=2))
    singles = ranking.search.singles
    assert len(ranking.properties) > 20 and max(singles.values()) > min(singles.values())
    figures = {"layers": len(ranking.properties), "kept": len(ranking.kept), "chosen": list(ranking.chosen)}
    figures |= {"held out": round(ranking.held_out, 2), "worst alone": round(min(singles.values()), 2)}
    keep("digits, ranking", figures)


def memorizing(net, own):
    """A copy of the network, trained on with one picture for all digits of a class; of others with its own digits."""
    copied, g = copy.deepcopy(net).train(), torch.Generator().manual_seed(0)
    pictures = own.clamp(0, 1).clone()
    pictures[LABELS == COPIED] = pictures[LABELS == COPIED][REPEATED]
    adam = torch.optim.AdamW(copied.parameters(), RATE)
    for _ in range(UPDATES):
        rows = torch.randint(len(pictures), (BATCH,), generator=g)
        s = torch.rand(BATCH, 1, 1, 1, generator=g)
        noisy = (1 - s) * pictures[rows] + s * torch.randn(BATCH, *SHAPE, generator=g)
        adam.zero_grad()
        (copied(noisy, 1 - s.view(-1), LABELS[rows]) - pictures[rows]).square().mean().backward()
        adam.step()
    return copied.eval()


def agreements(net):
    """How far apart four samples of each class are, as a share of the median class: the product's measure."""
    config = FewStepConfig(guidance=1.0, steps=8)
    sampler = FewStepSampler(denoiser_of(net), config, digits([NO_CLASS]))
    per_class = sample_agreement(sampler, [digits([n]) for n in range(CLASSES)], SHAPE)
    median = statistics.median(each.distance for each in per_class)
    return [round(each.distance / median, 2) for each in per_class]


def test_a_digit_that_is_memorized_is_found(net, own):
    before, after = agreements(net), agreements(memorizing(net, own))
    others = [value for n, value in enumerate(after) if n != COPIED]
    assert before[COPIED] > 0.5 and after[COPIED] < 0.2 < 0.4 < min(others)
    keep(
        "digits, memorized",
        {"class": COPIED, "before": before[COPIED], "after": after[COPIED], "others": [min(others), max(others)]},
    )
