"""Every family as a MODEL in real ComfyUI, through the nodes, against the same weights in diffusers."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from vitrine.engine.activations import TapConfig, tap_latents
from vitrine.engine.addresses import sites_of
from vitrine.engine.denoiser import Denoiser
from vitrine.engine.fingerprint import fingerprint_of
from vitrine.engine.nemo import NeuronSet, value_sites
from vitrine_tests.families.twin import (
    NAMES,
    EqualEpsilon,
    comfyui_model,
    comfyui_twin,
    conditioning,
    inputs,
    network,
    twin,
)


class Loaded:
    """A family's MODEL, the latents and prompt it takes, and diffusers' side of both."""

    def __init__(self, name):
        self.name, self.ours = name, network(name)
        self.model = comfyui_model(name, comfyui_twin(name, self.ours))
        self.x, _, self.cond = inputs(name, 1)
        self.prompt = conditioning(name, self.cond)
        frames = self.model.get_model_object("latent_format").latent_dimensions == 3
        self.latents = self.x[:, :, None] if frames and self.x.ndim == 4 else self.x
        self.t = getattr(twin(name), "TIME", 300.0)
        self.denoiser = Denoiser.from_diffusers(self.ours, FlowMatchEulerDiscreteScheduler())
        sites = sites_of(self.ours)
        self.place = next(a for a in reversed(sites) if a.endswith("-out"))

    def sample(self, model, steps=2):
        import comfy.sample

        noise = comfy.sample.prepare_noise(torch.zeros_like(self.latents), 3)
        with torch.inference_mode():
            return comfy.sample.sample(
                model, noise, steps, 2.0, "euler", "simple", self.prompt, self.prompt, torch.zeros_like(noise),
                disable_pbar=True, seed=3,
            )  # fmt: skip


@pytest.fixture(scope="module", params=[n for n in NAMES if hasattr(twin(n), "MODEL")])
def loaded(comfy, request):
    with torch.no_grad():
        return Loaded(request.param)


def test_one_prediction_through_both_doors(comfy, loaded):
    """Time, direction, sign, packing and masks are right in both, or x0 would differ."""
    from vitrine.nodes.comfy.conditioning import condition_of
    from vitrine.nodes.comfy.model import denoiser_of

    with torch.inference_mode():
        cond = condition_of(loaded.model, loaded.prompt, loaded.latents)
        theirs = denoiser_of(loaded.model).predict(loaded.latents, loaded.t, cond)
    # ComfyUI's Flux.2 fills prompts with zeros on the left, up to 512 tokens.
    text = cond.text if loaded.name in ("flux2", "klein") else loaded.cond.text
    ours_cond = type(loaded.cond)(text.clone(), loaded.cond.pooled, loaded.cond.extra)
    with torch.no_grad(), EqualEpsilon(loaded.name, loaded.ours):
        ours = loaded.denoiser.predict(loaded.x, loaded.t, ours_cond)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b.reshape(a.shape)).abs().max() <= 5e-6 * a.abs().max()


def test_taps_while_comfyui_samples(comfy, loaded):
    before = loaded.sample(loaded.model)
    watched, recorder = comfy.call("VitrineTapDuringSampling", model=loaded.model, addresses=loaded.place, steps="0 1")
    assert torch.equal(loaded.sample(watched), before)
    taps = recorder.record[1]["cond"][loaded.place]
    assert list(recorder.record) == [0, 1] and taps.grid is not None and taps.tensor.shape[0] == 1


def test_neurons_are_blocked_while_comfyui_samples(comfy, loaded):
    site = value_sites(loaded.ours)[0]
    neurons = NeuronSet({site.address: tuple(range(8))}, fingerprint_of(loaded.ours))
    blocked = comfy.call(
        "VitrineNEMONeuronBlocker", model=loaded.model, neurons=neurons, factor=0.0, branch="both", start=0.0,
        end=1.0, tokens="",
    )[0]  # fmt: skip
    before = loaded.sample(loaded.model)
    assert not torch.equal(loaded.sample(blocked), before) and torch.equal(loaded.sample(loaded.model), before)


def test_one_tap_through_both_doors(comfy, loaded):
    from vitrine.nodes.comfy.conditioning import condition_of
    from vitrine.nodes.comfy.model import denoiser_of

    config = TapConfig((loaded.place,), timestep=loaded.t, seeds=(5, 6))
    with torch.inference_mode():
        cond = condition_of(loaded.model, loaded.prompt, loaded.latents)
        theirs = tap_latents(denoiser_of(loaded.model), loaded.latents, cond, config)[loaded.place]
    text = cond.text if loaded.name in ("flux2", "klein") else loaded.cond.text
    ours_cond = type(loaded.cond)(text.clone(), loaded.cond.pooled, loaded.cond.extra)
    with EqualEpsilon(loaded.name, loaded.ours):
        ours = tap_latents(loaded.denoiser, loaded.x, ours_cond, config)[loaded.place]
    assert ours.grid == theirs.grid and ours.tensor.shape == theirs.tensor.shape
    assert (ours.tensor - theirs.tensor).abs().max() <= 5e-6 * ours.tensor.abs().max()
