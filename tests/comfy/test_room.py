"""Room on the page: what a run shows on a node and a panel that opens lie over no other node, in both modes."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from vitrine_tests.comfy.boxes import BOXES, overlaps
from vitrine_tests.templates import ALL

ROOT = Path(__file__).parents[2]
SCRIPT = (ROOT / "nodes" / "web" / "room.js").read_text(encoding="utf-8")
SHOWS = {
    name: ["PICTURE" in rest, "TEXT" in rest] for name, rest in re.findall(r"(Vitrine\w+): ([A-Z +]+)[,\n]", SCRIPT)
}
"""Node -> whether a run shows pictures and a text on it, as the page's script says."""
PANELS = json.dumps(["points on the picture", "people and sliders", "neurons by layer", "edit the curve"])
READY = f"""(async () => {{
    window.vitrineApi = (await import('/scripts/api.js')).api
    for (const [name, height] of [['room.png', 64], ['tall.png', 96]]) {{
        const canvas = document.createElement('canvas'); canvas.width = 64; canvas.height = height
        const form = new FormData()
        window.vitrineLive = await new Promise(done => canvas.toBlob(done))
        form.append('image', vitrineLive, name)
        await vitrineApi.fetchApi('/upload/image', {{ method: 'POST', body: form }})
    }}
    window.vitrineShows = {json.dumps(SHOWS)}
}})()"""
SHOW = """(() => {
    const shown = { images: [{ filename: 'room.png', subfolder: '', type: 'input' }] }
    for (const n of app.graph._nodes) {
        const node = String(n.id), [picture, text] = vitrineShows[n.comfyClass] ?? [n.comfyClass === 'PreviewImage']
        const said = text ? { text: ['a line that is longer than most nodes are wide by far\\n'.repeat(30)] } : {}
        const output = { ...(picture ? shown : {}), ...said }
        if (picture) app.nodeOutputs[node] = shown
        if (picture && vitrineShows[n.comfyClass]) vitrineApi.dispatchCustomEvent('b_preview_with_metadata', {
            blob: vitrineLive, nodeId: node, displayNodeId: node, parentNodeId: node, realNodeId: node, jobId: 'room' })
        if (picture || text)
            vitrineApi.dispatchCustomEvent('executed', { node, display_node: node, output, prompt_id: 'room' })
    }
})()"""
"""What the server tells the page when a run shows something, without the run: a live picture, then the node's own."""
OPENED = f"""app.graph._nodes.flatMap(n => [
    ...(n.properties.vitrine_panel ? [] : n.widgets ?? []).filter(w => {PANELS}.includes(w.name)),
    ...(n.comfyClass?.startsWith('Vitrine') && n.widgets?.some(w => w.options?.advanced) ? ['advanced'] : []),
].map(w => [n.id, w.name ?? w]))"""
"""[node, button] of every panel that is closed, and of *Show advanced inputs*."""
PRESS = """(([id, name]) => {
    const n = app.graph.getNodeById(id), b = n.widgets.find(w => w.name === name)
    if (name === 'advanced' && LiteGraph.vueNodesMode)
        document.querySelector(`[data-node-id="${id}"] [data-testid=advanced-inputs-button]`).click()
    else b.callback(b.value, app.canvas, n)
})"""


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


FRESH = """(() => {
    for (const type of Object.keys(LiteGraph.registered_node_types).filter(t => t.startsWith('Vitrine')))
        app.graph.add(LiteGraph.createNode(type))
    const tall = LiteGraph.createNode('LoadImage')
    app.graph.add(tall)
    tall.widgets.find(w => w.name === 'image').value = 'tall.png'
    for (const n of app.graph._nodes) {
        const at = n.inputs.findIndex(i => ['source', 'examples'].includes(i.name) && i.type === 'IMAGE')
        if (at >= 0) tall.connect(0, n, at)
    }
})()"""
"""One of each; the points of two are picked on a picture that is not square."""
PACK = """(() => { const low = Array(8).fill(0)
    for (const n of app.graph._nodes) {
        const at = low.indexOf(Math.min(...low))
        n.pos = [at * 520, low[at] + 30]; low[at] += (n.renderingSize ?? n.size)[1] + 60
    } })()"""
"""Each node 30 pixels below the one before, in columns as wide as the widest with its panel open."""


async def _each_opened(tab, advanced=True):
    """Of every panel and of the advanced inputs, one after the other: [node, button] -> what overlaps while it is open,
    and which boxes are others once it is closed."""
    found, first = {}, await tab.evaluate(BOXES)
    for pressed in await tab.evaluate(OPENED):
        if pressed[1] == "advanced" and not advanced:
            continue
        press = f"{PRESS}({json.dumps(pressed)})"
        shared, moved = [], []
        for done in (shared, moved):
            await tab.evaluate(press)
            await tab.settle(6)
            boxes = await tab.evaluate(BOXES)
            done += overlaps(boxes) if done is shared else [b for b in boxes if b not in first]
        found[tuple(pressed)] = shared, moved
    return found


async def _placed(driver, address, vue, advanced):
    async with driver.page(address) as tab:
        await tab.evaluate(READY)
        await tab.build(FRESH, vue)
        await tab.evaluate("app.canvas.ds.scale = 0.2; app.canvas.setDirty(true, true)")
        await tab.settle()
        await tab.evaluate(PACK)
        await tab.settle()
        before = await tab.evaluate(BOXES)
        await tab.evaluate(SHOW)
        await tab.settle()
        return before, await tab.evaluate(BOXES), await _each_opened(tab, advanced), tab.faults()


@pytest.mark.parametrize(
    ("vue", "advanced"),
    [
        pytest.param(False, False, id="classic"),
        pytest.param(False, True, id="classic, advanced inputs too", marks=pytest.mark.nightly),
        pytest.param(True, True, id="Nodes 2.0", marks=pytest.mark.nightly),
    ],
)
def test_placed_nodes_have_room_for_what_a_run_shows_and_make_room_for_what_opens(driver, address, vue, advanced):
    before, after, opened, faults = asyncio.run(_placed(driver, address, vue, advanced))
    assert len(before) >= 48 and len(opened) >= (24 if advanced else 4) and not faults
    assert before == after and not overlaps(before)
    assert not {pressed: wrong for pressed, wrong in opened.items() if any(wrong)}


PULLED = """(() => {
    const n = LiteGraph.createNode('VitrineActivationTap'); n.pos = [400, 150]; app.graph.add(n)
})()"""


async def _pulled(driver, address):
    """A node with a text field that shows a picture, pulled at its corner: its size and box, each step."""
    async with driver.page(address) as tab:
        await tab.evaluate(READY)
        await tab.build(PULLED, True)
        await tab.evaluate(SHOW)
        await tab.settle()
        seen, now = [], f"[...app.graph._nodes[0].size.map(Math.round), ...{BOXES}[0].slice(3)]"
        left, top, width, height = await tab.box('[data-corner="SE"]')
        at = left + width / 2, top + height / 2
        for away in ((0, 0), (40, 30), (40, -20)):
            await tab.drag([at, (at[0] + away[0] / 2, at[1] + away[1] / 2), at := (at[0] + away[0], at[1] + away[1])])
            seen.append(await tab.evaluate(now))
        await tab.command("Undo")
        return [*seen, await tab.evaluate(now)], tab.faults()


@pytest.mark.nightly
def test_a_corner_of_a_node_with_a_picture_stays_under_the_mouse(driver, address):
    (first, wider, less, undone), faults = asyncio.run(_pulled(driver, address))
    for seen, away in ((wider, (40, 30)), (less, (80, 10))):
        grown = [now - was for now, was in zip(seen, first, strict=True)]
        assert max(abs(g - a) for g, a in zip(grown, 2 * away, strict=True)) <= 2, (seen, first)
    assert undone == wider and not faults


GROUPS = "app.graph._groups.map(g => [g.title, ...g._bounding])"


def outside(boxes, groups):
    """(Name, group) of the boxes that begin in a group and reach out of it."""
    return [
        (name, title)
        for name, x, y, w, h in boxes
        for title, left, top, width, height in groups
        if left <= x + w / 2 < left + width
        and top <= y + 20 < top + height
        and (x < left or y < top or x + w > left + width or y + h > top + height)
    ]


async def _templates(driver, address, vue, names):
    """Title -> what overlaps at opening, after a run, with all panels open; what each panel does; where nodes were;
    what reaches out of its group after a run."""
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
            await tab.evaluate(SHOW)
            await tab.settle()
            boxes.append(await tab.evaluate(BOXES))
            out = outside(boxes[-1], await tab.evaluate(GROUPS))
            each = await _each_opened(tab)
            for pressed in await tab.evaluate(OPENED):
                if pressed[1] != "advanced":
                    await tab.evaluate(f"{PRESS}({json.dumps(pressed)})")
            await tab.settle()
            boxes.append(await tab.evaluate(BOXES))
            wrong = {pressed: problems for pressed, problems in each.items() if any(problems)}
            places = [[b[1:3] for b in drawn] for drawn in boxes]
            found[path.stem] = [overlaps(drawn) for drawn in boxes], wrong, places, out
        return found, tab.faults()


@pytest.mark.nightly
def test_nothing_overlaps_in_any_template(driver, address):
    """At opening, after a run, with each panel open and with all; no node had to be pushed away for a panel."""
    found, faults = asyncio.run(_templates(driver, address, False, ALL))
    assert not faults and len(found) >= 24
    assert not {title: shared for title, (shared, *_) in found.items() if any(shared)}
    assert not {title: wrong for title, (_, wrong, *_) in found.items() if wrong}
    assert not [title for title, (_, _, places, _) in found.items() if places[0] != places[-1]]
    assert not {title: out for title, (*_, out) in found.items() if out}
