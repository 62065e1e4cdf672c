"""NEMO around pipelines whose guidance orders its batch in its own way, or runs part of a schedule."""

import pytest
import torch
from diffusers import (
    StableDiffusionPAGPipeline,
    StableDiffusionSAGPipeline,
    StableDiffusionXLPAGPipeline,
)
from vitrine.engine.errors import VitrineError
from vitrine.engine.nemo import BlockConfig, NeuronSet, block, value_sites
from vitrine.engine.pipelines import NEMOPipeline
from vitrine.engine.runtime.forward_hooks import hook_before
from vitrine.engine.tracing.fingerprint import width_of
from vitrine_tests.machine import stock
from vitrine_tests.pipelines.test_family_taps import MAKERS

TEXTS = {"prompt": ["a smiling face", "a pale face on pink"], "negative_prompt": ["a dark face with a hat"] * 2}


def pag():
    return StableDiffusionPAGPipeline(
        **stock.sd().components, pag_applied_layers=["mid"], requires_safety_checker=False
    )


def sag():
    return StableDiffusionSAGPipeline(**stock.sd().components, requires_safety_checker=False)


def xl_pag():
    return StableDiffusionXLPAGPipeline(**stock.sdxl().components, pag_applied_layers=["mid"])


WAYS = {
    "sd": (stock.sd, {}),
    "pag": (pag, {"pag_scale": 2.0}),
    "sag": (sag, {"sag_scale": 0.5}),
    "pag, no guidance": (pag, {"pag_scale": 2.0, "guidance_scale": 1.0}),
    "xl, pag": (xl_pag, {"pag_scale": 2.0}),
    "sd3": (MAKERS["sd3"], {}),
    "sd3, skipped layers": (MAKERS["sd3"], {"skip_guidance_layers": [0], "skip_layer_guidance_stop": 1.0}),
}


def network(source):
    return getattr(source, "unet", None) or source.transformer


def neurons_of(net):
    return NeuronSet({s.address: tuple(range(min(8, width_of(net, s)))) for s in value_sites(net, "all")})


def drawn(pipe, **more):
    told = {"num_inference_steps": 3, "output_type": "latent", "height": 64, "width": 64, **TEXTS} | more
    return pipe(generator=torch.Generator().manual_seed(3), **told).images


def texts_of(source, names):
    """What the network reads of the prompts: noted where the pipeline encodes each alone."""
    seen = []
    net = network(source)
    handle = hook_before(net, lambda m, a, k: seen.append(k["encoder_hidden_states"]), with_kwargs=True)
    for text in names:
        drawn(source, prompt=text, negative_prompt=None, guidance_scale=1.0, num_inference_steps=1)
    handle.remove()
    return [found[-1] for found in seen]


@pytest.mark.parametrize("way", WAYS)
def test_only_the_prompts_rows_are_blocked(way):
    make, more = WAYS[way]
    source = make()
    source.set_progress_bar_config(disable=True)
    net, neurons = network(source), neurons_of(network(source))
    prompts = texts_of(source, TEXTS["prompt"])

    class Rows:
        active, lengths = True, None

    def follow(module, args, kwargs):
        text = kwargs["encoder_hidden_states"]
        Rows.rows = torch.tensor([any(torch.equal(row, own) for own in prompts) for row in text])

    handle = hook_before(net, follow, with_kwargs=True)
    with block(net, neurons, BlockConfig(branch="cond"), running=Rows):
        expected = drawn(source, **more)
    handle.remove()
    found = drawn(NEMOPipeline.from_pipe(source), neurons=neurons, block_config=BlockConfig(branch="cond"), **more)
    assert not torch.equal(expected, drawn(source, **more))
    assert torch.equal(found, expected)


def test_a_part_of_a_schedule_is_the_run():
    source = stock.sdxl()
    source.set_progress_bar_config(disable=True)
    pipe, net = NEMOPipeline.from_pipe(source), source.unet
    neurons = neurons_of(net)
    told = {"neurons": neurons, "num_inference_steps": 8, "denoising_end": 0.5}
    late = drawn(pipe, block_config=BlockConfig(start_percent=0.5), **told)
    assert not torch.equal(late, drawn(pipe, **told))
    del told["neurons"]
    assert not torch.equal(late, drawn(pipe, **told)), "it never began"


def test_texts_that_are_given_and_one_text_as_both():
    source = stock.sd()
    source.set_progress_bar_config(disable=True)
    pipe, config = NEMOPipeline.from_pipe(source), BlockConfig(branch="cond")
    told = {"neurons": neurons_of(source.unet), "block_config": config}
    by_text = drawn(pipe, **told)
    texts = pipe.encode_prompt(TEXTS["prompt"], "cpu", 1, True, TEXTS["negative_prompt"])
    given = {"prompt_embeds": texts[0], "negative_prompt_embeds": texts[1]}
    assert torch.equal(drawn(pipe, prompt=None, negative_prompt=None, **given, **told), by_text)
    same = {"negative_prompt": TEXTS["prompt"]}
    found = drawn(pipe, **same, **told)
    assert not torch.equal(found, drawn(pipe, **same)) and "encode_prompt" not in vars(pipe)

    def replaced(pipe, step, t, tensors):
        return {"prompt_embeds": tensors["prompt_embeds"] + 1}

    with pytest.raises(VitrineError, match="the prompt's part of the batch: given .* of unknown text"):
        drawn(pipe, callback_on_step_end=replaced, callback_on_step_end_tensor_inputs=["prompt_embeds"], **told)
