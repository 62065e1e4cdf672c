"""What artists type into the page's own search finds our node among its first three, by name or by alias."""

import asyncio
import json
from pathlib import Path

import pytest

SEARCHES = {
    "ActivationTap": [
        "what the model sees",
        "look inside",
        "interpret",
        "x-ray",
        "diffusion features",
        "visualize activations",
    ],
    "ActivationTap TapDuringSampling ActivationPicture": ["attention map", "heatmap", "see what the model sees"],
    "TapDuringSampling": ["record activations", "watch the sampler", "h-space"],
    "WordMap": ["what the model sees for one word", "word heatmap", "DAAM"],
    "TrainW2WSlider": ["slider from pictures", "make a slider from pictures", "image pair slider"],
    "NEMOCompareCopies": ["did it help", "compare copies"],
    "FindCorrespondence": [
        "find the same part",
        "landmarks",
        "point transfer",
        "track points",
        "click a point",
        "pose landmarks",
        "match pictures",
    ],
    "SegmentLikeThis": [
        "object mask",
        "few-shot segmentation",
        "click to mask",
        "select object",
        "auto mask",
        "remove background",
    ],
    "NEMONeuronBlocker": ["stop copying", "forget", "block neurons", "stop the model copying a picture"],
    "NEMONeuronBlocker NEMOBake": ["concept erasure", "unlearn", "erase concept"],
    "NEMOFindNeurons": ["find neurons", "memorized picture", "training picture"],
    "NEMOCopyCheck NEMODetect NEMONeuronBlocker": ["copyright", "plagiarism"],
    "NEMOCopyCheck": ["overtrained lora", "does my lora copy", "overfitting", "duplicate pictures"],
    "EMDOneStepGenerator": [
        "one step",
        "draw in one step",
        "lightning",
        "schnell",
        "4 steps",
        "faster",
        "few steps",
        "hyper",
        "sd turbo",
        "speed up",
    ],
    "EMDDistill": ["train turbo", "distill my model"],
    "W2WEdit": ["pull sliders", "sliders", "edit person", "change face", "face edit", "age slider", "beard"],
    "W2WEdit TrainW2WDirection SaveW2WLora": ["lora slider", "concept slider"],
    "W2WInvert": ["face swap", "likeness", "face from photo", "one image character"],
    "W2WInvert W2WEdit": ["consistent character"],
    "W2WSample": ["random person", "new character"],
    "BuildW2WSpace W2WBlend SaveW2WLora": ["merge lora", "mix lora", "folder of loras", "combine loras"],
    "ResolutionTransferLoader": [
        "twice the size",
        "double heads",
        "deep shrink",
        "hires fix",
        "4k",
        "yarn",
        "DyPE",
        "2k",
        "aspect ratio",
        "repeated heads",
    ],
    "ControlValues ControlConditionedSampler ApplyGammaSchedule": [
        "original size",
        "micro conditioning",
        "blurry",
        "crop conditioning",
    ],
    "ActivePatches": ["lora info", "list loras"],
    "EMDVariety": ["diversity", "same face"],
}
"""Nodes, any of which serves -> what is typed."""
PHRASES = {
    "WordMap": [
        "prompt heatmap",
        "heatmap prompt",
        "word attention map",
        "token heatmap",
        "cross attention map",
        "text mask",
    ],
    "ActivationTap": ["feature map", "unet features", "inspect layers", "attention layers"],
    "TapDuringSampling": ["layers sampling", "watch layers"],
    "FindCorrespondence": ["match points", "same point", "eye to eye", "points faces"],
    "SegmentLikeThis": ["mask by click", "click mask", "mask example", "transfer mask", "cut out object"],
    "RankActivations": ["best layers", "which layer"],
    "ActivePatches": ["which loras", "model info", "show loras"],
    "ControlValues": ["crop sdxl", "sdxl crop", "sdxl target size"],
    "ControlConditionedSampler": ["cropped heads", "size sampler"],
    "ResolutionTransferLoader": [
        "upscale without double heads",
        "upscale double heads",
        "two heads",
        "duplicate heads",
        "second pass",
        "bigger picture",
        "wide picture",
    ],
    "W2WEdit": [
        "face slider",
        "slider face",
        "attribute slider",
        "smile",
        "smile slider",
        "hair slider",
        "same character edit",
    ],
    "W2WEdit W2WInvert": ["same character", "character same"],
    "W2WInvert": ["same face", "photo to lora", "face photo lora", "clone face"],
    "W2WSample": ["random face", "new person", "random character"],
    "W2WBlend": ["face morph", "morph faces", "mix faces"],
    "W2WBlend BuildW2WSpace": ["lora mixer", "mix loras", "blend loras"],
    "BuildW2WSpace": ["lora folder sliders"],
    "TrainW2WSlider": ["train slider", "slider photos"],
    "TrainW2WDirection": ["slider labels"],
    "SaveW2WLora": ["export lora", "save person"],
    "NEMONeuronBlocker": ["disable neurons", "prevent copying"],
    "NEMODetect": ["memorized prompt", "detect memorization"],
    "NEMOVerify": ["verify unlearning"],
    "NEMOCopyCheck": ["check copies", "copied images"],
    "LoRAReport": ["check lora", "lora quality", "test lora", "overfit lora"],
    "EMDOneStepGenerator": ["lightning lora", "lcm lora", "turbo sampler", "fast sampler", "one step sampler"],
    "EMDDistill": ["train lightning", "train lcm"],
    "EMDVariety": ["seed variety"],
    "LoadPortraits": ["demo model"],
}
"""As SEARCHES: pairs of words, in either order, that stand in no single word of a name."""
SEEN = 30
"""fuse.js, with the page's settings, sees a word that begins within this many letters of a text."""
ASK = """(() => {
    const store = document.querySelector('#vue-app').__vue_app__.config.globalProperties.$pinia._s.get('nodeDef')
    return QUERIES.map(q => store.nodeSearchService.searchNode(q).slice(0, 3).map(d => d.name))
})()"""
"""The page's own service with its own settings (fuse.js), as the search box and the node library use it."""


def _meets(text, typed):
    """Whether the page finds a text by what is typed: every word of it, in any order, in the text's beginning."""
    places = [text.lower().find(word) for word in typed.lower().split()]
    return all(0 <= place <= SEEN for place in places)


@pytest.fixture(scope="module")
def texts(comfy):
    """Node -> what the page searches in."""
    ours = {k: v.define_schema() for k, v in comfy.nodes.NODE_CLASS_MAPPINGS.items() if k.startswith("Vitrine")}
    return {k: [s.node_id, s.display_name, *s.search_aliases] for k, s in ours.items()}


def test_pairs_of_words_meet_in_one_text(texts):
    """The page never puts together two words of two aliases."""
    table = [(q, {f"Vitrine{n}" for n in nodes.split()}) for nodes, queries in PHRASES.items() for q in queries]
    assert len(table) >= 60 and not _meets("slider of a person", "face slider")
    missed = {q: wanted for q, wanted in table if not any(_meets(t, q) for n in wanted for t in texts[n])}
    assert not missed


def test_every_node_has_pairs_that_the_page_sees(texts):
    from vitrine.nodes.search_words import SEARCHES

    assert set(SEARCHES) == set(texts)
    for node, (_, _, *searches) in texts.items():
        assert sum(" " in text for text in searches) >= 2 and len(set(searches)) == len(searches), node
        unseen = [text for text in searches if not _meets(text, text)]
        assert not unseen, (node, unseen)


def test_searches_stand_in_one_file():
    from vitrine.nodes import search_words

    own = Path(search_words.__file__)
    assert [p.name for p in own.parent.rglob("*.py") if "search_aliases" in p.read_text(encoding="utf-8")] == [own.name]


async def _ask(driver, address, queries):
    async with driver.page(address) as tab:
        return await tab.evaluate(ASK.replace("QUERIES", json.dumps(queries)))


@pytest.mark.nightly
def test_words_of_artists_find_our_nodes(driver, address):
    both = [*SEARCHES.items(), *PHRASES.items()]
    table = [(q, {f"Vitrine{n}" for n in nodes.split()}) for nodes, queries in both for q in queries]
    assert len(table) >= 120
    found = asyncio.run(_ask(driver, address, [q for q, _ in table]))
    missed = {q: first for (q, wanted), first in zip(table, found, strict=True) if not wanted & set(first)}
    assert not missed, "; ".join(f"{q}: {first}" for q, first in missed.items())
