"""A massive channel injected into the flow model: same function, raw matching broken, DiTF's remedy mends it."""

from dataclasses import replace

import torch
from vitrine.engine.portraits.flow import load_flow_portraits
from vitrine.evidence.activations.massive_claims import DITF, RAW, TIMESTEP, _through, _ways, with_massive_channel
from vitrine.evidence.activations.tapped_pictures import TESTING, all_sites, draw_scene, inter_module_sites, untrained

CHANNEL, PLACE = 80, "vit-block3-in"


def test_the_function_is_unchanged_and_the_channel_seen_and_mended():
    model = load_flow_portraits()
    changed = replace(model, transformer=with_massive_channel(model.transformer, CHANNEL, 1000.0))
    scene = draw_scene(model, range(TESTING, TESTING + 16), misaligned=True)
    other = _through(scene, changed)
    with torch.no_grad():
        outputs = [s.denoiser.forward(scene.latents, TIMESTEP, scene.cond) for s in (scene, other)]
    assert torch.allclose(*outputs, atol=2e-4)
    whole, usual = _ways(scene, scene, PLACE)
    injected, seen = _ways(other, other, PLACE)
    assert usual == () and seen == (CHANNEL,)
    assert float(injected[RAW][0].nanmean()) < float(whole[RAW][0].nanmean())
    assert abs(float(injected[DITF][0].nanmean() - whole[DITF][0].nanmean())) <= 0.05


def test_places_of_the_flow_model():
    model = load_flow_portraits()
    sites, blocks = all_sites(model), inter_module_sites(model)
    assert set(blocks) < set(sites) and len(blocks) == 12 and "vit-block3-q" in sites
    fresh = untrained(model)
    assert fresh.vae is model.vae and type(fresh.transformer) is type(model.transformer)
    x = fresh.transformer.x_embedder.weight
    assert not torch.equal(x, model.transformer.x_embedder.weight) and torch.equal(
        x, untrained(model).transformer.x_embedder.weight
    )
