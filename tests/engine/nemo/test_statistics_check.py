"""Statistics of another model are refused by one check, whichever door they come through."""

from dataclasses import replace

import pytest
import torch
from diffusers import UNet2DConditionModel
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import Calibration, NeuronStatistics, fingerprint_of
from vitrine.engine.nemo.neuron_statistics import OFFICIAL
from vitrine.engine.pipelines import NEMOPipeline
from vitrine.engine.portraits import caption, load_portraits, sample_scenes


@pytest.fixture(scope="module")
def pipe():
    return NEMOPipeline.from_pipe(load_portraits().pipeline())


@pytest.fixture(scope="module")
def statistics(pipe):
    return pipe.calibrate(caption(sample_scenes(range(4))), ["statistics"]).statistics


@pytest.mark.parametrize("origin", [OFFICIAL, "feedfeedfeedfeed"])
def test_foreign_statistics_are_refused_before_a_search(pipe, statistics, origin):
    foreign = replace(statistics, fingerprint=origin)
    with pytest.raises(VitrineError, match="gather them on this model"):
        pipe.find(["a face"], Calibration(foreign))
    with pytest.raises(VitrineError, match=origin):
        foreign.check(pipe.unet, "0123456789abcdef")  # as the node asks, with a fingerprint of its own reading


def test_statistics_of_this_model_or_of_none_pass(pipe, statistics):
    statistics.check(pipe.unet)
    statistics.check(pipe.unet, fingerprint_of(pipe.unet))
    replace(statistics, fingerprint="").check(pipe.unet)


def test_the_published_statistics_pass_for_networks_of_sd1_shape_only():
    published = NeuronStatistics({}, {}, 50_000, OFFICIAL)
    with torch.device("meta"):
        nets = {width: UNet2DConditionModel(cross_attention_dim=width) for width in (768, 1024)}
    published.check(nets[768], "0123456789abcdef")
    with pytest.raises(VitrineError, match="this model"):
        published.check(nets[1024], "0123456789abcdef")  # SD2.x: as many neurons, another text encoder


def test_statistics_know_the_lora_they_were_measured_with(pipe, statistics):
    """A LoRA on value projections moves the means; those of the checkpoint alone say nothing of it."""
    from peft import LoraConfig

    unet = pipe.unet
    unet.add_adapter(LoraConfig(r=2, target_modules=["attn2.to_v"], init_lora_weights=False), adapter_name="style")
    try:
        with pytest.raises(VitrineError, match="adapters and all"):
            pipe.find(["a face"], Calibration(statistics))
        styled = pipe.calibrate(caption(sample_scenes(range(4))), ["statistics"]).statistics
        assert any(not torch.allclose(v, statistics.means[a], atol=1e-3) for a, v in styled.means.items())
        styled.check(unet)
        unet.disable_adapters()
        statistics.check(unet)
        with pytest.raises(VitrineError, match="adapters and all"):
            styled.check(unet)
        unet.enable_adapters()
        unet.set_adapters(["style"], weights=[0.5])
        with pytest.raises(VitrineError, match="adapters and all"):
            styled.check(unet)
    finally:
        unet.delete_adapters("style")
    statistics.check(unet)
