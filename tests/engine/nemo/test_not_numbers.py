"""NaN in a sample is no verdict: a picture of it was far from every other, so it counted as no copy, or as cured."""

import math

import pytest
import torch
from vitrine.engine.copies import CheckConfig, Instruments, Pictures, check_copies
from vitrine.engine.copies.lora_samples import _kept
from vitrine.engine.copies.nearest import PictureIndex, thumbnails
from vitrine.engine.emd import noisy_text
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import NeuronSet, bake, value_sites
from vitrine.engine.nemo.blocked_copies import Copies
from vitrine.engine.nemo.noise_similarity import Score
from vitrine.engine.network.condition import Condition
from vitrine.engine.w2w import blend, initial_lora
from vitrine_tests import models

BAD = (math.nan, math.inf, -math.inf)
NET = models.unet()


def pictures(count=2, seed=0):
    return torch.rand(count, 3, 64, 64, generator=torch.Generator().manual_seed(seed))


def spoilt(value):
    made = pictures()
    made[1, 0, 5, 5] = value
    return made


@pytest.mark.parametrize("value", BAD)
def test_what_pictures_are_compared_by(value):
    assert PictureIndex(None, thumbnails(pictures(4))).nearest(thumbnails(pictures(3))).ratios.isfinite().all()
    for refused in (thumbnails, _kept):
        with pytest.raises(VitrineError, match="pictures: given"):
            refused(spoilt(value))


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("part", ["untouched", "blocked", "ordinary"])
def test_copies(part, value):
    good = {"untouched": torch.tensor([0.1]), "blocked": torch.tensor([0.5]), "ordinary": torch.tensor([0.6, 0.7])}
    assert Copies(**good).verdict == "cured"
    with pytest.raises(VitrineError, match="distance of a sample"):
        Copies(**good | {part: torch.tensor([0.5, value])})


ARGUMENTS = {
    "factor": lambda value: bake(NET, NeuronSet({value_sites(NET, "all")[0].address: (0,)}), value),
    "weights": lambda value: blend([torch.ones(3), torch.ones(3)], [value, 1.0]),
    "strength": lambda value: noisy_text(Condition(torch.ones(1, 3, 4)), value, [0]),
    "alpha": lambda value: initial_lora(NET, alpha=value),
    "tau": lambda value: Score(torch.tensor([0.5, 0.6]), value),
}
"""Name -> a call with a plain number of that name, which reaches weights or a verdict."""


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_plain_arguments(name, value):
    """Weights of NaN were baked, blended and started from; a threshold of NaN found no prompt memorized."""
    ARGUMENTS[name](0.5)
    with pytest.raises(VitrineError, match=f"{name}: given"):
        ARGUMENTS[name](value)


@pytest.mark.parametrize("value", BAD)
def test_a_threshold_is_refused_before_the_samples(tmp_path, value):
    instruments = Instruments(lambda *_: pytest.fail("sampled"), 1, identity={})
    with pytest.raises(VitrineError, match="tau: given"):
        check_copies(["a cat"], tmp_path, instruments, Pictures(), CheckConfig(2), tau=value)


@pytest.mark.parametrize("where", ["prompt", "usual"])
def test_a_copy_check(tmp_path, where):
    """A LoRA that overflows: no copies, it said."""

    def sample(prompt, seeds, bare, after):
        after(1)
        made = torch.cat([pictures(1, seed) for seed in seeds])
        return made * math.nan if (prompt == "a cat") == (where == "prompt") else made

    known = Pictures(["0.png"], lambda i: pictures(1)[0])
    with pytest.raises(VitrineError, match="pictures: given nan"):
        check_copies(
            ["a cat"], tmp_path, Instruments(sample, 1, identity={}), known, CheckConfig(2, usual=2, ordinary=("x",))
        )
    assert not list(tmp_path.rglob("*.png"))
