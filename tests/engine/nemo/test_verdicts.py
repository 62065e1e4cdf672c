"""Verdicts of detection and of *Verify Blocking (NEMO)*: of no subset of what is measured is one fine by default."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from vitrine.engine.nemo import Agreement, FewStepConfig, ProbeConfig, SampleThreshold, Score
from vitrine.engine.nemo.blocking_checks import Verification
from vitrine.engine.settings.verdicts import BAD, FINE, LOOK, OPEN, verdict_of

USUAL = torch.ones(64, 64)
SAME, OTHER = 0.1, 0.9
"""Distances below and above the threshold."""


def threshold(config):
    return SampleThreshold(0.5, 1.0, USUAL, 200, replace(config, two_stage=False))


def agreement(distance, count, asked, known, two_stage=False):
    config = FewStepConfig(asked, two_stage=two_stage)
    pairs = torch.full((count * (count - 1) // 2,), distance)
    return Agreement(pairs, config, threshold(config) if known else None, area=0.0)


@pytest.mark.parametrize("asked", [2, 3, 4])
def test_detection_by_samples_says_of_how_many(asked):
    for distance, count, known in product((SAME, OTHER), range(2, asked + 1), (False, True)):
        found = agreement(distance, count, asked, known)
        first = found.text().splitlines()[0]
        assert first.startswith(f"{found.verdict}: {count} of {asked} samples measured"), first
        assert f"differ by {distance:.4f}" in first
        assert found.rated == (OPEN if not known else BAD if distance == SAME else FINE)
        assert (found.verdict == "no verdict") == ("no threshold was measured" in found.text()) == (not known)
        assert ("two stages" in first) == (known and count < asked), "what was not sampled is said"


def test_detection_in_one_step_says_of_how_many():
    config = ProbeConfig(seeds=3)
    words = {None: "no verdict", 0.5: "memorized", 0.95: "not memorized"}
    for tau, word in words.items():
        text = Score(torch.tensor([0.9, 0.9, 0.2]), tau, "SSIM").text(config)
        assert text.startswith(f"{word}: 3 of 3 seeds measured; score 0.900\n") and "seed 1" in text
        assert ("no threshold was measured" in text) == (tau is None)


def test_a_list_of_prompts_is_fine_only_if_each_is():
    parts = [agreement(d, 4, 4, known).rated for d, known in ((SAME, True), (OTHER, True), (OTHER, False))]
    for chosen in product((False, True), repeat=3):
        rated = [part for part, use in zip(parts, chosen, strict=True) if use]
        if not rated:
            continue
        verdict = verdict_of(rated, "prompts")
        assert verdict.startswith("fine") == (rated == [FINE]) and verdict.startswith("bad") == (BAD in rated)
        assert f"{len(rated) - rated.count(OPEN)} of {len(rated)} prompts measured" in verdict


def test_a_verification_is_fine_only_if_all_was_measured_and_fine():
    """Without a reference picture, or on a prompt that is not memorized, there was no word for what was left out."""

    def score(high):
        return Score(torch.full((4,), 0.9 if high else 0.1), 0.5)

    texts = set()
    for untouched, blocked, attacked in product((True, False), (True, False), (None, True, False)):
        found = Verification(score(untouched), score(blocked), None if attacked is None else score(attacked))
        seeds = OPEN if not untouched else BAD if blocked else FINE
        attack = OPEN if attacked is None else BAD if attacked else FINE
        measured = 2 - [seeds, attack].count(OPEN)
        word = found.verdict.partition(":")[0]
        assert found.rated == (seeds, attack) and f": {measured} of 2 checks measured" in found.verdict
        assert (word == FINE) == (untouched and not blocked and attacked is False)
        assert word == (BAD if BAD in (seeds, attack) else FINE if measured == 2 else LOOK if measured else OPEN)
        text = found.text()
        assert text.startswith(f"{found.verdict}, 4 seeds each\n")
        assert ("not tried" in text) == (attacked is None)
        assert ("nothing to verify" in text) == (not untouched)
        texts.add(text)
    assert len(texts) > 6
