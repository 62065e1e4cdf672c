"""DiTF's remedy is the same in diffusers and in ComfyUI, for every family."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from vitrine.engine.activations import TapConfig, tap_latents
from vitrine.engine.denoiser import Denoiser
from vitrine_tests.families.twin import NAMES, comfyui_twin, inputs, network, twin


@pytest.mark.parametrize("name", NAMES)
def test_modulated_inputs_agree(comfy, name, no_hooks_left):
    ours = network(name)
    theirs = comfyui_twin(name, ours)
    no_hooks_left(ours, theirs)
    latents, _, cond = inputs(name)
    denoiser = Denoiser.from_diffusers(ours, FlowMatchEulerDiscreteScheduler())

    def call(x, t, cond):
        return twin(name).run(theirs, x, t, cond)

    config = TapConfig("vit-block*-in", 300, modulate=True, discard=(1, 5))
    noise = torch.randn(1, *latents.shape, generator=torch.Generator().manual_seed(2))
    other = Denoiser(theirs, denoiser.schedule, "flow", call)
    a, b = (tap_latents(d, latents, cond, config, noise=noise) for d in (denoiser, other))
    assert list(a) == list(b) and len(a) >= 2
    for address in a:
        largest = float(a[address].tensor.abs().max())
        assert float((a[address].tensor - b[address].tensor).abs().max()) <= 2e-5 * largest, address
