"""Inputs that stand below one option of a choice, in ComfyUI's real page, classic and Nodes 2.0."""

import asyncio
import json
import os

from vitrine_tests.lanes import page_modes

BUILD = """(async () => {
    window.invert = add('VitrineW2WInvert', 40, 60)
    window.student = add('VitrineEMDOneStepGenerator', 560, 60)
})()"""
NODE = "app.graph._nodes.find(n => n.type === '%s')"
NAMES = f"{NODE}.widgets.map(w => w.name)"
VALUES = f"Object.fromEntries({NODE}.widgets.map(w => [w.name, w.value]))"
CHOOSE = f"""(() => {{
    const choice = {NODE}.widgets.find(w => w.name === 'preset')
    choice.value = %s
    choice.callback?.(choice.value)
}})()"""
CASES = {
    "VitrineW2WInvert": ("custom", {"preset.steps": 7, "preset.lr": 0.2}),
    "VitrineEMDOneStepGenerator": ("manual", {"preset.timestep": 399, "preset.noise": "vp"}),
}


async def _walk(driver, address, vue, kind):
    option, values = CASES[kind]
    async with driver.page(address) as tab:
        await tab.build(BUILD, vue)
        before = await tab.evaluate(NAMES % kind)
        await tab.evaluate(CHOOSE % (kind, json.dumps(option)))
        await tab.settle()
        chosen = await tab.evaluate(NAMES % kind)
        for name, value in values.items():
            await tab.evaluate(f"{NODE % kind}.widgets.find(w => w.name === '{name}').value = {json.dumps(value)}")
        if folder := os.environ.get("VITRINE_PICTURES"):
            await tab.screenshot(f"{folder}/{kind}-{'vue' if vue else 'classic'}.png")
        await tab.reload()
        kept = await tab.evaluate(VALUES % kind)
        prompt = await tab.evaluate("app.graphToPrompt().then(p => Object.values(p.output))")
        asked = next(node["inputs"] for node in prompt if node["class_type"] == kind)
        return before, chosen, kept, asked, tab.faults()


@page_modes("Nodes 2.0")
def test_an_option_shows_its_own_inputs_and_a_saved_graph_keeps_them(driver, address, vue):
    for kind, (option, values) in CASES.items():
        before, chosen, kept, asked, faults = asyncio.run(_walk(driver, address, vue, kind))
        assert not set(values) & set(before) and set(values) <= set(chosen), kind
        assert kept["preset"] == option and values.items() <= kept.items(), kind
        assert asked["preset"] == option and values.items() <= asked.items(), kind
        assert not faults
