"""Texts that nodes mean to show are on them in ComfyUI's real page, classic and Nodes 2.0."""

import asyncio

from vitrine_tests.lanes import page_modes

BUILD = """(async () => {
    const space = add('VitrineLoadW2WSpace', 60, 80, { components: KEPT }), person = add('VitrineW2WSample', 500, 80)
    const any = add('PreviewAny', 1000, 80)
    space.connect(0, person, 0); person.connect(1, any, 0)
    window.lora = add('VitrineLoRAReport', 60, 400)  // without its model: this run leaves it out
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
        chips = "[...document.querySelectorAll('.vitrine-verdict')].map(e => e.dataset.verdict)"
        before.append(await tab.evaluate(chips))
        await tab.evaluate("lora.widgets.find(w => w.type === 'button' && /report/.test(w.name)).callback()")
        await tab.wait_for("document.querySelector('.vitrine-verdicts').textContent.includes('No report yet')")
        await tab.evaluate("lora.graph.remove(lora)")
        await tab.run(address)
        await tab.wait_for(f"{shown[0]}.includes('models') && {shown[1]}.includes('earest')")
        return before, [await tab.evaluate(s) for s in shown], tab.faults()


@page_modes(None)
def test_a_report_is_on_its_node(driver, address, vue):
    before, after, faults = asyncio.run(_shown(driver, address, vue))
    assert before.pop() == ["not measured"] * 5, "five verdicts have room before a run, too"
    assert not any("520 models" in text or "earest" in text for text in before)
    assert f"520 models, {300 + vue} components" in after[0] and "earest" in after[1] and not faults
