"""IMAGE, MASK and MODEL as people have them: taken, or refused in a sentence."""

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import NeuronSet, value_sites
from vitrine.engine.w2w import BatchedLora, Manifest
from vitrine.engine.w2w.space.manifest import LoraLayer
from vitrine_tests.comfy import carried_models as tiny
from vitrine_tests.comfy.guided_graphs import PATCHES, cfg, encoded, patched, sampled

MAP = "mid-vit-block0-cross-map"
QUERY = "mid-vit-block0-self-q"


@pytest.fixture(scope="module")
def scene(comfy):
    comfy.loop.run_until_complete(comfy.nodes.init_builtin_extra_nodes())
    model, clip, vae = comfy.call("VitrineLoadPortraits")
    return model, vae, encoded(clip)


def tap(comfy, scene, image, addresses="mid-vit-out", model=None):
    own = {"model": model or scene[0], "vae": scene[1], "positive": scene[2]["positive"]}
    how = {"selection": "layers below", "timestep": 50.0, "seed": 0, "ensemble": 1, "dtype": "float32"}
    return comfy.call("VitrineActivationTap", image=image, layers=addresses, **own, **how)


def test_pictures(comfy, scene):
    picture = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(1))
    expected = tap(comfy, scene, picture)[0]["mid-vit-out"].tensor
    for same in (picture[0], torch.cat([picture, torch.rand(1, 64, 64, 1)], -1)):
        assert torch.equal(tap(comfy, scene, same)[0]["mid-vit-out"].tensor, expected)
    grey = picture[..., :1]
    found = tap(comfy, scene, grey)[0]["mid-vit-out"].tensor
    assert torch.equal(found, tap(comfy, scene, grey.expand(-1, -1, -1, 3))[0]["mid-vit-out"].tensor)
    strange = (picture[:0], picture[None], picture[..., :2], picture * 255, picture * 2 - 1, picture * torch.nan)
    for image in strange:
        with pytest.raises(VitrineError, match="image"):
            tap(comfy, scene, image)
    tap(comfy, scene, picture * 1.2 - 0.1)  # as sharpening leaves it


def test_masks():
    from vitrine.nodes.comfy.pictures import as_masks

    pictures, mask = torch.rand(2, 8, 6, 3), torch.rand(2, 8, 6)
    assert torch.equal(as_masks(mask[:, None], pictures), mask) and torch.equal(as_masks(mask[..., None]), mask)
    assert torch.equal(as_masks(mask[0], pictures), mask[:1].expand(2, -1, -1))
    for strange in (mask[:, :4], torch.rand(3, 8, 6), torch.rand(2, 3, 8, 6), mask[:0], mask * 255):
        with pytest.raises(VitrineError, match="mask"):
            as_masks(strange, pictures)


def test_maps_alone_have_no_picture(comfy, scene):
    from comfy_execution.graph_utils import ExecutionBlocker

    taps, drawn, _ = tap(comfy, scene, torch.rand(1, 64, 64, 3), MAP)
    assert list(taps) == [MAP] and isinstance(drawn, ExecutionBlocker)
    watched, recorder = comfy.call("VitrineTapDuringSampling", model=scene[0], layers=MAP, record_steps="0")
    out = {"samples": sampled(cfg(watched, scene[2]))}
    taps, drawn, latent = comfy.call("VitrineCollectTaps", recorder=recorder, latent=out, step=-1, half="cond")
    assert list(taps) == [MAP] and isinstance(drawn, ExecutionBlocker) and latent is out
    with pytest.raises(VitrineError, match="layer"):
        comfy.call("VitrineActivationPicture", activations=taps, layer="", shared=True, size=64)


@pytest.mark.parametrize("name", ["HyperTile", "TomePatchModel"])
def test_nodes_that_change_tokens_are_named(comfy, scene, name):
    model = patched(comfy, name, scene[0])
    assert name not in PATCHES
    with pytest.raises(VitrineError, match="HyperTile|Token Merging"):
        tap(comfy, scene, torch.rand(1, 64, 64, 3), QUERY, model)
    with pytest.raises(VitrineError, match="HyperTile|Token Merging"):
        comfy.call("VitrineTapDuringSampling", model=model, layers=QUERY, record_steps="all")
    watched, _ = comfy.call("VitrineTapDuringSampling", model=scene[0], layers=QUERY, record_steps="all")
    with pytest.raises(VitrineError, match="HyperTile|Token Merging"):
        sampled(cfg(patched(comfy, name, watched), scene[2]))
    tap(comfy, scene, torch.rand(1, 64, 64, 3), "mid-vit-out", model)


def basic(model, text):
    from comfy import samplers
    from comfy_extras.nodes_custom_sampler import Guider_Basic

    guider = Guider_Basic(model)
    guider.set_conds(text)
    sigmas = torch.tensor([5.0, 0.0])
    noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(9))
    with torch.inference_mode():
        return guider.sample(
            noise, torch.zeros_like(noise), samplers.sampler_object("euler"), sigmas, disable_pbar=True
        )


def test_weights_of_eight_bits_are_baked_and_adapted(comfy):
    """Baking gives what blocking gives; a LoRA inside the forward finds its layers."""
    with torch.inference_mode():
        model = tiny.sd(torch.float8_e4m3fn)
    network = model.model.diffusion_model
    text = [[torch.randn(1, 7, tiny.CONTEXT, generator=torch.Generator().manual_seed(0)), {}]]
    site = value_sites(network, "all")[0]
    assert network.get_submodule(site.path).weight.dtype == torch.float8_e4m3fn
    neurons = NeuronSet({site.address: (0, 3, 5)})
    baked = comfy.call("VitrineNEMOBake", model=model, neurons=neurons, factor=0.0)[0]
    told = {"factor": 0.0, "branch": "both", "start_percent": 0.0, "end_percent": 1.0}
    blocked = comfy.call("VitrineNEMONeuronBlocker", model=model, neurons=neurons, **told)[0]
    plain = basic(model, text)
    assert torch.allclose(basic(baked, text), basic(blocked, text), atol=1e-4) and not torch.equal(
        basic(baked, text), plain
    )
    rows = network.get_submodule(site.path).weight.shape[0]
    lora = {
        "mid_block.attentions.0.transformer_blocks.0.attn2.to_v": LoraLayer(
            torch.ones(1, tiny.CONTEXT), torch.ones(rows, 1), 1.0
        )
    }
    manifest = Manifest.of(lora)
    with BatchedLora(network, manifest, manifest.flatten(lora)[None]):
        assert not torch.allclose(basic(model, text), plain, atol=1e-3)


def test_a_layer_of_quantised_weights_takes_a_lora(comfy):
    """Of mixed-precision files core's linear layers are no ``nn.Linear``."""
    from comfy import ops

    network = torch.nn.Module()
    network.to_v = ops.mixed_precision_ops().Linear(4, 3, bias=False, device="cpu", dtype=torch.float32)
    network.to_v.weight = torch.nn.Parameter(torch.zeros(3, 4), requires_grad=False)
    network.forward = lambda x: network.to_v(x)
    assert not isinstance(network.to_v, torch.nn.Linear)
    lora = {"to_v": LoraLayer(torch.ones(1, 4), torch.ones(3, 1), 1.0)}
    manifest = Manifest.of(lora)
    with BatchedLora(network, manifest, manifest.flatten(lora)[None]):
        assert torch.allclose(network.to_v(torch.ones(2, 4)), torch.full((2, 3), 4.0))
