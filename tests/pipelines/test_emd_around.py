"""One-step generation around every transformer's own pipeline, against the engine and the stock pipeline's one step."""

import copy

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.diffusion.noise import seeded_noise
from vitrine.engine.emd import StudentPreset, few_steps, known, one_step
from vitrine.engine.errors import VitrineError
from vitrine.engine.families import family_of
from vitrine.engine.families.packing import masked
from vitrine.engine.io.files import save_safetensors
from vitrine.engine.pipelines import EMDOneStepPipeline
from vitrine.engine.pipelines.emd import latent_shape
from vitrine.engine.portraits.flow import load_flow_portraits
from vitrine_tests.lanes import SLOW, nightly_but
from vitrine_tests.pipelines.encoded import SOURCES, source
from vitrine_tests.pipelines.test_family_taps import by_hand

PROMPT = "a photo of a cat"
SIZE = {"height": 64, "width": 64}
FIRST = StudentPreset(timestep=1000.0)
STILL = [name for name in SOURCES if name != "sdxl"]


@pytest.fixture(scope="module", params=nightly_but(STILL, [name for name in STILL if name not in SLOW]))
def case(request):
    stock, told = source(request.param)
    return stock, told, EMDOneStepPipeline.from_pipe(stock)


def text(stock, told, prompt=PROMPT):
    if "prompt_embeds" in told:
        return masked(told["prompt_embeds"], told.get("prompt_embeds_mask", told.get("prompt_attention_mask")))
    with torch.no_grad():
        return family_of(stock.transformer).condition(stock, [prompt], 64, 64)


def latents(pipe, told, *args, **more):
    return pipe(told.get("prompt"), *args, **SIZE | {"output_type": "latent"} | encodings(told) | more).images


def encodings(told):
    return {name: value for name, value in told.items() if name.startswith("prompt_")}


def hides(net, args, kwargs):
    """ChromaPipeline (0.42) adds its mask of ones and zeros to the scores, which hides no padding."""
    if type(net).__name__ == "ChromaTransformer2DModel":
        kwargs["attention_mask"] = kwargs["attention_mask"].bool()
    return args, kwargs


def test_one_call_is_the_engines(case):
    stock, told, pipe = case
    assert isinstance(pipe, EMDOneStepPipeline) and isinstance(pipe, type(stock))
    preset, calls = StudentPreset(timestep=700.0), []
    handle = stock.transformer.register_forward_pre_hook(lambda *a: calls.append(1))
    both = latents(pipe, told, [3, 4], preset)
    handle.remove()
    assert len(calls) == 1
    z = seeded_noise([3, 4], tuple(both.shape[1:]))
    with torch.no_grad():
        cond = text(stock, told).take(torch.zeros(2, dtype=torch.long))
        wanted = one_step(Denoiser.from_diffusers(stock), z, cond, preset)
    assert torch.equal(both, wanted)
    torch.testing.assert_close(latents(pipe, told, [4], preset)[0], both[1], rtol=1e-4, atol=1e-4)


def test_of_a_flow_it_is_one_step_of_the_stock_pipeline(case):
    stock, told, pipe = case
    if not isinstance(stock.scheduler, FlowMatchEulerDiscreteScheduler):
        pytest.skip("PixArt predicts noise; the test above holds it to the engine")
    name = "true_cfg_scale" if "true_cfg_scale" in told else "guidance_scale"
    off = {"ZImagePipeline": 0.0, "Krea2Pipeline": 0.0, "FluxPipeline": 3.5}.get(type(stock).__name__, 1.0)
    handle = stock.transformer.register_forward_pre_hook(hides, with_kwargs=True)
    with torch.no_grad():
        how = told | SIZE | {"num_inference_steps": 1, name: off, "generator": torch.Generator().manual_seed(3)}
        stock_picture = stock(**how | {"output_type": "pt"})[0]
    handle.remove()
    picture = latents(pipe, told, [3], output_type="pt")  # t* is 1000 unless a preset says otherwise
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
    f = pipe._adapter.factor
    assert latent_shape(pipe._adapter)[1:] == (height // f, width // f)
    assert latent_shape(pipe._adapter, 64)[1:] == (64 // f, width // f)


def test_a_student_in_a_file(tmp_path):
    stock, _ = source("flux")
    pipe, path = EMDOneStepPipeline.from_pipe(stock), "transformer_blocks.0.attn.to_q"
    g, layer = torch.Generator().manual_seed(1), stock.transformer.get_submodule(path)
    down, up = torch.randn(2, layer.in_features, generator=g), torch.randn(layer.out_features, 2, generator=g)
    preset = StudentPreset("mine", 1000.0)
    names = {f"transformer.{path}.lora_A.weight": down, f"transformer.{path}.lora_B.weight": up}
    file = save_safetensors(tmp_path / "student.safetensors", names, preset.to_metadata())
    changed = copy.deepcopy(stock.transformer)
    with torch.no_grad():
        changed.get_submodule(path).weight += up @ down
    assert pipe.load_student(file, "mine") == preset
    found = latents(pipe, {"prompt": PROMPT}, [3], preset)
    with torch.no_grad():
        z = seeded_noise([3], tuple(found.shape[1:]))
        wanted = one_step(Denoiser.from_diffusers(changed, stock.scheduler), z, text(stock, {}), preset)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    short = save_safetensors(tmp_path / "short.safetensors", {"proj_out.bias": up}, preset.to_metadata())
    with pytest.raises(VitrineError, match="tensors of short.safetensors differ"):
        pipe.load_student(short)


def test_several_steps_and_refusals():
    stock, _ = source("flux")
    stock.default_sample_size = 8
    pipe = EMDOneStepPipeline.from_pipe(stock)
    found = pipe.few_steps(PROMPT, [3], "FLUX.1 schnell, 4 steps", output_type="latent").images
    with torch.no_grad():
        z, sampling = seeded_noise([3], tuple(found.shape[1:])), known("FLUX.1 schnell, 4 steps")
        wanted = few_steps(Denoiser.from_diffusers(stock), z, text(stock, {}), sampling, [3])
    assert torch.equal(found, wanted)
    with pytest.raises(VitrineError, match="accepted: Z-Image"):
        pipe.few_steps(PROMPT, [3], "Z-Image-Turbo, 8 steps")
    with pytest.raises(VitrineError, match="multiples of 16"):
        pipe(PROMPT, [3], FIRST, height=72, width=64)
    with pytest.raises(VitrineError, match="pooled_prompt_embeds.*of FluxPipeline"):
        pipe(prompt_embeds=torch.zeros(1, 2, 8), **SIZE)
    with pytest.raises(VitrineError, match="read to the text encoder's end"):
        pipe(PROMPT, max_sequence_length=8, **SIZE)
    with pytest.raises(VitrineError, match="a UNet of SDXL"):
        pipe(PROMPT, [3], StudentPreset("SDXL", 399.0), **SIZE)


def test_encoded_prompts_are_those_that_the_pipeline_encodes():
    for name in ("flux", "sd3", "z_image", "pixart", "chroma"):
        stock, _ = source(name)
        pipe, takes = EMDOneStepPipeline.from_pipe(stock), {"do_classifier_free_guidance": False}
        with torch.no_grad():
            parts = (
                stock.encode_prompt(PROMPT, None)
                if name == "flux"
                else stock.encode_prompt(*[PROMPT, None, None][: 3 if name == "sd3" else 1], **takes)
            )
        told = {"prompt_embeds": parts[0]}
        if name in ("flux", "sd3"):
            told |= {"pooled_prompt_embeds": parts[1 if name == "flux" else 2]}
        if name in ("pixart", "chroma"):
            told |= {"prompt_attention_mask": parts[1 if name == "pixart" else 2]}
        how = SIZE | {"output_type": "latent"}
        torch.testing.assert_close(pipe(None, [3], **told, **how).images, pipe(PROMPT, [3], **how).images)


def test_a_text_without_a_text_encoder_is_refused():
    stock, _ = source("krea2")
    pipe = EMDOneStepPipeline.from_pipe(stock)
    with pytest.raises(VitrineError, match="prompt: given a text, and Krea2Pipeline without a text encoder"):
        pipe(PROMPT, [3], **SIZE)
    with pytest.raises(VitrineError, match="prompt_embeds_mask"):
        pipe(None, [3], prompt_embeds=torch.zeros(1, 7, 3, 32), **SIZE)


def test_the_flow_portraits_from_the_models_and_from_a_folder(tmp_path):
    """Were a raw ValueError each: 512 text tokens for an encoder of 24, and a folder of another pipeline."""
    stock = load_flow_portraits().pipeline()
    stock.save_pretrained(tmp_path)
    pipe, again = EMDOneStepPipeline.from_pipe(stock), EMDOneStepPipeline.from_pretrained(tmp_path)
    assert type(again) is type(pipe)
    found = pipe("a smiling face", [3], output_type="pt").images
    assert found.shape == (1, 3, 128, 128)
    saved = again("a smiling face", [3], output_type="pt", height=128, width=128).images
    torch.testing.assert_close(saved, found, rtol=0, atol=2e-5)
    stock.set_progress_bar_config(disable=True)
    how = {"num_inference_steps": 1, "max_sequence_length": 24, "height": 128, "width": 128, "output_type": "pt"}
    wanted = stock("a smiling face", generator=torch.Generator().manual_seed(3), **how).images
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
