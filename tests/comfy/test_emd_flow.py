"""One step and several on the flow portraits in ComfyUI, against the pipeline around a stock FluxPipeline."""

import pytest
import torch
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.diffusion.noise import seeded_noise
from vitrine.engine.emd import FirstSteps, StudentPreset, few_steps, known
from vitrine.engine.pipelines import EMDOneStepPipeline
from vitrine.engine.portraits.flow import load_flow_portraits

PROMPT = "a smiling pale face with curly red hair"
NONE = "(the model is the student)"
SCHNELL = "FLUX.1 schnell, 4 steps"


@pytest.fixture(scope="module")
def loaded(comfy):
    return comfy.call("VitrineLoadPortraits", model="flow portraits, 128 px")


@pytest.fixture(scope="module")
def pipe():
    return EMDOneStepPipeline.from_pipe(load_flow_portraits().pipeline())


@pytest.fixture(scope="module")
def positive(loaded):
    with torch.inference_mode():
        return loaded[1].encode_from_tokens_scheduled(loaded[1].tokenize(PROMPT))


@pytest.fixture(scope="module")
def generate(comfy, loaded, positive):
    def generated(batch=1, **how):
        told = {"student": NONE, "preset": "manual", "timestep": 1000.0, "noise": "unit", "seed": 5} | how
        latent = {"samples": torch.zeros(batch, 16, 16, 16)}
        return comfy.call("VitrineEMDOneStepGenerator", model=loaded[0], positive=positive, latent=latent, **told)

    return generated


def close(loaded, samples, wanted, rounding=1e-5):
    ours = loaded[0].model.process_latent_in(samples["samples"])
    assert (ours - wanted).abs().max() / wanted.abs().max() < rounding


@pytest.mark.parametrize("t", [1000.0, 700.0])
def test_one_step_is_the_pipelines(loaded, pipe, generate, t):
    calls = []
    handle = loaded[0].model.diffusion_model.register_forward_hook(lambda m, i, o: calls.append(len(i[0])))
    ours, *_ = generate(2, timestep=t)
    handle.remove()
    assert calls == [2]
    close(loaded, ours, pipe(PROMPT, [5, 6], StudentPreset(timestep=t), output_type="latent").images)


@pytest.mark.parametrize("base_steps", [0, 1, 3])
def test_schnells_four_steps_with_and_without_the_base(loaded, pipe, generate, base_steps):
    how = {} if not base_steps else {"base": loaded[0], "base_steps": base_steps}
    ours, *_ = generate(2, preset=SCHNELL, **how)
    begins = {}
    if base_steps:
        first = FirstSteps(1, 0 if base_steps == 1 else base_steps)
        begins = {"base": Denoiser.from_diffusers(pipe), "first": first}
    wanted = pipe.few_steps(PROMPT, [5, 6], SCHNELL, output_type="latent", **begins).images
    close(loaded, ours, wanted, 1e-4)


def custom(comfy, model, positive, latent, sigmas, sampler, seed=5):
    told = {"add_noise": True, "noise_seed": seed, "cfg": 1.0, "positive": positive, "negative": positive}
    sampled = comfy.call("SamplerCustom", model=model, **told, sampler=sampler, sigmas=sigmas, latent_image=latent)
    return sampled[1] if len(sampled) > 1 else sampled[0]


def test_cores_sampler_takes_the_students_levels(comfy, loaded, positive, generate):
    latent = {"samples": torch.zeros(1, 16, 16, 16)}
    ours, sigmas, sampler = generate(preset=SCHNELL)
    assert sigmas.tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    theirs = custom(comfy, loaded[0], positive, latent, sigmas, sampler)
    close(loaded, theirs, loaded[0].model.process_latent_in(ours["samples"]), 1e-4)
    one, sigmas, sampler = generate(timestep=1000.0)
    assert sigmas.tolist() == [1.0, 0.0]
    close(
        loaded,
        custom(comfy, loaded[0], positive, latent, sigmas, sampler),
        loaded[0].model.process_latent_in(one["samples"]),
        1e-4,
    )


@pytest.mark.parametrize(
    ("preset", "levels", "rounding"),
    [
        ("Hyper-SD, 2 steps", [999, 499], 5e-3),
        ("LCM-LoRA, 4 steps", [999, 759, 499, 259], 1.5),
        ("TCD-LoRA, 4 steps", [999, 759, 499, 259], 1.5),
    ],
)
def test_on_a_unet_too(comfy, preset, levels, rounding):
    """Where fresh noise is drawn the levels are compared: core draws noise of its own. The presets refuse this base."""
    from vitrine.nodes.comfy.conditioning import condition_of
    from vitrine.nodes.comfy.emd import stock_sampling
    from vitrine.nodes.comfy.model import denoiser_of, latent_of

    model, clip, _ = comfy.call("VitrineLoadPortraits", model="portraits, 64 px")
    blank, told, sampling = torch.zeros(1, 4, 16, 16), [], known(preset)
    with torch.inference_mode():
        positive = clip.encode_from_tokens_scheduled(clip.tokenize(PROMPT))
        cond, z = condition_of(model, positive, blank), seeded_noise([5], (4, 16, 16))
        ours = latent_of(model, few_steps(denoiser_of(model), z, cond, sampling, [5]))
    sigmas, sampler = stock_sampling(model, sampling)
    handle = model.model.diffusion_model.register_forward_pre_hook(lambda m, i: told.append(round(float(i[1][0]))))
    theirs = custom(comfy, model, positive, {"samples": blank}, sigmas, sampler)
    handle.remove()
    assert told == levels and torch.isfinite(theirs["samples"]).all()
    apart = (theirs["samples"] - ours["samples"]).abs().max() / ours["samples"].abs().max()
    assert apart < rounding, "euler's noise is 0.2 % stronger in core, at the highest level"
