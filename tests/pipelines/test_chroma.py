"""Taps, matches and masks on Chroma's own pipeline, whose prompts a tiny text encoder reads."""

import pytest
import torch
from vitrine.engine.pipelines import ActivationTapPipeline, CorrespondencePipeline, SegmentationPipeline
from vitrine_tests.pipelines.encoded import source
from vitrine_tests.pipelines.test_family_taps import pictures, ranked

HOW = {"prompt": "a photo of a cat", "addresses": "vit-block1-out", "timestep": 300}


@pytest.fixture(scope="module")
def chroma():
    return source("chroma")[0]


def test_taps(chroma):
    pipe = ActivationTapPipeline.from_pipe(chroma)
    first, again = (pipe.tap(pictures(), **HOW, seeds=(0, 1)).activations["vit-block1-out"].tensor for _ in range(2))
    assert first.shape[0] == 2 and torch.equal(first, again) and float(first.std()) > 0
    other = pipe.tap(pictures(), **HOW | {"prompt": "a horse"}, seeds=(0, 1)).activations["vit-block1-out"]
    assert not torch.equal(other.tensor, first), "the prompt is read"


@pytest.mark.nightly
def test_matches_and_masks(chroma):
    images, masks = pictures(), torch.zeros(2, 64, 64, dtype=torch.long)
    same = CorrespondencePipeline.from_pipe(chroma).match(images[:1], images[:1], [[0.25, 0.75]], temperature=0, **HOW)
    assert torch.allclose(same[0].points, torch.tensor([[0.25, 0.75]]), atol=0.13)
    masks[:, :, 32:] = 1
    labels = SegmentationPipeline.from_pipe(chroma).segment(images, masks, images, **HOW)
    assert labels.shape == (2, 64, 64) and set(labels.unique().tolist()) <= {0, 1}
    ranked(SegmentationPipeline.from_pipe(chroma), images, masks, prompt=HOW["prompt"])
