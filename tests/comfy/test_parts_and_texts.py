"""A student's sampler on other SIGMAS than its own, captions that look like weights, sizes that a plan is not for."""

import pytest
import torch
from vitrine.engine.emd import StudentSampling
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import ProbeConfig
from vitrine.engine.pipelines import NEMOPipeline
from vitrine.engine.portraits import load_portraits
from vitrine_tests.comfy.guided_graphs import cfg, encoded, sampled

TIMES = (999.0, 749.0, 499.0, 249.0)


@pytest.fixture(scope="module")
def scene(comfy):
    model, clip, _ = comfy.call("VitrineLoadPortraits")
    return model, clip, encoded(clip)


def custom(model, conds, sampler, sigmas, latent=None, noisy=True, seed=3):
    """SamplerCustom at cfg 1."""
    import comfy.sample

    start = torch.zeros(2, 4, 16, 16) if latent is None else latent
    with torch.inference_mode():
        noise = comfy.sample.prepare_noise(start, seed) if noisy else torch.zeros_like(start)
        told = (model, noise, 1.0, sampler, sigmas, conds["positive"], conds["negative"], start)
        return comfy.sample.sample_custom(*told, disable_pbar=True, seed=seed).clone()


def student(model, eta):
    from vitrine.nodes.comfy.emd import stock_sampling

    return stock_sampling(model, StudentSampling("", TIMES, "tcd", eta))


def test_a_run_in_two_parts_is_the_run(scene):
    model, _, conds = scene
    sigmas, sampler = student(model, 0.0)
    whole = custom(model, conds, sampler, sigmas)
    first = custom(model, conds, sampler, sigmas[:3])
    second = custom(model, conds, sampler, sigmas[2:], first, noisy=False)
    assert torch.allclose(second, whole, atol=1e-3)


def test_the_end_of_a_part_is_as_noisy_as_it_should_be(scene):
    model, _, conds = scene
    sigmas, sampler = student(model, 0.3)
    half = custom(model, conds, sampler, sigmas[:3])
    picture = custom(model, conds, sampler, sigmas)
    noise = model.model.process_latent_in(half).std() ** 2 - model.model.process_latent_in(picture).std() ** 2
    assert 0.7 < float(noise.sqrt() / sigmas[2]) < 1.3


@pytest.mark.parametrize("denoise", [0.5, 1.0])
def test_other_levels_than_its_own_are_taken(comfy, scene, denoise):
    """With eta 0 it follows the path, as Euler does: on any levels."""
    from comfy import samplers

    model, _, conds = scene
    scheduler = comfy.nodes.NODE_CLASS_MAPPINGS["BasicScheduler"]
    (sigmas,) = scheduler.execute(model, "simple", 5, denoise).result
    _, sampler = student(model, 0.0)
    start = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(2))
    found = custom(model, conds, sampler, sigmas, start)
    assert torch.allclose(found, custom(model, conds, samplers.sampler_object("euler"), sigmas, start), atol=2e-3)


CAPTIONS = (
    "a face (front view)",
    "a (((pale))) face",
    "a \\(dark\\) face",
    "a face (red:1.4)",
    "an embedding:face on pink",
)


def test_captions_are_literal(scene):
    """As the pipeline reads them: ComfyUI takes parentheses for weights and ``embedding:`` for a file."""
    from vitrine.nodes.comfy.conditioning import prompt_conditions

    model, clip, _ = scene
    portraits = load_portraits()
    directories = {
        name: part.embedding_directory
        for name, part in vars(clip.tokenizer).items()
        if hasattr(part, "embedding_directory")
    }
    with torch.inference_mode():
        found = prompt_conditions(model, clip, list(CAPTIONS), torch.zeros(1, 4, 16, 16))
        for caption, cond in zip(CAPTIONS, found, strict=True):
            assert torch.allclose(cond.text, portraits.encode([caption]), atol=2e-5), caption
        weighted = clip.encode_from_tokens_scheduled(clip.tokenize(CAPTIONS[0]))
        assert not torch.allclose(weighted[0][0], found[0].text, atol=1e-3)
    assert directories == {name: vars(clip.tokenizer)[name].embedding_directory for name in directories}


def test_a_threshold_of_captions_with_parentheses(comfy, scene):
    model, clip, _ = scene
    captions = "a face (front view)\na pale (very pale) face\na (dark) face on pink\na (wide) face"
    told = {"latent": {"samples": torch.zeros(1, 4, 16, 16)}, "seeds": 2, "timestep_index": 4}
    _, tau, _ = comfy.call("VitrineNEMOCalibrate", model=model, clip=clip, prompts=captions, measure="score", **told)
    pipe = NEMOPipeline.from_pipe(load_portraits().pipeline())
    probe = ProbeConfig(seeds=2, timestep_index=4)
    assert abs(pipe.calibrate(captions.splitlines(), ["score"], probe=probe).score.tau - tau) < 1e-3


def test_a_plan_acts_at_its_size_only(comfy, scene):
    model, _, conds = scene
    node = comfy.nodes.NODE_CLASS_MAPPINGS["VitrineResolutionTransferLoader"]
    defaults = {i.id: i.default for i in node.define_schema().inputs if getattr(i, "default", None) is not None}
    size = {"target_width": 96, "target_height": 128}
    (wide, *_) = comfy.call("VitrineResolutionTransferLoader", model=model, **defaults | size)
    assert wide is not model
    assert sampled(cfg(wide, conds), latent=torch.zeros(1, 4, 32, 24)).shape == (1, 4, 32, 24)
    with pytest.raises(VitrineError, match="latent size"):
        sampled(cfg(wide, conds))
    score = {"method": "one step", "seeds": 2, "timestep_index": 4}
    score |= {name: conds[name] for name in ("positive", "negative")}
    with pytest.raises(VitrineError, match="latent size"):
        comfy.call("VitrineNEMODetect", model=wide, latent={"samples": torch.zeros(1, 4, 16, 16)}, **score)
    sampled(cfg(model, conds))
