"""PixArt through the nodes and through pipelines around diffusers' own: a portraits transformer, trained."""

from types import SimpleNamespace

import pytest
import torch
from diffusers import EulerDiscreteScheduler, PixArtAlphaPipeline
from vitrine.engine.emd import StudentPreset
from vitrine.engine.nemo import BlockConfig, NeuronSet, value_sites
from vitrine.engine.pipelines import (
    EMDOneStepPipeline,
    NEMOPipeline,
)
from vitrine.engine.portraits import load_portraits, render, sample_scenes
from vitrine.engine.portraits.shipped import load_transformer, shipped_transformers
from vitrine.engine.tracing.fingerprint import fingerprint_of
from vitrine.engine.w2w import BatchedLora, Manifest
from vitrine_tests.comfy.test_family_models import lora_of
from vitrine_tests.comfy.two_doors import close, test_a_tap, test_masks_travel, test_points_travel  # noqa: F401

NAME = next(n for n in shipped_transformers() if not n.endswith("128"))
PROMPT = "a smiling pale face with curly red hair glasses navy shirt on yellow"
PLACES = "vit-block1-out\nvit-block3-cross-q"
NODE = {"selection": "layers below", "layers": PLACES, "timestep": 50.0, "seed": 0, "ensemble": 2}
TAP = {"addresses": PLACES.split(), "timestep": 50, "seeds": [0, 1]}


@pytest.fixture(scope="module")
def doors(comfy):
    """One network as a MODEL with its prompt, and in diffusers' pipeline with the same."""
    model, clip, vae = comfy.call("VitrineLoadPortraitsTransformer", weight=NAME)
    with torch.inference_mode():
        positive, negative = (clip.encode_from_tokens_scheduled(clip.tokenize(t)) for t in (PROMPT, ""))
    base = load_portraits()
    scheduler = EulerDiscreteScheduler.from_config(base.scheduler.config, timestep_spacing="leading")
    parts = {"transformer": load_transformer(NAME), "vae": base.vae, "scheduler": scheduler}
    stock = PixArtAlphaPipeline(tokenizer=None, text_encoder=None, **parts)
    stock.set_progress_bar_config(disable=True)
    with torch.no_grad():
        text, empty = base.encode([PROMPT]), base.encode([""])
    encoded = {"prompt_embeds": text, "prompt_attention_mask": torch.ones(1, text.shape[1])}
    negated = {"negative_prompt_embeds": empty, "negative_prompt_attention_mask": torch.ones(1, empty.shape[1])}
    return SimpleNamespace(
        model=model,
        parts={"model": model, "vae": vae, "positive": positive},
        positive=positive,
        negative=negative,
        stock=stock,
        encoded=encoded,
        both=encoded | negated,
        node=NODE,
        tap=TAP,
    )


@pytest.fixture(scope="module")
def pictures():
    return render(sample_scenes(range(7_000_000, 7_000_004)))


def drawn(doors, model, steps=4):
    """Core's sampler, from one noise."""
    import comfy.sample

    noise = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        samples = comfy.sample.sample(
            model,
            noise,
            steps,
            3.0,
            "euler",
            "ddim_uniform",
            doors.positive,
            doors.negative,
            torch.zeros_like(noise),
            disable_pbar=True,
            seed=3,
        )
    return samples * doors.stock.vae.config.scaling_factor


def stock_run(doors, pipe, steps=4, **how):
    pipe.scheduler.set_timesteps(steps)
    noise = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(3)) * pipe.scheduler.sigmas[0]
    how |= {"guidance_scale": 3.0, "negative_prompt": None, "height": 64, "width": 64, "use_resolution_binning": False}
    with torch.no_grad():
        return pipe(
            latents=noise / pipe.scheduler.init_noise_sigma,
            num_inference_steps=steps,
            output_type="latent",
            **doors.both | how,
        )[0]


def test_neurons_are_blocked(comfy, doors):
    network = doors.stock.transformer
    neurons = NeuronSet({value_sites(network)[1].address: tuple(range(48))}, fingerprint_of(network))
    settings = {"factor": 0.0, "branch": "both", "start_percent": 0.0, "end_percent": 1.0, "tokens": ""}
    (blocked,) = comfy.call("VitrineNEMONeuronBlocker", model=doors.model, neurons=neurons, **settings)
    around = NEMOPipeline.from_pipe(doors.stock)
    ours = stock_run(doors, around, neurons=neurons, block_config=BlockConfig(factor=0.0, branch="both"))
    theirs, plain = drawn(doors, blocked), drawn(doors, doors.model)
    assert close(theirs, ours) and not close(plain, theirs, 1e-3)
    assert close(plain, stock_run(doors, doors.stock))


def test_a_lora_is_the_same_change(comfy, doors):
    """What a model of a W2W space is on MODEL, and inside the forward, as in its pipeline."""
    from vitrine.nodes.comfy.lora import with_lora

    layers = lora_of(doors.stock.transformer)
    manifest = Manifest.of(layers)
    with BatchedLora(doors.stock.transformer, manifest, manifest.flatten(layers)[None]):
        ours = stock_run(doors, doors.stock)
    theirs = drawn(doors, with_lora(doors.model, layers))
    assert close(theirs, ours) and not close(drawn(doors, doors.model), theirs, 1e-3)


def test_one_step(comfy, doors):
    from vitrine.nodes.comfy.lora import NO_STUDENT

    settings = {"seed": 5, "student": NO_STUDENT, "preset": "manual", "timestep": 700.0, "noise": "unit"}
    latent = {"samples": torch.zeros(1, 4, 16, 16)}
    latents = comfy.call(
        "VitrineEMDOneStepGenerator", model=doors.model, positive=doors.positive, latent=latent, **settings
    )
    pipe = EMDOneStepPipeline.from_pipe(doors.stock)
    how = {"height": 64, "width": 64, "output_type": "latent"} | doors.encoded
    ours = pipe(None, [5], StudentPreset(timestep=700.0), **how).images
    assert close(doors.model.model.process_latent_in(latents[0]["samples"]), ours)
