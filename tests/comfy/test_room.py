"""Room on the page: what a run shows on a node and a panel that opens lie over no other node, in both modes."""

import asyncio
import json
import os
import re
from pathlib import Path

import pytest
from vitrine_tests.templates import ALL

ROOT = Path(__file__).parents[2]
COMFYUI = Path(os.environ.get("COMFYUI_PATH", "~/comfy/ComfyUI")).expanduser()
SCRIPT = (ROOT / "nodes" / "web" / "room.js").read_text(encoding="utf-8")
SHOWS = {
    name: ["PICTURE" in rest, "TEXT" in rest] for name, rest in re.findall(r"(Vitrine\w+): ([A-Z +]+)[,\n]", SCRIPT)
}
"""Node -> whether a run shows pictures and a text on it, as the page's script says."""
PANELS = json.dumps(["points on the picture", "people and sliders", "neurons by layer", "edit the curve"])
READY = f"""(async () => {{
    window.vitrineApi = (await import('/scripts/api.js')).api
    const canvas = document.createElement('canvas'); canvas.width = canvas.height = 64
    const form = new FormData()
    form.append('image', await new Promise(done => canvas.toBlob(done)), 'room.png')
    await vitrineApi.fetchApi('/upload/image', {{ method: 'POST', body: form }})
    window.vitrineShows = {json.dumps(SHOWS)}
}})()"""
SHOW = """(() => {
    const shown = { images: [{ filename: 'room.png', subfolder: '', type: 'input' }] }
    for (const n of app.graph._nodes) {
        const node = String(n.id), [picture, text] = vitrineShows[n.comfyClass] ?? [n.comfyClass === 'PreviewImage']
        const said = text ? { text: ['a line\\nand another that is longer than the first'] } : {}
        const output = { ...(picture ? shown : {}), ...said }
        if (picture) app.nodeOutputs[node] = shown
        if (picture || text)
            vitrineApi.dispatchCustomEvent('executed', { node, display_node: node, output, prompt_id: 'room' })
    }
})()"""
"""What the server tells the page when a run shows something, without the run."""
OPEN = f"""for (const n of app.graph._nodes) {{
    const b = n.properties.vitrine_panel ? null : n.widgets?.find(w => w.type === 'button' && {PANELS}.includes(w.name))
    b?.callback(b.value, app.canvas, n)
}}"""
BOXES = """app.graph._nodes.map(n => {
    const drawn = LiteGraph.vueNodesMode && document.querySelector(`[data-node-id="${n.id}"]`)?.getBoundingClientRect()
    n.updateArea()
    const [x, y, w, h] = n.boundingRect, scale = app.canvas.ds.scale
    return [`${n.title} (${n.id})`, x, y, ...(drawn ? [drawn.width / scale, drawn.height / scale] : [w, h])].map(
        v => typeof v === 'number' ? Math.round(v) : v)
})"""
"""Name, x, y, width and height of every node as it is drawn, with its title."""
MODES = pytest.mark.parametrize("vue", [False, True], ids=["classic", "Nodes 2.0"])


@pytest.fixture(scope="module")
def address(driver, tmp_path_factory):
    with driver.server(COMFYUI, ROOT, tmp_path_factory.mktemp("room") / "base") as found:
        yield found


def overlaps(boxes):
    """Pairs of (name, x, y, width, height) that share some place."""
    return [
        (a[0], b[0])
        for k, a in enumerate(boxes)
        for b in boxes[:k]
        if a[1] < b[1] + b[3] and b[1] < a[1] + a[3] and a[2] < b[2] + b[4] and b[2] < a[2] + a[4]
    ]


def test_every_node_that_shows_something_is_in_the_scripts_table():
    showing = {}
    for path in (ROOT / "nodes").glob("*.py"):
        for part in re.split(r"^class ", path.read_text(encoding="utf-8"), flags=re.M):
            part = part.partition("\ndef ")[0]  # the class alone
            if node := re.search(r'node_id="(\w+)"', part):
                showing[node[1]] = ["PreviewImage(" in part or "show_on(" in part, "text_on(" in part]
    for node, (picture, text) in showing.items():
        kept = SHOWS.get(node, [False, False])
        assert kept[0] >= picture and kept[1] >= text, node


FRESH = """(() => { let at = 0
    for (const type of Object.keys(vitrineShows)) {
        const n = LiteGraph.createNode(type)
        n.pos = [(at % 8) * 520, Math.floor(at / 8) * 900]; at += 1
        app.graph.add(n)
    } })()"""


async def _placed(driver, address, vue):
    async with driver.page(address) as tab:
        await tab.evaluate(READY)
        await tab.build(FRESH, vue)
        await tab.evaluate("app.canvas.ds.scale = 0.2; app.canvas.setDirty(true, true)")
        await tab.settle()
        before = await tab.evaluate(BOXES)
        await tab.evaluate(SHOW)
        await tab.settle()
        return before, await tab.evaluate(BOXES), tab.faults()


@MODES
def test_a_placed_node_keeps_its_size_when_a_run_shows_something(driver, address, vue):
    before, after, faults = asyncio.run(_placed(driver, address, vue))
    assert len(before) == len(SHOWS) >= 28 and not faults
    assert before == after


async def _templates(driver, address, vue, names):
    """Title -> what lies over what at opening, after a run, and with every panel open."""
    found = {}
    async with driver.page(address) as tab:
        await tab.evaluate(READY)
        await tab.send("Emulation.setDeviceMetricsOverride", width=1700, height=907, deviceScaleFactor=1, mobile=False)
        await tab.evaluate(f"app.extensionManager.setting.set('Comfy.VueNodes.Enabled', {json.dumps(vue)})")
        for path in names:
            graph = path.read_text(encoding="utf-8")
            opened = f"true, true, {json.dumps(path.stem)}, {{ openSource: 'template' }}"
            await tab.evaluate(f"app.loadGraphData({graph}, {opened})")
            await tab.settle()
            boxes = [await tab.evaluate(BOXES)]
            for step in (SHOW, OPEN):
                await tab.evaluate(f"{step}; null")
                await tab.settle()
                boxes.append(await tab.evaluate(BOXES))
            found[path.stem] = (
                [overlaps(drawn) for drawn in boxes],
                [box[1:3] for box in boxes[0]],
                [box[1:3] for box in boxes[-1]],
            )
        return found, tab.faults()


@pytest.mark.nightly
@MODES
def test_nothing_overlaps_in_any_template(driver, address, vue):
    """At opening, after a run, with every panel open; and no node had to be pushed away for that."""
    found, faults = asyncio.run(_templates(driver, address, vue, ALL))
    assert not faults and len(found) >= 24
    assert not {title: shared for title, (shared, _, _) in found.items() if any(shared)}
    assert not [title for title, (_, first, last) in found.items() if first != last]
