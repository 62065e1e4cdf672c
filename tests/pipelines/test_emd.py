"""The one-step pipeline: against the engine, against LCMScheduler, and what it refuses."""

import pytest
import torch
from vitrine.engine.condition import Condition
from vitrine.engine.denoiser import Denoiser
from vitrine.engine.emd import CorrectConfig, StudentContract, one_step
from vitrine.engine.emd.export import export_full
from vitrine.engine.errors import VitrineError
from vitrine.engine.noise import seeded_noise
from vitrine.engine.pipelines.emd import EMDOneStepPipeline
from vitrine.engine.portraits import build_models

pytestmark = pytest.mark.rounding
PROMPT = "a smiling pale face with curly red hair"


@pytest.fixture(scope="module")
def pipe():
    return EMDOneStepPipeline.from_pipe(build_models(0).pipeline())


def test_is_the_engine_with_one_call(pipe):
    calls, contract = [], StudentContract(timestep=399)
    handle = pipe.unet.register_forward_hook(lambda m, i, o: calls.append(len(i[0])))
    found = pipe(PROMPT, [3, 4], contract, output_type="latent").images
    handle.remove()
    assert calls == [2], "one UNet call, no negative rows"
    with torch.no_grad():
        text = pipe.encode_prompt([PROMPT] * 2, "cpu", 1, False)[0]
        wanted = one_step(Denoiser.from_diffusers(pipe), seeded_noise([3, 4], (4, 16, 16)), Condition(text), contract)
    assert torch.equal(found, wanted)


def test_pictures_and_refusals(pipe):
    assert pipe([PROMPT, "x"]).images[1].size == (64, 64)
    with pytest.raises(VitrineError, match="distilled"):
        pipe(PROMPT, guidance_scale=7.5)
    with pytest.raises(VitrineError, match="one for each picture"):
        pipe(["a", "b"], [1])
    with pytest.raises(VitrineError, match="score"):
        pipe(PROMPT, correction=CorrectConfig(1))


def test_correction_through_the_pipeline(pipe):
    plain = pipe(PROMPT, [1], output_type="latent").images
    role = Denoiser.from_diffusers(build_models(1).unet, pipe.scheduler)
    told = {"teacher": role, "score": role, "output_type": "latent"}
    same = pipe(PROMPT, [1], correction=CorrectConfig(2), **told).images
    torch.testing.assert_close(same, plain, rtol=0, atol=1e-4)


def test_a_whole_unet_loads_and_leaves_the_source_alone(tmp_path):
    source, other = build_models(0), build_models(1)
    pipe = EMDOneStepPipeline.from_pipe(source.pipeline())
    contract = StudentContract("portraits", 999.0)
    (file,) = export_full(tmp_path, dict(other.unet.named_parameters()), "generator", contract, half=False)
    kept = {k: v.clone() for k, v in source.unet.state_dict().items()}
    assert pipe.load_student(file, base="portraits") == contract
    found = pipe(PROMPT, [1], contract, output_type="latent").images
    with torch.no_grad():
        text = pipe.encode_prompt([PROMPT], "cpu", 1, False)[0]
        net = Denoiser.from_diffusers(other.unet, pipe.scheduler)
        wanted = one_step(net, seeded_noise([1], (4, 16, 16)), Condition(text), contract)
    assert torch.equal(found, wanted)
    assert all(torch.equal(v, kept[k]) for k, v in source.unet.state_dict().items())
    (bad,) = export_full(tmp_path, {"conv_in.weight": torch.zeros(1)}, "bad", contract)
    with pytest.raises(VitrineError, match="tensors of bad_unet.safetensors differ"):
        pipe.load_student(bad)
