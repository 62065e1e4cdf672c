"""The neurons of *Block Copying Neurons (NEMO)* by layer, in ComfyUI's page: lit, asked what they hold, left alone."""

import asyncio
import json

from vitrine.engine.nemo import NeuronSet
from vitrine_tests.lanes import page_modes

FOUND = {"down-level1-repeat0-vit-block0-cross-v": (3, 40, 90), "mid-vit-block0-cross-v": (7,)}
FIRST = "down-level1-repeat0-vit-block0-cross-v"
RECORD = {
    "address": FIRST,
    "index": 40,
    "deviations": 6.58,
    "activation": 0.73,
    "usual": 0.353,
    "tokens": [[15, 3.15], [16, 3.03]],
    "alone": 0.5298,
    "limit": 0.5004,
}
INFO = {"prompt": "a face with a navy shirt", "held": [RECORD]}
HELD = [
    "“a face with a navy shirt”",
    "6.58 deviations above or below ordinary captions: 0.73, usually 0.35",
    "strongest at tokens 15 (3.15), 16 (3.03) of the prompt (from 0)",
    "left alone, likeness to the copied prediction rises to 0.530; below 0.500 was wanted",
]
BUILD = """(async () => {
    const model = add('VitrineLoadPortraits', 60, 80)
    const neurons = add('VitrineLoadNeurons', 60, 300, { file: 'found.json' })
    const block = add('VitrineNEMONeuronBlocker', 480, 80), shown = add('VitrineActivePatches', 1000, 80)
    const any = add('PreviewAny', 1000, 300)
    join(model, 0, block, 'model'); join(neurons, 0, block, 'neurons'); join(block, 0, shown, 'model')
    join(shown, 1, any, 'source')
    window.block = block
})()"""
SPARED = "block.widgets.find(w => w.name === 'spared').value"
PRESS = "press(block)"
DOTS = "[...document.querySelectorAll('.vitrine-neuron')].map(e => [e.dataset.name, e.dataset.state === 'spared'])"
DETAIL = "[...document.querySelector('.vitrine-held').children].slice(1).map(e => e.textContent)"
SHOWN = "document.querySelector('.vitrine-held b')?.textContent ?? ''"
AGAIN = "window.block = kind('VitrineNEMONeuronBlocker'); null"
COPIED = """(() => { app.canvas.copyToClipboard([block]); app.canvas.pasteFromClipboard()
    return app.graph._nodes.filter(n => n.comfyClass === block.comfyClass && n !== block)
        .map(n => n.widgets.find(w => w.name === 'spared').value) })()"""


async def _click(tab, selector):
    left, top, width, height = await tab.box(selector)
    await tab.drag([(left + width / 2, top + height / 2)])


async def _walk(driver, address, vue):
    async with driver.page(address) as tab:
        await tab.build(BUILD, vue)
        await _run(tab, address)
        await tab.evaluate(PRESS)
        await tab.wait_for("document.querySelectorAll('.vitrine-neuron').length === 4")
        seen = {"first": await tab.evaluate(DOTS)}
        mark = f'.vitrine-neuron[data-name="{FIRST} 40"]'
        await _click(tab, mark)
        seen["asked"], seen["held"] = await tab.evaluate(SPARED), await tab.evaluate(DETAIL)
        await _click(tab, ".vitrine-switch")
        seen["clicked"], seen["dots"] = await tab.evaluate(SPARED), dict(await tab.evaluate(DOTS))
        await _click(tab, mark)
        seen["twice"] = await tab.evaluate(SPARED)
        await _click(tab, mark)
        for name in ("Undo", "Redo"):
            await tab.command(name)
            await tab.evaluate(AGAIN)
            seen[name], seen[f"{name} shows"] = await tab.evaluate(SPARED), await tab.evaluate(SHOWN)
        for vain in (".vitrine-switch", ".vitrine-switch"):  # what undo has put there anew still takes clicks
            await _click(tab, vain)
            seen["after undo"] = [*seen.get("after undo", []), await tab.evaluate(SPARED)]
        await tab.reload()
        await tab.evaluate(AGAIN)
        seen["reloaded"] = await tab.evaluate(SPARED)
        seen["executed"] = await _run(tab, address)
        await tab.wait_for(f"{DOTS}.filter(([, spared]) => spared).length === 1")  # drawn anew when the run reports
        seen["again"], seen["held again"] = dict(await tab.evaluate(DOTS)), await tab.evaluate(DETAIL)
        await _click(tab, f'.vitrine-neuron[data-name="{FIRST} 3"]')
        seen["unknown"] = await tab.evaluate(DETAIL)
        seen["copied"] = await tab.evaluate(COPIED)
        return seen, tab.faults()


async def _run(tab, address):
    """Queue and wait: the text that execute was given."""
    entry = await tab.run(address)
    assert entry["status"]["status_str"] == "success", entry["status"]["messages"][-1]
    nodes = entry["prompt"][2].values()
    return next(n["inputs"]["spared"] for n in nodes if n["class_type"] == "VitrineNEMONeuronBlocker")


@page_modes("classic")
def test_neurons_are_lit_and_spared_by_a_click(driver, address, page_base, vue):
    folder = page_base / "models" / "vitrine_neurons"
    folder.mkdir(parents=True, exist_ok=True)
    NeuronSet(FOUND, info=INFO).save(folder / "found.json")
    seen, errors = asyncio.run(_walk(driver, address, vue))
    names = [f"{a} {i}" for a, indices in FOUND.items() for i in indices]
    assert sorted(name for name, _ in seen["first"]) == sorted(names) and not any(left for _, left in seen["first"])
    assert seen["asked"] == "" and seen["held"] == HELD == seen["held again"], "the first click only asks"
    assert seen["clicked"] == names[1] == seen["Redo"] == seen["reloaded"] == seen["executed"], json.dumps(seen)
    assert seen["copied"] == [names[1]] and seen["Undo"] == seen["twice"] == ""
    assert seen["Undo shows"].startswith(names[1]) and seen["Undo shows"].endswith(": blocked")
    assert seen["after undo"] == ["", names[1]]
    assert seen["Redo shows"].endswith(": left alone")
    assert len(seen["unknown"]) == 1 and seen["unknown"][0].startswith("Nothing is recorded")
    for dots in (seen["dots"], seen["again"]):
        assert [name for name, left in dots.items() if left] == [names[1]]
    assert not errors
