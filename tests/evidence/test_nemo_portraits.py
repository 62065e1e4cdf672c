"""NEMO on the trained portraits model, whose memorized pictures are known (behaviour, not figures: see the claims)."""

import pytest
import torch
from vitrine.engine.nemo.find import make_probe, score_prompts
from vitrine.engine.nemo.noise_similarity import Request, probe_noise
from vitrine.engine.portraits import plants, render
from vitrine.evidence.nemo.baselines import random_neurons
from vitrine.evidence.nemo.claims import detection
from vitrine.evidence.nemo.probed_model import DETECT, ORDINARY, SEARCH, SHAPE, captions, setting

SEEDS = [900, 901, 902, 903]


@pytest.fixture(scope="module")
def probed():
    return setting()


@pytest.fixture(scope="module")
def plant():
    return plants()[0]


@pytest.fixture(scope="module")
def result(probed, plant):
    (found,) = probed.find([plant.captions[0]])
    return found


@pytest.mark.nightly
def test_memorized_captions_are_flagged_and_ordinary_ones_seldom(probed):
    probe = make_probe(probed.denoiser, config=DETECT, rows=40)
    prompts = [p.captions[0] for p in plants() if p.kind == "verbatim"] + captions(ORDINARY, 32)
    scores = [s.value for s in score_prompts(probe, probed.conditions(prompts), SHAPE, 1.0)[0]]
    memorized, ordinary = torch.tensor(scores[:8]), torch.tensor(scores[8:])
    tau = ordinary.mean() + ordinary.std()
    assert bool((memorized > tau).all()) and float((ordinary > tau).float().mean()) <= 0.2


@pytest.mark.nightly
def test_blocking_cures_new_seeds_and_random_neurons_do_not(probed, plant, result):
    neurons, picture = probed.neurons(result), render(plant.scenes).images
    prompts = [plant.captions[0]] * len(SEEDS)

    def away(blocked):
        return (probed.sample(prompts, SEEDS, blocked) - picture).square().mean((1, 2, 3)).sqrt()

    untouched, blocked, random = away(None), away(neurons), away(random_neurons(probed.model.unet, neurons))
    assert bool((untouched < 0.05).all()) and bool((random < 0.05).all())
    assert bool((blocked > 0.1).all()) and bool((blocked > 1.5 * random).all())


@pytest.mark.nightly
def test_ordinary_captions_keep_their_pictures(probed, result):
    prompts = captions(ORDINARY, 8)
    before, after = (probed.sample(prompts, list(range(8)), n) for n in (None, probed.neurons(result)))
    changed = (before - after).square().mean((1, 2, 3)).sqrt()
    unlike = (before - before.roll(1, 0)).square().mean((1, 2, 3)).sqrt()
    assert float(changed.median()) < 0.25 * float(unlike.median())


@pytest.mark.nightly
def test_most_kept_neurons_are_needed(probed, plant, result):
    """Switching one of them on again brings the prediction back above the threshold it was tested with, or near it."""
    (cond,), probe = probed.conditions(plant.captions[:1]), make_probe(probed.denoiser, config=SEARCH, rows=40)
    noise, found = probe_noise(SEARCH, SHAPE)[result.before.keep], result.search
    kept = [(a, n) for a, ns in found.neurons.items() for n in ns]
    looks = [Request(cond, noise, {})] + [
        Request(cond, noise, {ad: [i for i in ns if (ad, i) != one] for ad, ns in found.neurons.items()})
        for one in kept
    ]
    plain, *rest = probe.signals(looks)
    scores = [float(probe.similarity(plain, s).max()) for s in rest]
    assert sum(s >= found.threshold - 1e-6 for s in scores) >= 0.8 * len(kept)


@pytest.mark.nightly
def test_detection_measured_quickly_holds():
    result = detection(quick=True)
    low, high = result.interval
    assert result.holds and low <= result.value <= high
    assert result.details["detectors"]["4 steps"]["TPR at 1 % FPR"] > 0.8
