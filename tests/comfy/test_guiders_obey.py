"""What acts on core's CFGGuider acts on our guider: each stock node that changes guidance, on a network of blocks."""

import pytest
import torch
from vitrine.engine.control import GuidanceConfig
from vitrine_tests.comfy import test_stock_wrappers
from vitrine_tests.comfy.controlled import NEGATIVE, POSITIVE, TOLD, close, latent, node, xl_twins
from vitrine_tests.comfy.guided_graphs import patched
from vitrine_tests.lanes import nightly_but

PROMPTS = ("a smiling pale face with curly red hair", "a bald head with a beard")
BLOCKS = {"double_layers": "0, 1", "single_layers": "0"}
STOCK = {
    "SkipLayerGuidanceDiTSimple": BLOCKS,
    "SkipLayerGuidanceDiT": BLOCKS | {"start_percent": 0.0},
    "CFGOverride": {"cfg": 5.0, "start_percent": 0.0, "end_percent": 0.6},
    "APG": {},
    "TCFG": {},
    "RescaleCFG": {},
    "CFGZeroStar": {},
    "CFGNorm": {"strength": 0.5},
    "Mahiro": {},
}
"""A node that changes guidance -> settings with which it has an effect here."""


EVERY = [n for n in (*test_stock_wrappers.ON_A_RUN, *test_stock_wrappers.ON_A_FORWARD) if "LoraLoader" not in n]
"""Core's nodes that change a MODEL; that they are all is tested beside the list."""


@pytest.fixture(scope="module")
def flow(comfy):
    comfy.loop.run_until_complete(comfy.nodes.init_builtin_extra_nodes())
    model, clip, _ = comfy.call("VitrineLoadPortraits", model="flow portraits, 128 px")
    with torch.inference_mode():
        return model, *(clip.encode_from_tokens_scheduled(clip.tokenize(text)) for text in PROMPTS)


def sampled(guider, shape):
    from comfy import sample, samplers

    sigmas = samplers.KSampler(guider.model_patcher, 4, "cpu", "euler", "simple").sigmas
    with torch.inference_mode():
        noise = sample.prepare_noise(torch.zeros(shape), 3)
        return guider.sample(noise, torch.zeros(shape), samplers.sampler_object("euler"), sigmas, seed=3).clone()


FLOW, UNET = (1, 16, 16, 16), (1, 4, 16, 16)


def by_core(flow, model, scale, shape=FLOW):
    from comfy import samplers

    guider = samplers.CFGGuider(model)
    guider.set_conds(flow[1], flow[2])
    guider.set_cfg(scale)
    return sampled(guider, shape)


def by_ours(flow, model, scale, shape=FLOW):
    from vitrine.nodes.comfy.control_guider import ControlGuider

    return sampled(ControlGuider(model, flow[1], flow[2], GuidanceConfig(scale)), shape)


DAILY = ("SkipLayerGuidanceDiTSimple", "CFGOverride", "APG", "RescaleCFG", "CFGZeroStar")
"""A pass more, another scale, and patches before, within and after guidance."""


@pytest.mark.parametrize("name", nightly_but(STOCK, DAILY))
def test_a_stock_node_acts_as_on_cores_guider(comfy, flow, name):
    plain, changed = flow[0], patched(comfy, name, flow[0], **STOCK[name])
    wanted = by_core(flow, changed, 3.0)
    assert float((wanted - by_core(flow, plain, 3.0)).square().mean().sqrt()) > 1e-3, "the node has no effect here"
    assert close(by_ours(flow, changed, 3.0), wanted)


def test_a_scale_set_for_some_steps_acts_where_there_was_no_guidance(comfy, flow):
    changed = patched(comfy, "CFGOverride", flow[0], **STOCK["CFGOverride"])
    wanted = by_core(flow, changed, 1.0)
    assert not close(wanted, by_core(flow, flow[0], 1.0))
    assert close(by_ours(flow, changed, 1.0), wanted)


@pytest.mark.parametrize("config", [{}, {"nesting": "semantic_inner"}, {"negative_sizes": "positive"}], ids=str)
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_scale_set_by_a_node_is_the_guiders(comfy, flow, scale, config):
    """Also with a strength of the sizes: all steps at the node's 5 are a run at 5."""
    from vitrine.nodes.comfy.conditioning import with_sizes
    from vitrine.nodes.comfy.control_guider import ControlGuider

    model, positive = xl_twins().model, with_sizes(POSITIVE, TOLD, (64, 64))
    changed = patched(comfy, "CFGOverride", model, cfg=5.0)

    def run(model, scale):
        guider = ControlGuider(model, positive, NEGATIVE, GuidanceConfig(scale, 1.375, **config))
        return sampled(guider, latent()["samples"].shape)

    assert not close(run(model, scale), run(model, 5.0))
    assert close(run(changed, scale), run(model, 5.0))


def test_the_sampler_obeys_too(comfy, flow):
    twins = xl_twins()
    changed = patched(comfy, "CFGOverride", twins.model, cfg=5.0)
    ran, plain, wanted = (
        node(comfy, twins, model, cfg=cfg)[0] for model, cfg in ((changed, 3.0), (twins.model, 3.0), (twins.model, 5.0))
    )
    assert not close(plain, wanted) and close(ran, wanted)


def test_a_patch_that_guides_again_gets_its_own_conditionings(comfy, flow):
    """A patch of guidance may guide again between conditionings of its own: those are evaluated, not the guider's."""
    from comfy import samplers

    def guide_again(args):
        options = {k: v for k, v in args["model_options"].items() if k != "sampler_post_cfg_function"}
        conds = [args["cond"], args["uncond"]]
        return samplers.sampling_function(args["model"], args["input"], args["sigma"], *conds, 2.0, options)

    changed = flow[0].clone()
    changed.model_options["sampler_post_cfg_function"] = [guide_again]
    wanted = by_core(flow, changed, 3.0)
    assert not close(wanted, by_core(flow, flow[0], 3.0))
    assert close(by_ours(flow, changed, 3.0), wanted)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["UNet", "flow"])
def test_every_stock_node_acts_as_on_cores_guider(comfy, flow, kind, subtests, record_property):
    """Core's own settings; the effect of those that have one on this network is in the record of the run."""
    parts, shape = flow, FLOW
    if kind == "UNet":
        model, clip, _ = comfy.call("VitrineLoadPortraits", model="portraits, 64 px")
        with torch.inference_mode():
            parts = (model, *(clip.encode_from_tokens_scheduled(clip.tokenize(text)) for text in PROMPTS))
        shape = UNET
    plain, effects = by_core(parts, parts[0], 3.0, shape), {}
    for name in EVERY:
        with subtests.test(name):
            settings = STOCK.get(name, {}) if kind == "flow" else {}
            node = comfy.nodes.NODE_CLASS_MAPPINGS[name]
            try:
                changed = (
                    patched(comfy, name, parts[0], **settings)
                    if settings
                    else test_stock_wrappers.patched(node, parts[0])
                )
                wanted = by_core(parts, changed, 3.0, shape)
            except Exception as error:  # not for this network: ours says what core says
                with pytest.raises(type(error)):
                    by_ours(parts, test_stock_wrappers.patched(node, parts[0]), 3.0, shape)
                continue
            effects[name] = float((wanted - plain).square().mean().sqrt())
            assert close(by_ours(parts, changed, 3.0, shape), wanted), effects[name]
    acting = {name: effect for name, effect in effects.items() if effect > 1e-3}
    record_property(kind, ", ".join(f"{name} {effect:.3f}" for name, effect in acting.items()))
    assert len(acting) > 12
