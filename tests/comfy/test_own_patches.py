"""What the pack has put on a MODEL is in its place when it runs, or the run is refused with what took the place."""

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine_tests.comfy.guided_graphs import patched

MOVED = {
    "schedule": "resample",
    "pos_embed": "keep",
    "guidance_law": False,
    "guidance": 3.0,
    "override": True,
    "train_width": 0,
    "train_height": 0,
}
SAMPLINGS = {
    "ModelSamplingDiscrete": ("portraits, 64 px", {"sampling": "lcm"}),
    "ModelSamplingContinuousEDM": ("portraits, 64 px", {}),
    "ModelSamplingContinuousV": ("portraits, 64 px", {}),
    "ModelSamplingSD3": ("flow portraits, 128 px", {"shift": 7.0}),
    "ModelSamplingAuraFlow": ("flow portraits, 128 px", {"shift": 7.0}),
    "ModelSamplingFlux": ("flow portraits, 128 px", {"max_shift": 3.0, "base_shift": 2.0}),
}
"""Core's nodes that set a noise schedule -> (a model of their kind, settings that show)."""


@pytest.fixture(scope="module")
def models(comfy):
    comfy.loop.run_until_complete(comfy.nodes.init_builtin_extra_nodes())
    return {name: comfy.call("VitrineLoadPortraits", model=name) for name, _ in SAMPLINGS.values()}


def moved(comfy, model, side, **more):
    asked = MOVED | {"target_width": side, "target_height": side} | more
    return comfy.call("VitrineResolutionTransferLoader", model=model, **asked)[0]


def sampled(comfy, model, clip, side):
    import comfy.sample

    channels = model.model.latent_format.latent_channels
    latent = torch.zeros(
        1, channels, side // 8 if channels == 16 else side // 4, side // 8 if channels == 16 else side // 4
    )
    with torch.inference_mode():
        conds = [clip.encode_from_tokens_scheduled(clip.tokenize(text)) for text in ("a bald head", "")]
        noise = comfy.sample.prepare_noise(latent, 3)
        how = {"disable_pbar": True, "seed": 3}
        return comfy.sample.sample(model, noise, 3, 2.0, "euler", "simple", *conds, latent, **how).clone()


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_schedule_that_another_node_replaces_is_not_lost_in_silence(comfy, models, name):
    kind, settings = SAMPLINGS[name]
    model, clip, _ = models[kind]
    side = 96 if kind.startswith("portraits") else 192
    alone, both = moved(comfy, model, side), patched(comfy, name, moved(comfy, model, side), **settings)
    without = sampled(comfy, patched(comfy, name, model, **settings), clip, side)
    assert not torch.allclose(sampled(comfy, alone, clip, side), without, atol=1e-3), "the two agree anyway"
    with pytest.raises(VitrineError, match="model_sampling.* was replaced by .*nodes_model_advanced"):
        sampled(comfy, both, clip, side)
    if settings and "Continuous" not in name and name != "ModelSamplingFlux":  # what is set before is built on
        after = moved(comfy, patched(comfy, name, model, **settings), side)
        assert not torch.equal(sampled(comfy, after, clip, side), without)


def test_a_forward_without_a_run_asks_too(comfy, models):
    from vitrine.nodes.comfy.conditioning import condition_of
    from vitrine.nodes.comfy.model import denoiser_of

    model, clip, _ = models["portraits, 64 px"]
    both = patched(comfy, "ModelSamplingDiscrete", moved(comfy, model, 96), sampling="lcm")
    with torch.inference_mode():
        x = torch.ones(1, 4, 24, 24)
        cond = condition_of(both, clip.encode_from_tokens_scheduled(clip.tokenize("a bald head")), x)
        with pytest.raises(VitrineError, match="was replaced by ModelSamplingAdvanced"):
            denoiser_of(both).predict(x, 500.0, cond)


def test_positions_and_wrappers_are_asked_for_too(comfy, models):
    model, clip, _ = models["flow portraits, 128 px"]
    turned = moved(comfy, model, 192, schedule="none", pos_embed="rope_yarn")
    assert not torch.allclose(sampled(comfy, turned, clip, 192), sampled(comfy, model, clip, 192), atol=1e-3)
    replaced = turned.clone()
    replaced.add_object_patch("diffusion_model.pe_embedder", model.model.diffusion_model.pe_embedder)
    with pytest.raises(VitrineError, match="pe_embedder was replaced by EmbedND of comfy.ldm.flux.layers"):
        sampled(comfy, replaced, clip, 192)
    stripped = turned.clone()
    for kind in stripped.wrappers.values():
        kind.pop("vitrine.resolution.size", None)
    with pytest.raises(VitrineError, match=r"its wrapper vitrine.resolution.size is gone"):
        sampled(comfy, stripped, clip, 192)
