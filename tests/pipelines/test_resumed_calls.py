"""Calls of pipelines that resume: each component and each setting changed in turn is refused by name."""

import copy

import pytest
import torch
from diffusers import StableDiffusionPipeline
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import FewStepConfig, ProbeConfig
from vitrine.engine.pipelines import ActivationTapPipeline, NEMOPipeline
from vitrine.engine.portraits import load_portraits, render, sample_scenes

PROMPTS = ["a smiling face", "a face with glasses", "an old face"]
PROBE, FEW = ProbeConfig(seeds=2, timestep_index=15), FewStepConfig(seeds=2, steps=1)


def made(kind, parts):
    pipe = StableDiffusionPipeline(**parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False)
    return kind.from_pipe(pipe)


def statistics(parts, folder, prompts=tuple(PROMPTS), scope="down+mid"):
    return made(NEMOPipeline, parts).calibrate(list(prompts), ["statistics"], scope, state=folder)


def scores(parts, folder, prompts=tuple(PROMPTS), probe=PROBE):
    return made(NEMOPipeline, parts).detect(list(prompts), None, "one step", probe, state=folder / "state.safetensors")


def samples(parts, folder, prompts=tuple(PROMPTS), config=FEW):
    return made(NEMOPipeline, parts).detect(list(prompts), None, config=config, state=folder / "state.safetensors")


def usual(parts, folder, prompts=tuple(PROMPTS), config=FEW):
    return made(NEMOPipeline, parts).calibrate(list(prompts), ["samples"], few_steps=config, state=folder)


def stream(parts, folder, seed=7, prompt="a face", addresses="mid-vit-out", timestep=50.0, size=64):
    pictures = {"a": render(sample_scenes([seed])).images[0]}
    pipe, told = made(ActivationTapPipeline, parts), {"timestep": timestep, "size": size, "value_range": (0, 1)}
    return pipe.stream(pictures, folder, prompt, addresses, **told)


CALLS = {
    statistics: {"prompts": PROMPTS[:2], "scope": "all"},
    scores: {"prompts": PROMPTS[::-1], "probe": ProbeConfig(seeds=2, timestep_index=16)},
    samples: {"prompts": PROMPTS[:2], "config": FewStepConfig(seeds=2, steps=2)},
    usual: {"prompts": PROMPTS[:2], "config": FewStepConfig(seeds=2, steps=1, guidance=1.0)},
    stream: {"seed": 8, "prompt": "a hat", "addresses": "up-level0-repeat0-vit-out", "timestep": 51.0, "size": 32},
}


def moved(network):
    """A copy of which one number is another."""
    network = copy.deepcopy(network)
    with torch.no_grad():
        next(p for p in network.parameters() if p.ndim == 1)[0] += 1e-3
    return network


def with_a_word(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["wildcard"])
    return tokenizer


COMPONENTS = {
    "unet": moved,
    "text_encoder": moved,
    "tokenizer": with_a_word,
    "scheduler": lambda scheduler: type(scheduler).from_config(scheduler.config, beta_end=0.013),
}


@pytest.fixture(scope="module")
def parts():
    names = ("vae", "text_encoder", "tokenizer", "unet", "scheduler")
    pipe = load_portraits().pipeline()
    return {name: getattr(pipe, name) for name in names}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_another_input_is_refused(call, parts, tmp_path):
    call(parts, tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and not p.name.startswith(".")}
    changes = COMPONENTS | ({"vae": moved} if call is stream else {})
    for name, change in changes.items():
        with pytest.raises(VitrineError, match=r"^run: given .*begun with .*; accepted: the inputs .* start again: "):
            call(parts | {name: change(parts[name])}, tmp_path)
            pytest.fail(name)
    for name, value in CALLS[call].items():
        with pytest.raises(VitrineError, match=r"^run: given .*begun with "):
            call(parts, tmp_path, **{name: value})
            pytest.fail(name)
    call(parts, tmp_path)
    assert all(p.read_bytes() == kept for p, kept in before.items()), "nothing was touched"
