"""Methods on a stranger's model as they are: a ranking of its layers, a digit that it memorizes, a one-step student."""

import copy
import statistics
import time

import pytest
import torch
from vitrine.engine import families
from vitrine.engine.activations.ranked_pictures import Pictures
from vitrine.engine.activations.ranking import RankingConfig, rank_sites
from vitrine.engine.diffusion.noise import seeded_noise
from vitrine.engine.emd.chain import EStepConfig
from vitrine.engine.emd.emd_trainer import Trainer
from vitrine.engine.emd.networks import GENERATOR
from vitrine.engine.emd.train_config import EMDAdvancedConfig, EMDTrainConfig
from vitrine.engine.nemo import FewStepSampler, sample_agreement
from vitrine.engine.settings.nemo_options import FewStepConfig
from vitrine_tests.published.bring import cache
from vitrine_tests.published.digits import (
    LABELS,
    SAMPLES,
    SHAPE,
    accuracy,
    denoiser_of,
    grey,
    published_state,
    sampled,
    variety,
)
from vitrine_tests.published.mnist_family import CLASSES, FAMILY, NO_CLASS, digits, from_state
from vitrine_tests.published.weights import keep, known

COPIED, REPEATED = 7, 7
"""The class that is given one picture only, and which of the network's own digits that is."""
UPDATES, BATCH, RATE = 250, 48, 1e-3
TRAINING = EMDTrainConfig(
    steps=400,
    batch=32,
    rank=64,
    chain=EStepConfig(steps=4, ge=0.16, gz=0.01),
    lr_generator=4e-4,
    lr_score=1e-3,
    guidance=1.0,
    advanced=EMDAdvancedConfig(ema=0.98, save_every=30, decay=0.5),
)
"""Of the student: its layers' ranks are whole."""
STUDENT_UPDATES = 80
"""It comes apart later, where it runs ahead of its score network: class accuracy 0.42 after 160."""


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


def test_a_one_step_student_of_a_published_teacher(net, own):
    """Trained once, minutes on one thread; kept beside the published files and resumed if it is cut off."""
    z, cond = seeded_noise(list(range(SAMPLES)), SHAPE), digits(LABELS.tolist())
    with torch.no_grad():
        before = denoiser_of(net).predict(z, 1000.0, cond).x0
    run = Trainer(
        denoiser_of(net),
        digits(list(range(CLASSES))),
        SHAPE,
        TRAINING,
        cache() / "trained" / "digits",
        null=digits([NO_CLASS]),
    )
    try:
        begun, start = run.done, time.process_time()
        run.run(until=STUDENT_UPDATES)
        minutes = round((time.process_time() - start) / 60, 1)
        with torch.no_grad(), run.roles.with_weights(GENERATOR, run.average.values):
            after = run.generate(z, cond)
    finally:
        run.roles.remove()
    assert run.skipped == 0 and accuracy(after) > 0.9
    assert variety(after) > 1.3 * variety(before) and grey(after) < 0.8 * grey(before)
    if begun:
        minutes = known().get("digits, student", {}).get("minutes", 0)
    figure = {"accuracy": accuracy(after), "updates": run.done, "batch": TRAINING.batch, "rank": TRAINING.rank}
    figure |= {"minutes": minutes, "teacher steps": 25, "teacher grey": round(grey(own), 2)}
    for name, digits_ in (("", after), (" before", before)):
        figure |= {f"grey{name}": round(grey(digits_), 2), f"variety{name}": round(variety(digits_) / variety(own), 2)}
    keep("digits, student", figure)
