"""Word Map in real ComfyUI: the word's tokens, against attention written out, and what it refuses; words of tokens."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from vitrine.engine.activations import text_maps, word_map
from vitrine.engine.errors import VitrineError
from vitrine.engine.pipelines import ActivationTapPipeline
from vitrine.engine.portraits import PARTS, load_portraits, render, sample_scenes

PROMPT = "a smiling tan face with curly red hair beard navy shirt on blue"


@pytest.fixture(scope="module")
def told(comfy):
    model, clip, vae = comfy.call("VitrineLoadPortraits")
    positive = comfy.nodes.NODE_CLASS_MAPPINGS["CLIPTextEncode"]().encode(clip, PROMPT)[0]
    return {"model": model, "clip": clip, "vae": vae, "positive": positive, "prompt": PROMPT, "seed": 0}


@pytest.fixture(scope="module")
def scene():
    scenes = sample_scenes([3]).with_attributes(
        hair="curly",
        hair_color="red",
        hat="none",
        skin="tan",
        glasses="none",
        beard="beard",
        mole="none",
        mouth="smiling",
        shirt="navy",
        background="blue",
    )
    return render(scenes, 64)


def test_the_map_is_the_pipelines_and_is_where_the_word_is(comfy, told, scene):
    image = scene.images.permute(0, 2, 3, 1)
    for word, part in (("beard", "beard"), ("hair", "hair")):
        drawn, mask = comfy.call("VitrineWordMap", image=image, word=word, timestep=300.0, **told)
        pipe = ActivationTapPipeline.from_pipe(load_portraits().pipeline())
        pipe.set_progress_bar_config(disable=True)
        at = 1 + PROMPT.split().index(word)
        taps = pipe.tap(
            scene.images, PROMPT, list(text_maps(pipe.unet)), timestep=300.0, output_type="none"
        ).activations
        taps = {a: SimpleNamespace(tensor=tap.tensor[..., [at]]) for a, tap in taps.items()}
        torch.testing.assert_close(mask, word_map(taps, (64, 64)), atol=2e-4, rtol=0)
        inside = scene.parts[0] == PARTS.index(part)
        assert drawn.shape == (1, 64, 64, 3) and float(mask[0][inside].mean()) > 1.3 * float(mask[0][~inside].mean())


def test_several_words_and_none(comfy, told, scene):
    image = scene.images.permute(0, 2, 3, 1)
    both = comfy.call("VitrineWordMap", image=image, word="Red hair", timestep=300.0, **told)[1]
    assert not torch.equal(both, comfy.call("VitrineWordMap", image=image, word="hair", timestep=300.0, **told)[1])
    for wrong in ("nose", "", "hair nose"):
        with pytest.raises(VitrineError, match=r"word: given .*accepted: .* curly, red"):
            comfy.call("VitrineWordMap", image=image, word=wrong, timestep=300.0, **told)
    with pytest.raises(VitrineError, match="no text in the graph that gives this prompt"):
        comfy.call("VitrineWordMap", image=image, word="hair", timestep=300.0, **told | {"prompt": ""})


def test_the_text_is_read_from_the_graph(comfy):
    graph = {
        "1": {"class_type": "VitrineLoadPortraits", "inputs": {}},
        "2": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 1], "text": PROMPT}},
        "3": {"class_type": "VitrineRenderPortrait", "inputs": {"seed": 3, "count": 2, "size": 64}},
        "4": {"class_type": "VitrineWordMap", "inputs": {
            "model": ["1", 0], "clip": ["1", 1], "vae": ["1", 2], "image": ["3", 0], "positive": ["2", 0],
            "word": "shirt", "seed": 0, "timestep": 300.0}},
        "5": {"class_type": "PreviewImage", "inputs": {"images": ["4", 0]}},
    }  # fmt: skip
    result, error = comfy.run(graph)
    assert error is None, error
    assert len(result["outputs"]["5"]["images"]) == 2 and "token 11 of" in str(result["outputs"]["4"])


def words_graph(between, positive, word="shirt"):
    nodes = {
        "1": ("VitrineLoadPortraits", {}), "2": ("CLIPTextEncode", {"clip": ["1", 1], "text": PROMPT}),
        "3": ("VitrineRenderPortrait", {"seed": 3, "count": 1, "size": 64}),
        "4": ("VitrineWordMap", {"model": ["1", 0], "clip": ["1", 1], "vae": ["1", 2], "image": ["3", 0], "word": word,
                                 "positive": positive, "seed": 0, "timestep": 300.0}),
    } | between  # fmt: skip
    return {number: {"class_type": kind, "inputs": inputs} for number, (kind, inputs) in nodes.items()}


NEGATIVE = "shirt shirt of a bald head"
REPLACED = {"string": "a smiling face of X on blue", "find": "X", "replace": "two with curly hair and navy shirt"}
BETWEEN = {
    "the negative of a pair": (
        {"5": ("CLIPTextEncode", {"clip": ["1", 1], "text": NEGATIVE}), "6": ("VAEEncode", {"pixels": ["3", 0],
         "vae": ["1", 2]}), "7": ("SolidMask", {"value": 1.0, "width": 64, "height": 64}),
         "8": ("InpaintModelConditioning", {"positive": ["2", 0], "negative": ["5", 0], "vae": ["1", 2],
               "pixels": ["3", 0], "mask": ["7", 0], "noise_mask": False})},
        ["8", 1], "tokens 1, 2 of",
    ),
    "a node that passes a text on under another name": (
        {"5": ("StringTrim", {"string": f"  {PROMPT} ", "mode": "Both"}),
         "6": ("CLIPTextEncode", {"clip": ["1", 1], "text": ["5", 0]})},
        ["6", 0], "token 11 of",
    ),
    "a text that a node makes": (
        {"5": ("StringReplace", REPLACED), "6": ("CLIPTextEncode", {"clip": ["1", 1], "text": ["5", 0]})},
        ["6", 0], "no text in the graph that gives this prompt",
    ),
    "an average of two": (
        {"5": ("CLIPTextEncode", {"clip": ["1", 1], "text": NEGATIVE}),
         "6": ("ConditioningAverage", {"conditioning_to": ["5", 0], "conditioning_from": ["2", 0],
               "conditioning_to_strength": 1.0})},
        ["6", 0], "tokens 1, 2 of",
    ),
}  # fmt: skip
"""What stands between a text and the map -> (its nodes, the link, what is said)."""


@pytest.mark.parametrize("name", BETWEEN)
def test_the_text_is_the_prompts_own_or_asked_for(comfy, name):
    comfy.loop.run_until_complete(comfy.nodes.init_builtin_extra_nodes())
    between, link, wanted = BETWEEN[name]
    result, error = comfy.run(words_graph(between, link))
    said = str(error) if error else str(result["outputs"]["4"])
    assert wanted in said, said


def test_a_typed_text_of_another_prompt_is_said(comfy, told, scene):
    from vitrine.nodes.comfy.prompt_words import is_text_of

    assert is_text_of(told["clip"], PROMPT, told["positive"]) and not is_text_of(told["clip"], "b", told["positive"])


def test_maps_of_pictures_that_are_not_square():
    maps = {"map": SimpleNamespace(tensor=torch.rand(2, 3, 6 * 4, 1))}
    assert word_map(maps, (96, 64)).shape == (2, 96, 64)
    with pytest.raises(VitrineError, match="24 positions"):
        word_map(maps, (64, 64))


@pytest.mark.parametrize(
    ("pieces", "whole"),
    [
        (["<s>", "a</w>", "zor", "bal</w>", "<e>"], ["<s>", "a", "zorbal", "zorbal", "<e>"]),
        (["\u2581a", "\u2581zor", "bal"], ["a", "zorbal", "zorbal"]),
        (["\u0120a", "\u0120zor", "bal"], ["a", "zorbal", "zorbal"]),
    ],
    ids=["CLIP", "T5", "Qwen"],
)
def test_a_word_of_several_tokens_is_whole_at_each(comfy, pieces, whole):
    from vitrine.nodes.comfy.prompt_words import words_at

    inner = {k: p for k, p in enumerate(pieces) if not p.startswith("<")}
    special = {"pad_token": -1, "end_token": len(pieces) - 1 if "<e>" in pieces else -2}
    encoder = SimpleNamespace(inv_vocab=inner, start_token=0 if "<s>" in pieces else None, **special)
    tokens = [(k, 1.0, 1) for k in range(len(pieces))]
    clip = SimpleNamespace(
        tokenizer=SimpleNamespace(x=encoder), tokenize=lambda text, **_: {"x": [tokens if text else []]}
    )
    named = [w.replace("<start>", "<s>").replace("<end>", "<e>") for w in words_at(clip, "text", len(pieces))]
    assert named == whole and words_at(clip, "text", 99) == []


SAID = "a zorbal fox"


@pytest.mark.parametrize(
    ("module", "tokenizer", "dropped"),
    [
        ("z_image", "ZImageTokenizer", 0),
        ("qwen_image", "QwenImageTokenizer", 34),
    ],
)
def test_an_encoders_template_is_told_from_the_prompt(comfy, module, tokenizer, dropped):
    """Z-Image's network reads the whole template, Qwen-Image's what follows the 34 tokens before the prompt."""
    from comfy import text_encoders
    from vitrine.nodes.comfy.prompt_words import words_at
    from vitrine.nodes.word_map import TEMPLATE, positions_of

    tokens = getattr(importlib.import_module(f"{text_encoders.__name__}.{module}"), tokenizer)()
    clip = SimpleNamespace(tokenizer=tokens, tokenize=tokens.tokenize_with_weights)
    ((name, (chunk,)),) = clip.tokenize(SAID).items()
    words = words_at(clip, SAID, len(chunk) - dropped)
    own = [k for k, word in enumerate(words) if not word.startswith("<")]
    assert len(words) == len(chunk) - dropped and [words[k] for k in own] == ["a", *3 * ["zorbal"], "fox"]
    assert own == list(range(own[0], own[-1] + 1)) and words[own[-1] + 1] == "<|im_end|>"
    assert words[-2:] == ["<assistant>", "<newline>"] and ("<user>" in words) == (not dropped)
    assert positions_of(TEMPLATE, words) == [k for k in range(len(words)) if k not in own]
    assert words_at(clip, SAID, len(chunk) - 7) == []
    assert "fox" in words_at(clip, "zorbal\nfox", len(clip.tokenize("zorbal\nfox")[name][0]))
