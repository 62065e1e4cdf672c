"""DiTF's remedy is the same in diffusers and in ComfyUI, for every family, and in the nodes."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from vitrine.engine.activations import TapConfig, encode_pixels, preset, tap_latents
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.network.condition import Condition
from vitrine.engine.portraits import load_portraits, render, sample_scenes
from vitrine.engine.portraits.shipped import load_transformer
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


PLACE = "vit-block4-in"
ASKED = {"selection": "layers below", "layers": PLACE, "timestep": 50.0, "seed": 0, "ensemble": 2}


@pytest.fixture(scope="module")
def parts(comfy):
    model, clip, vae = comfy.call("VitrineLoadPortraitsTransformer", weight="power-cosine")
    with torch.inference_mode():
        empty = comfy.nodes.NODE_CLASS_MAPPINGS["CLIPTextEncode"]().encode(clip, "a face")[0]
    return {"model": model, "vae": vae, "positive": empty}


@pytest.fixture(scope="module")
def drawn():
    return render(sample_scenes(range(7_200_000, 7_200_009)))


def test_the_nodes_remedy_is_the_engines(comfy, parts, drawn):
    pictures = drawn.images[:2].permute(0, 2, 3, 1)
    remedy = {"modulate": True, "discard": "17 3"}
    taps, _, report = comfy.call("VitrineActivationTap", **parts, image=pictures, **ASKED, **remedy, dtype="float32")
    base = load_portraits()
    latents = encode_pixels(base.vae, drawn.images[:2] * 2 - 1)
    with torch.no_grad():
        cond = Condition(base.encode(["a face"]))
    denoiser = Denoiser.from_diffusers(load_transformer("power-cosine"), base.scheduler)
    config = TapConfig(PLACE, 50, (0, 1), modulate=True, discard=(17, 3))
    expected = tap_latents(denoiser, latents, cond, config)[PLACE].tensor
    assert torch.allclose(taps[PLACE].tensor, expected, atol=1e-4 * float(expected.abs().max()))
    assert report.startswith(PLACE) and "massive" not in report


def test_modulated_inputs_match_better_in_the_node(comfy, parts, drawn):
    asked = drawn.keypoints[0, :3]
    told = {
        "source": drawn.images[:1].permute(0, 2, 3, 1),
        "target": drawn.images[1:].permute(0, 2, 3, 1),
        "points": "\n".join(f"{x} {y}" for x, y in asked.tolist()),
        "softness": 0.0,
    }
    errors = []
    for modulate in (False, True):
        lines, _ = comfy.call("VitrineFindCorrespondence", **parts, **told, **ASKED, modulate=modulate)
        found = torch.tensor([[float(v) for v in line.split()[:2]] for line in lines.splitlines()])
        errors.append(float((found - drawn.keypoints[1:, :3].flatten(0, 1)).norm(dim=1).nanmean()))
    assert errors[1] < errors[0]


def test_bad_channels_are_refused_and_a_selection_brings_its_remedy(comfy, parts, drawn):
    pictures = drawn.images[:1].permute(0, 2, 3, 1)
    for bad, word in (("x", "channel numbers"), ("96", "channels 0 .. 95")):
        with pytest.raises(VitrineError, match=word):
            comfy.call("VitrineActivationTap", **parts, image=pictures, **ASKED, dtype="float32", discard=bad)
    tap = comfy.nodes.NODE_CLASS_MAPPINGS["VitrineActivationTap"]
    make = __import__(tap.__module__, fromlist=["selection_config"]).selection_config
    assert make("DiTF-Flux", "", 260.0, 0, 8, (False, "")) == preset("DiTF-Flux").config()
    assert make("DiTF-Flux", "", 260.0, 0, 8, (False, "7")).discard == (7,)
    assert not make("CleanDIFT", "", 261.0, 0, 1, (False, "")).noise
