"""What NEMOPipeline hands on to the probe, and which networks it refuses."""

import pytest
import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import Calibration, FewStepConfig, ProbeConfig
from vitrine.engine.nemo.find import make_probe, score_prompts
from vitrine.engine.pipelines import NEMOPipeline
from vitrine.engine.pipelines.nemo_prompts import conditions
from vitrine.engine.portraits import load_portraits, plants


@pytest.fixture(scope="module")
def pipe():
    return NEMOPipeline.from_pipe(load_portraits().pipeline())


def test_guidance_reaches_the_probe(pipe):
    prompt, config = plants()[2].captions[0], ProbeConfig(seeds=3, timestep_index=15, guidance=3.0)
    (score,) = pipe.detect([prompt], None, "one step", config)
    cond, empty = conditions(pipe, [prompt, ""])
    probe = make_probe(Denoiser.from_diffusers(pipe), config=config, empty=empty)
    ((wanted,), _) = score_prompts(probe, [cond], (4, 16, 16), None)
    assert torch.equal(score.per_seed, wanted.per_seed)
    (plain,) = pipe.detect([prompt], None, "one step", ProbeConfig(seeds=3, timestep_index=15))
    assert not torch.equal(score.per_seed, plain.per_seed)
    assert pipe.calibrate([prompt, plants()[1].captions[0]], ["score"], probe=config).score.tau > 0


def test_an_inpainting_network_is_refused_by_name(pipe):
    unet = UNet2DConditionModel.from_config(dict(pipe.unet.config) | {"in_channels": 9})
    inpainting = NEMOPipeline.from_pipe(StableDiffusionPipeline(**pipe.components | {"unet": unet}))
    with pytest.raises(VitrineError, match="UNet: given 9 input channels"):
        inpainting.detect(["a"], None, "one step")


def test_a_method_takes_its_own_settings_and_what_is_missing_is_named(pipe):
    with pytest.raises(VitrineError, match="ProbeConfig"):
        pipe.detect(["a"], None, "one step", FewStepConfig())
    with pytest.raises(VitrineError, match="FewStepConfig"):
        pipe.detect(["a"], None, "samples", ProbeConfig())
    with pytest.raises(VitrineError, match="method: given guess"):
        pipe.detect(["a"], None, "guess")
    for call in (lambda: pipe.find(["a"], Calibration()), lambda: pipe.detect(["a"], Calibration())):
        with pytest.raises(VitrineError, match="calibration: given nothing alone"):
            call()
    with pytest.raises(VitrineError, match="parts"):
        pipe.calibrate(["a", "b"], ["neurons"])
