"""Texts that nodes mean to show are on them in ComfyUI's real page, classic and Nodes 2.0."""

import asyncio

from vitrine_tests.lanes import page_modes

BUILD = """(async () => {
    const space = add('VitrineLoadW2WSpace', 60, 80, { components: KEPT }), person = add('VitrineW2WSample', 500, 80)
    const any = add('PreviewAny', 1000, 80)
    space.connect(0, person, 0); person.connect(1, any, 0)
    Object.assign(window, { space, person })
})()"""
ON_NODE = {
    True: "document.querySelector(`[data-node-id='${NODE.id}']`).innerText",
    False: "(e => e?.checkVisibility() ? e.innerText : '')(NODE.widgets.find(w => w.name === 'report')?.element)",
}


async def _shown(driver, address, vue):
    async with driver.page(address) as tab:
        await tab.build(BUILD.replace("KEPT", str(300 + vue)), vue)
        shown = [ON_NODE[vue].replace("NODE", name) for name in ("space", "person")]
        before = [await tab.evaluate(s) for s in shown]
        await tab.run(address)
        await tab.wait_for(f"{shown[0]}.includes('models') && {shown[1]}.includes('earest')")
        return before, [await tab.evaluate(s) for s in shown], tab.faults()


@page_modes(None)
def test_a_report_is_on_its_node(driver, address, vue):
    before, after, faults = asyncio.run(_shown(driver, address, vue))
    assert not any("520 models" in text or "earest" in text for text in before)
    assert f"520 models, {300 + vue} components" in after[0] and "earest" in after[1] and not faults
