"""Taps of encoded prompts, as every family's stock pipeline takes them."""

import pytest
import torch
from vitrine.engine.activations import TapConfig, tap_latents
from vitrine.engine.diffusion.denoiser import Denoiser
from vitrine.engine.errors import VitrineError
from vitrine.engine.families.packing import masked
from vitrine.engine.pipelines import ActivationTapPipeline, CorrespondencePipeline, SegmentationPipeline
from vitrine_tests.pipelines.encoded import source, states
from vitrine_tests.pipelines.test_family_taps import MAKERS, pictures

PLACE = "vit-block1-out"
HOW = {"addresses": PLACE, "timestep": 300, "output_type": "none"}
MASKS = {"qwen_image": "prompt_embeds_mask", "krea2": "prompt_embeds_mask", "lumina2": "prompt_attention_mask"}
"""Families without a tiny text encoder here: their prompts come encoded only."""
PARTS = {
    "flux": {"pooled_prompt_embeds": 1},
    "sd3": {"pooled_prompt_embeds": 2},
    "pixart": {"prompt_attention_mask": 1},
    "chroma": {"prompt_attention_mask": 2},
    "z_image": {},
    "klein": {},
    "wan": {},
}
"""What stands beside ``prompt_embeds``, and where ``encode_prompt`` returns it."""


def texts(name, told):
    """The encoded prompt and its mask, of a call's arguments."""
    return {key: told[key] for key in ("prompt_embeds", MASKS[name])}


def tapped(pipe, images, **how):
    return pipe.tap(images, **HOW | how).activations[PLACE].tensor


@pytest.mark.parametrize("name", MASKS)
def test_encoded_prompts_are_what_the_network_reads(name):
    stock, told = source(name)
    pipe, images = ActivationTapPipeline.from_pipe(stock), pictures(2, 32)
    found = tapped(pipe, images, **texts(name, told))
    latents = pipe._adapter.encode(images * 2 - 1)
    cond = masked(told["prompt_embeds"], told[MASKS[name]])
    wanted = tap_latents(Denoiser.from_diffusers(stock), latents, cond, TapConfig(PLACE, 300))[PLACE].tensor
    assert torch.equal(found, wanted)
    other = states(*told["prompt_embeds"].shape, seed=8)
    assert not torch.allclose(tapped(pipe, images, **texts(name, told) | {"prompt_embeds": other}), found)
    each = tapped(
        pipe,
        images,
        prompt_embeds=torch.cat([told["prompt_embeds"], other]),
        **{MASKS[name]: told[MASKS[name]].repeat(2, 1)},
    )
    torch.testing.assert_close(each[:1], found[:1])
    assert not torch.allclose(each[1:], found[1:])


@pytest.mark.parametrize("name", MASKS)
def test_a_masked_token_acts_as_one_that_was_cut_away(name):
    stock, told = source(name)
    pipe, images, given = ActivationTapPipeline.from_pipe(stock), pictures(1, 32), texts(name, told)
    short = {key: value[:, :5] for key, value in given.items()}
    mask = given[MASKS[name]].clone()
    mask[:, 5:] = 0
    found, wanted = tapped(pipe, images, **given | {MASKS[name]: mask}), tapped(pipe, images, **short)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(found, tapped(pipe, images, **given))


@pytest.mark.parametrize("name", MASKS)
def test_matching_takes_them_too(name):
    stock, told = source(name)
    images, how = pictures(2, 32), HOW | texts(name, told)
    how.pop("output_type")
    found = CorrespondencePipeline.from_pipe(stock).match(images[:1], images[:1], [[0.25, 0.75]], temperature=0, **how)
    assert torch.allclose(found[0].points, torch.tensor([[0.25, 0.75]]), atol=0.26)
    masks = torch.zeros(2, 32, 32, dtype=torch.long)
    masks[:, :, 16:] = 1
    assert SegmentationPipeline.from_pipe(stock).segment(images, masks, images, **how).shape == (2, 32, 32)


@pytest.mark.parametrize("name", PARTS)
def test_they_are_what_the_pipeline_encodes(name):
    stock, _ = source(name)
    pipe, images, prompt = ActivationTapPipeline.from_pipe(stock), pictures(1), "a photo of a cat"
    unguided = {} if name in ("flux", "klein") else {"do_classifier_free_guidance": False}
    unguided |= {"max_sequence_length": 512} if name == "wan" else {}  # as its call asks for
    with torch.no_grad():
        parts = stock.encode_prompt(*[[prompt], None, None][: {"flux": 2, "sd3": 3}.get(name, 1)], **unguided)
    given = {"prompt_embeds": parts[0]} | {key: parts[place] for key, place in PARTS[name].items()}
    torch.testing.assert_close(tapped(pipe, images, **given), tapped(pipe, images, prompt=prompt))
    assert not torch.allclose(tapped(pipe, images, prompt="a horse"), tapped(pipe, images, prompt=prompt))


def test_what_belongs_to_them_is_asked_for():
    for name in ("krea2", "lumina2"):
        stock, told = source(name)
        pipe = ActivationTapPipeline.from_pipe(stock)
        with pytest.raises(VitrineError, match=f"encoded prompts: .*{MASKS[name]}.*, of {type(stock).__name__}"):
            tapped(pipe, pictures(1, 32), prompt_embeds=told["prompt_embeds"])
        with pytest.raises(VitrineError, match="prompt: given a text, and .* without a text encoder"):
            tapped(pipe, pictures(1, 32), prompt="a cat")
        with pytest.raises(VitrineError, match="prompt and prompt_embeds"):
            tapped(pipe, pictures(1, 32), prompt="a cat", **texts(name, told))
    stock, told = source("qwen_image")  # its pipeline takes an unpadded prompt without a mask
    pipe, images = ActivationTapPipeline.from_pipe(stock), pictures(1, 32)
    bare = tapped(pipe, images, prompt_embeds=told["prompt_embeds"])
    assert torch.equal(bare, tapped(pipe, images, **texts("qwen_image", told)))
    stock, told = source("flux")
    with pytest.raises(VitrineError, match="pooled_prompt_embeds.*of FluxPipeline"):
        tapped(ActivationTapPipeline.from_pipe(stock), pictures(1), prompt_embeds=torch.zeros(1, 7, 24))
    assert set(PARTS) | set(MASKS) == {*MAKERS, "chroma", *MASKS}
