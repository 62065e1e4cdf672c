"""One-step generation around every transformer's own pipeline, against the engine and the stock pipeline's one step."""

import copy

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from vitrine.engine.denoiser import Denoiser
from vitrine.engine.emd import CorrectConfig, Networks, StudentContract, correct, known, one_step
from vitrine.engine.emd.few_steps import few_steps
from vitrine.engine.errors import VitrineError
from vitrine.engine.families import family_of
from vitrine.engine.files import save_safetensors
from vitrine.engine.noise import seeded_noise
from vitrine.engine.pipelines import EMDOneStepPipeline, EMDOneStepTransformerPipeline
from vitrine_tests.pipelines.encoded import READING, source
from vitrine_tests.pipelines.test_family_taps import by_hand

PROMPT = "a photo of a cat"
SIZE = {"height": 64, "width": 64}
FIRST = StudentContract(timestep=1000.0)
STILL = [name for name in READING if name != "sdxl"]


@pytest.fixture(scope="module", params=STILL)
def case(request):
    stock, told = source(request.param)
    return stock, told, EMDOneStepPipeline.from_pipe(stock)


def text(stock, prompt=PROMPT):
    with torch.no_grad():
        return family_of(stock.transformer).condition(stock, [prompt], 64, 64)


def latents(pipe, *args, **more):
    return pipe(*args, **SIZE | {"output_type": "latent"} | more).images


def hides(net, args, kwargs):
    """ChromaPipeline (0.42) adds its mask of ones and zeros to the scores, which hides no padding."""
    if type(net).__name__ == "ChromaTransformer2DModel":
        kwargs["attention_mask"] = kwargs["attention_mask"].bool()
    return args, kwargs


def test_one_call_is_the_engines(case):
    stock, _, pipe = case
    assert isinstance(pipe, EMDOneStepTransformerPipeline)
    contract, calls = StudentContract(timestep=700.0), []
    handle = stock.transformer.register_forward_pre_hook(lambda *a: calls.append(1))
    both = latents(pipe, PROMPT, [3, 4], contract)
    handle.remove()
    assert len(calls) == 1
    z = seeded_noise([3, 4], tuple(both.shape[1:]))
    with torch.no_grad():
        cond = text(stock).take(torch.zeros(2, dtype=torch.long))
        wanted = one_step(Denoiser.from_diffusers(stock), z, cond, contract)
    assert torch.equal(both, wanted)
    torch.testing.assert_close(latents(pipe, PROMPT, [4], contract)[0], both[1], rtol=1e-4, atol=1e-4)


def test_of_a_flow_it_is_one_step_of_the_stock_pipeline(case):
    stock, told, pipe = case
    if not isinstance(stock.scheduler, FlowMatchEulerDiscreteScheduler):
        pytest.skip("PixArt predicts noise; the test above holds it to the engine")
    name = "true_cfg_scale" if "true_cfg_scale" in told else "guidance_scale"
    off = 0.0 if type(stock).__name__ in ("ZImagePipeline",) else 3.5 if "Flux" in type(stock).__name__ else 1.0
    if type(stock).__name__.startswith("Flux2"):
        off = 1.0
    handle = stock.transformer.register_forward_pre_hook(hides, with_kwargs=True)
    with torch.no_grad():
        how = told | SIZE | {"num_inference_steps": 1, name: off, "generator": torch.Generator().manual_seed(3)}
        stock_picture = stock(**how | {"output_type": "pt"})[0]
    handle.remove()
    picture = pipe(PROMPT, [3], FIRST, output_type="pt", **SIZE).images
    torch.testing.assert_close(picture, stock_picture.reshape(picture.shape), rtol=0, atol=2e-5)


def test_what_the_vae_decodes_is_what_it_encoded(case):
    stock, _, _ = case
    latent, images = family_of(stock.transformer).latent, torch.rand(1, 3, 64, 64)
    z = by_hand(stock, images)
    again = latent.scaled(stock.vae, latent.unscaled(stock.vae, z))
    torch.testing.assert_close(again, z, rtol=1e-5, atol=1e-5)


def test_unless_a_size_is_asked_for_it_is_the_stock_pipelines(case):
    stock, _, pipe = case
    height, width = (480, 832) if "Wan" in type(stock).__name__ else (1024, 1024)
    if "StableDiffusion3" in type(stock).__name__ or "PixArt" in type(stock).__name__:
        height = width = 16 * 8  # of the network's own sample_size
    f = pipe.vae_scale_factor
    assert pipe._shape(FIRST, None, None)[1:] == (height // f, width // f)
    assert pipe._shape(FIRST, 64, None)[1:] == (64 // f, width // f)


def test_repair_is_the_engines(case):
    stock, _, pipe = case
    other = copy.deepcopy(stock.transformer)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.01)
    teacher = Denoiser.from_diffusers(stock)
    score = Denoiser.from_diffusers(other, stock.scheduler)
    config, t = CorrectConfig(2, timestep=400.0), StudentContract(timestep=700.0)
    found = latents(pipe, PROMPT, [3], t, correction=config, teacher=teacher, score=score)
    z = seeded_noise([3], tuple(found.shape[1:]))
    wanted, _ = correct(Networks(teacher, teacher, score), z, text(stock), t, config, [3], text(stock, ""))
    assert torch.equal(found, wanted) and not torch.equal(found, latents(pipe, PROMPT, [3], t))


def test_a_student_in_a_file(tmp_path):
    stock, _ = source("flux")
    pipe, path = EMDOneStepPipeline.from_pipe(stock), "transformer_blocks.0.attn.to_q"
    g, layer = torch.Generator().manual_seed(1), stock.transformer.get_submodule(path)
    down, up = torch.randn(2, layer.in_features, generator=g), torch.randn(layer.out_features, 2, generator=g)
    contract = StudentContract("mine", 1000.0)
    names = {f"transformer.{path}.lora_A.weight": down, f"transformer.{path}.lora_B.weight": up}
    file = save_safetensors(tmp_path / "student.safetensors", names, contract.to_metadata())
    changed = copy.deepcopy(stock.transformer)
    with torch.no_grad():
        changed.get_submodule(path).weight += up @ down
    assert pipe.load_student(file, "mine") == contract
    found = latents(pipe, PROMPT, [3], contract)
    with torch.no_grad():
        z = seeded_noise([3], tuple(found.shape[1:]))
        wanted = one_step(Denoiser.from_diffusers(changed, stock.scheduler), z, text(stock), contract)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    whole = save_safetensors(tmp_path / "whole.safetensors", {"proj_out.bias": up}, contract.to_metadata())
    with pytest.raises(VitrineError, match="which is no LoRA"):
        pipe.load_student(whole)


def test_several_steps_and_refusals():
    stock, _ = source("flux")
    stock.default_sample_size = 8
    pipe = EMDOneStepPipeline.from_pipe(stock)
    found = pipe.few_steps(PROMPT, [3], "FLUX.1 schnell, 4 steps", output_type="latent").images
    with torch.no_grad():
        z, sampling = seeded_noise([3], tuple(found.shape[1:])), known("FLUX.1 schnell, 4 steps")
        wanted = few_steps(Denoiser.from_diffusers(stock), z, text(stock), sampling, [3])
    assert torch.equal(found, wanted)
    with pytest.raises(VitrineError, match="one of Z-Image"):
        pipe.few_steps(PROMPT, [3], "Z-Image-Turbo, 8 steps")
    with pytest.raises(VitrineError, match="multiples of 16"):
        pipe(PROMPT, [3], FIRST, height=72, width=64)
    with pytest.raises(VitrineError, match="pass prompts"):
        pipe(prompt_embeds=torch.zeros(1, 2, 8), **SIZE)
    with pytest.raises(VitrineError, match="a UNet of SDXL"):
        pipe(PROMPT, [3], StudentContract("SDXL", 399.0), **SIZE)
