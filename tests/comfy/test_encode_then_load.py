"""A text encoder or a VAE that takes the network out while a node runs changes nothing; no result passes a MODEL by."""

import pytest
import torch
from vitrine.engine.nemo import NeuronSet, ProbeConfig
from vitrine.engine.portraits import caption, sample_scenes
from vitrine_tests.comfy.guided_graphs import VALUES, _values

CAPTIONS = caption(sample_scenes(range(4)))
LATENT = {"samples": torch.zeros(1, 4, 16, 16)}
FEW = {"seeds": 2, "timestep_index": 4, "samples": 2, "steps": 2}


def adapter(model):
    """A LoRA of one value projection, strong enough to show."""
    width = model.model.diffusion_model.get_submodule(_values(model).path).weight.shape
    draw = torch.Generator().manual_seed(4)
    name = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_v"
    return {
        f"{name}.lora_up.weight": torch.randn(width[0], 2, generator=draw),
        f"{name}.lora_down.weight": torch.randn(2, width[1], generator=draw) * 0.3,
    }


@pytest.fixture(scope="module")
def parts(comfy):
    """MODEL without and with a LoRA, CLIP and VAE."""
    from comfy import sd

    model, clip, vae = comfy.call("VitrineLoadPortraits", model="portraits, 64 px")
    with_lora = sd.load_lora_for_models(model, clip, adapter(model), 1.0, 0.0)[0]
    return model, with_lora, clip, vae


@pytest.fixture
def evicting(monkeypatch):
    """Whatever a text encoder or a VAE loads takes all other models out, as on a small GPU."""
    import comfy.model_management
    import comfy.sd

    unload = comfy.model_management.unload_all_models

    def before(kind, name):
        original = getattr(kind, name)

        def evicted(*args, **kwargs):
            unload()
            return original(*args, **kwargs)

        monkeypatch.setattr(kind, name, evicted)

    def start():
        before(comfy.sd.CLIP, "load_model")
        before(comfy.sd.VAE, "encode")
        before(comfy.sd.VAE, "decode")

    return start


def encoded(clip, text=CAPTIONS[0]):
    with torch.inference_mode():
        return clip.encode_from_tokens_scheduled(clip.tokenize(text))


def calibrated(measure, value):
    def run(comfy, model, clip, vae):
        asked = {"model": model, "clip": clip, "latent": LATENT, "prompts": "\n".join(CAPTIONS), **FEW}
        return value(comfy.call("VitrineNEMOCalibrate", measure=measure, **asked)[0])

    return run


def tapped(comfy, model, clip, vae, timestep=961.0, positive=None):
    picture = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(1))
    asked = {"image": picture, "selection": "layers below", "layers": VALUES, "timestep": timestep, "seed": 0}
    positive = encoded(clip) if positive is None else positive
    taps = comfy.call(
        "VitrineActivationTap", model=model, vae=vae, positive=positive, ensemble=1, dtype="float32", **asked
    )[0]
    return taps[VALUES].tensor.float().cpu().clone()


def mapped(comfy, model, clip, vae):
    from vitrine.nodes.comfy.conditioning import condition_of
    from vitrine.nodes.comfy.model import decode, denoiser_of

    with torch.inference_mode():
        denoiser, blank = denoiser_of(model), torch.ones(1, 4, 16, 16)
        first = denoiser.predict(blank, 500.0, condition_of(model, encoded(clip), blank)).x0
        decode(model, vae, first)
        return denoiser.predict(blank, 500.0, condition_of(model, encoded(clip), blank)).x0


def scored(comfy, model, clip, vae):
    from vitrine.nodes.comfy.copies import Models, Sampling, instruments_of

    sampling = Sampling(LATENT, 2, 3.0, "euler", "ddim_uniform")
    with torch.inference_mode():
        made = instruments_of(Models(model, clip, vae), sampling, ProbeConfig(seeds=2, timestep_index=4))
        return torch.tensor(made.score(CAPTIONS[0]))


def reported(comfy, model, clip, vae):
    """As the LoRA Report reads a model: the denoiser first, prompts later."""
    from vitrine.nodes.comfy.copies import ComfyModel

    with torch.inference_mode(), ComfyModel(model, clip, vae, LATENT).at(0) as measured:
        (cond,) = measured.conditions([CAPTIONS[0]])
        return measured.denoiser.predict(torch.ones(1, 4, 16, 16), 500.0, cond).x0


NODES = {
    "Calibrate Copy Detection (NEMO), statistics": calibrated("statistics", lambda made: made.statistics.means[VALUES]),
    "Calibrate Copy Detection (NEMO), samples": calibrated("samples", lambda made: torch.tensor(made.samples.usual)),
    "Calibrate Copy Detection (NEMO), score": calibrated("score", lambda made: torch.tensor(made.score.tau)),
    "Look Inside (Activation Tap)": tapped,
    "pictures between two predictions": mapped,
    "Copy Check, score": scored,
    "LoRA Report": reported,
}
"""What nodes with a MODEL and a CLIP or a VAE compute."""


@pytest.mark.parametrize("name", NODES)
def test_a_model_that_is_taken_out_meanwhile_comes_back_with_its_lora(comfy, parts, evicting, name):
    model, with_lora, clip, vae = parts
    plain, wanted = (NODES[name](comfy, each, clip, vae) for each in (model, with_lora))
    assert not torch.allclose(plain, wanted, rtol=1e-3), "the LoRA has no effect here"
    evicting()
    assert torch.equal(NODES[name](comfy, with_lora, clip, vae), wanted)


def by_hooks(comfy, model, clip):
    """A CLIP whose prompts carry a LoRA for the network."""
    from comfy import hooks as made

    hooked = clip.clone()
    hooks = made.create_hook_lora(adapter(model), 1.0, 0.0)
    hooked.apply_hooks_to_conds = hooks
    return model, hooked


def by_blocker(comfy, model, clip):
    neurons = NeuronSet({VALUES: tuple(range(40))})
    how = {"factor": 0.0, "branch": "both", "start_percent": 0.0, "end_percent": 1.0}
    return comfy.call("VitrineNEMONeuronBlocker", model=model, neurons=neurons, **how)[0], clip


def by_late_person(comfy, model, clip):
    space = comfy.call("VitrineLoadW2WSpace", space_file="portraits people (shipped)", components=0)[0]
    people = [
        comfy.call("VitrineW2WSample", space=space, seed=n, spread=3.0, components=0, truncation=0.0, wanted="")[0]
        for n in (1, 2)
    ]
    asked = {"space": space, "w2w_model": people[0], "late_model": people[1], "start_timestep": 990.0, "strength": 1.0}
    return comfy.call("VitrineApplyW2WModel", model=model, **asked)[0], clip


@pytest.mark.parametrize("change", [by_hooks, by_blocker, by_late_person])
def test_statistics_are_those_of_a_tap(comfy, parts, change):
    """Of a MODEL on which something acts in its forwards alone."""
    plain, _, clip, vae = parts
    model, clip = change(comfy, plain, clip)
    taps = torch.stack([tapped(comfy, model, clip, vae, positive=encoded(clip, text))[0] for text in CAPTIONS])
    wanted = taps.abs().mean((0, 1))
    without = NODES["Calibrate Copy Detection (NEMO), statistics"](comfy, *parts[:1], *parts[2:])
    assert float((wanted - without).norm() / without.norm()) > 0.1, "it has no effect here"
    measured = NODES["Calibrate Copy Detection (NEMO), statistics"](comfy, model, clip, vae)
    assert float((measured - wanted).norm() / wanted.norm()) < 1e-4
