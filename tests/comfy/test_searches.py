"""What artists type into the page's own search finds our node among its first three, by name or by alias."""

import asyncio
import json

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
ASK = """(() => {
    const store = document.querySelector('#vue-app').__vue_app__.config.globalProperties.$pinia._s.get('nodeDef')
    return QUERIES.map(q => store.nodeSearchService.searchNode(q).slice(0, 3).map(d => d.name))
})()"""
"""The page's own service with its own settings (fuse.js), as the search box and the node library use it."""


async def _ask(driver, address, queries):
    async with driver.page(address) as tab:
        return await tab.evaluate(ASK.replace("QUERIES", json.dumps(queries)))


@pytest.mark.nightly
def test_words_of_artists_find_our_nodes(driver, address):
    table = [(q, {f"Vitrine{n}" for n in nodes.split()}) for nodes, queries in SEARCHES.items() for q in queries]
    assert len(table) >= 60
    found = asyncio.run(_ask(driver, address, [q for q, _ in table]))
    missed = {q: first for (q, wanted), first in zip(table, found, strict=True) if not wanted & set(first)}
    assert not missed, "; ".join(f"{q}: {first}" for q, first in missed.items())
