"""*Person Sliders (W2W)* shows the slider rows in use and a free one, in ComfyUI's page; hidden rows stay in graphs."""

import asyncio

from vitrine_tests.lanes import page_modes

BUILD = """(async () => {
    window.edit = add('VitrineW2WEdit', 100, 140)
    await new Promise(requestAnimationFrame)
    press(edit) // a fresh node comes with its panel open, whose sliders are the same
})()"""
CHOOSE = """(() => { const w = edit.widgets.find(w => w.name === 'NAME')
    w.value = 'VALUE'; w.callback?.('VALUE', app.canvas, edit) })()"""
ROWS = {
    False: "edit.widgets.filter(w => /^label_/.test(w.name) && edit.isWidgetVisible(w)).map(w => w.name)",
    True: "document.querySelector(`[data-node-id='${edit.id}']`).innerText.match(/label_\\d/g)",
}
SENT = "app.graphToPrompt().then(p => p.output[edit.id].inputs)"
SAVED = "app.graph.serialize().nodes[0].widgets_values"


async def _walk(driver, address, vue):
    async with driver.page(address) as tab:
        rows, seen = ROWS[vue], []
        await tab.build(BUILD, vue)
        before = await tab.evaluate(SAVED)
        seen.append(await tab.evaluate(rows))
        for name, value in (("label_1", "beard"), ("label_2", "glasses"), ("label_3", "bald"), ("label_2", "")):
            await tab.evaluate(CHOOSE.replace("NAME", name).replace("VALUE", value))
            await tab.settle()
            seen.append(await tab.evaluate(rows))
        await tab.reload()
        await tab.evaluate("window.edit = app.graph._nodes[0]; null")
        seen.append(await tab.evaluate(rows))
        fits = await tab.evaluate("edit.size[1] >= edit.computeSize()[1]")
        return seen, before, await tab.evaluate(SAVED), await tab.evaluate(SENT), fits, tab.faults()


@page_modes(None)
def test_rows_grow_as_they_are_used(driver, address, vue):
    seen, before, saved, sent, fits, faults = asyncio.run(_walk(driver, address, vue))
    names = [f"label_{row}" for row in (1, 2, 3, 4)]
    assert seen == [names[:1], names[:2], names[:3], names, names[:3], names[:3]]
    assert len(saved) == len(before) and saved[:6] == ["beard", 0, "", 0, "bald", 0]
    assert {f"{part}_{row}" for part in ("label", "strength") for row in (1, 2, 3, 4)} <= set(sent)
    assert sent["label_3"] == "bald" and fits and not faults
