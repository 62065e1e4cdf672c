"""Sizes that are none: 0 was the model's own, -8 and texts failed in the middle of the work."""

import numpy as np
import pytest
import torch
from PIL import Image
from vitrine.engine.activations.activation_pictures import pca_rgb
from vitrine.engine.activations.picture_latents import to_pixels
from vitrine.engine.errors import VitrineError
from vitrine.engine.pipelines import (
    ActivationTapPipeline,
    ControlConditionedPipeline,
    NEMOPipeline,
)
from vitrine.engine.pipelines.adapter import Adapter
from vitrine.engine.pipelines.emd import latent_shape
from vitrine.engine.pipelines.emd_training import training_parts
from vitrine.engine.pipelines.w2w_training import subjects_in
from vitrine.engine.portraits import load_portraits
from vitrine.engine.resolution.transfer_config import ResolutionTransferConfig
from vitrine.engine.settings.sizes import is_side

PICTURE = Image.new("RGB", (64, 64))
MASK = np.zeros((64, 64), dtype=int)


@pytest.fixture(scope="module")
def stock():
    return load_portraits().pipeline()


def calls(stock, tmp_path):
    """Name -> a call with a size."""
    point, rank = [[[0.5, 0.5]]] * 2, ActivationTapPipeline.from_pipe(stock).rank
    return {
        "to_pixels": lambda size: to_pixels(PICTURE, size),
        "to_pixels, two sides": lambda size: to_pixels(PICTURE, (64, size)),
        "pca_rgb": lambda size: pca_rgb(torch.rand(1, 4, 3, 3), size=size),
        "transfer": lambda size: ResolutionTransferConfig((size, 64)),
        "subjects": lambda size: subjects_in(tmp_path, "portraits", "a face", size),
        "training": lambda size: training_parts(prompts=["a face"], size=(64, size)),
        "tap": lambda size: ActivationTapPipeline.from_pipe(stock).tap(PICTURE, "a face", "unet-in", size=size),
        "rank by points": lambda size: rank([PICTURE] * 2, keypoints=point, size=size),
        "rank by masks": lambda size: rank([PICTURE] * 4, [MASK] * 4, size=size),
        "control": lambda size: ControlConditionedPipeline.from_pipe(stock)("a face", height=size),
        "one step": lambda size: latent_shape(Adapter(stock), size, 64),
        "nemo": lambda size: NEMOPipeline.from_pipe(stock, size=(size, 64)),
    }


@pytest.mark.parametrize("size", [0, -8, "64", 64.0, True])
def test_what_is_no_size_is_refused(size, stock, tmp_path):
    for name, call in calls(stock, tmp_path).items():
        with pytest.raises(VitrineError, match=r"(size|height, width): given"):
            call(size)
            pytest.fail(name)


def test_whole_numbers_of_other_libraries_are_sizes():
    assert is_side(np.int64(64)) and to_pixels(PICTURE, 32).shape == (1, 3, 32, 32)
