"""Points picked on the picture in ComfyUI's real page, classic and Nodes 2.0, and the map of what is alike."""

import asyncio
import base64
import json
import time

import pytest
from vitrine_tests.lanes import nightly_but

BUILD = """(async () => {
    const add = (type, x, y) => { const n = LiteGraph.createNode(type); n.pos = [x, y]; app.graph.add(n); return n }
    const picture = add('VitrineRenderPortrait', 40, 520), model = add('VitrineLoadPortraits', 40, 60)
    picture.widgets.find(w => w.name === 'count').value = 1
    const text = add('CLIPTextEncode', 40, 260), pick = add('NODE', 420, 60)
    const join = (from, slot, to, name) => from.connect(slot, to, to.inputs.findIndex(i => i.name === name))
    join(model, 0, pick, 'model'); join(model, 2, pick, 'vae'); join(model, 1, text, 'clip')
    join(text, 0, pick, 'positive')
    join(picture, 0, pick, 'INPUT'); join(picture, 0, pick, 'OTHER')
    pick.widgets.find(w => w.name === 'points').value = 'START'
    const shown = add('SHOW', 900, 60); join(pick, SLOT, shown, shown.inputs[0].name)
    const any = add('PreviewAny', 900, 400); join(pick, 0, any, 'source')
    window.pick = pick
})()"""
NODES = {
    "VitrineFindCorrespondence": {
        "INPUT": "source",
        "OTHER": "target",
        "SHOW": "PreviewImage",
        "SLOT": "1",
        "START": "0.5 0.4",
    },
    "VitrineSegmentLikeThis": {
        "INPUT": "examples",
        "OTHER": "images",
        "SHOW": "MaskPreview",
        "SLOT": "0",
        "START": "0.5 0.4\\nnot 0.1 0.1",
    },
}
TEXT = "app.graph._nodes.find(n => n.comfyClass === 'NODE').widgets.find(w => w.name === 'points').value"
PRESS = """(() => { const b = pick.widgets.find(w => w.type === 'button' && w.name !== 'advanced')
    b.callback(b.value, app.canvas, pick) })()"""


class Mouse:
    """Real mouse events, in fractions of the square picture that stands in the middle of the picker."""

    def __init__(self, tab):
        self.tab = tab

    async def drag(self, *points, shift=False, button="left"):
        left, top, width, height = await self.tab.box("canvas.vitrine-points")
        side, middle, centre = min(width, height), left + width / 2, top + height / 2
        places = [(middle + (x - 0.5) * side, centre + (y - 0.5) * side) for x, y in points]
        await self.tab.drag(places, button, modifiers=8 * shift)


def points_of(text):
    """[(wanted, x, y)] of the field."""
    rows = [line.split() for line in text.splitlines()]
    return [(row[0] != "not", *map(float, row[-2:])) for row in rows]


def near(points, *expected):
    assert len(points) == len(expected), points
    for (wanted, x, y), (kind, a, b) in zip(points, expected, strict=True):
        assert wanted == kind and abs(x - a) < 0.02 and abs(y - b) < 0.02, points


async def _ready(tab, node, vue):
    script = BUILD.replace("NODE", node)
    for key, value in NODES[node].items():
        script = script.replace(key, value)
    await tab.build(script, vue)


CORNER = """(() => {
    const c = document.querySelector('canvas.vitrine-points'), side = Math.min(c.width, c.height)
    const at = (i, j) => [
        Math.round(c.width / 2 + (0.2 + i / 60) * side), Math.round(c.height / 2 + (j / 60 - 0.45) * side), 1, 1]
    return [...Array(144).keys()].flatMap(
        k => Array.from(c.getContext('2d').getImageData(...at(k % 12, Math.floor(k / 12))).data))
})()"""  # 144 pixels of a part of the picture that no point touches: as many at any size of the canvas
LEGEND = """(() => {
    const c = document.querySelector('canvas.vitrine-points'), side = Math.min(c.width, c.height), r = devicePixelRatio
    const left = (c.width - side) / 2 + 6 * r, wide = Math.min(110 * r, side / 2), y = (c.height + side) / 2 - 11 * r
    return [left + 2 * r, left + wide - 2 * r].map(
        x => Array.from(c.getContext('2d').getImageData(Math.round(x), Math.round(y), 1, 1).data))
})()"""  # both ends of the bar that says what the colours mean
LOOKED = "document.querySelector('canvas.vitrine-points').dataset"
COUNT = """(() => {
    const { fetch } = window
    let now = 0
    window.most = 0
    window.fetch = async (...asked) => {
        if (!String(asked[0]?.url ?? asked[0]).includes('/vitrine/similarity')) return fetch(...asked)
        window.most = Math.max(window.most, ++now)
        try { return await fetch(...asked) } finally { now -= 1 }
    }
})()"""  # the most requests that wait at once
COPIED = """(() => { const old = app.graph._nodes.find(n => n.comfyClass === 'NODE')
    app.canvas.copyToClipboard([old]); app.canvas.pasteFromClipboard()
    return app.graph._nodes.filter(n => n.comfyClass === 'NODE' && n !== old)
        .map(n => n.widgets.find(w => w.name === 'points').value) })()"""


async def _opened(tab, address):
    """Run once and open the picker."""
    entry = await tab.run(address)
    assert entry["status"]["status_str"] == "success", entry["status"]["messages"][-1]
    await tab.evaluate(PRESS)
    await tab.wait_for("document.querySelector('canvas.vitrine-points')?.getBoundingClientRect().height > 150")
    await tab.wait_for(f"window.pick.vitrinePicture && {CORNER}.some(Boolean)")  # the picture is drawn
    await tab.settle()  # and the node has its size: what a run shows makes room for itself
    return entry


async def _clicked(tab, text):
    """The field's text after each gesture, and a part of the picture without and with the map of what is alike."""
    mouse, seen = Mouse(tab), {"bare": await tab.evaluate(CORNER)}
    await mouse.drag((0.25, 0.75))
    seen["click"] = await tab.evaluate(text)
    await tab.wait_for(f"{LOOKED}.turn")
    seen["map"], seen["milliseconds"] = await tab.evaluate(CORNER), int(await tab.evaluate(f"{LOOKED}.milliseconds"))
    seen["legend"] = await tab.evaluate(LEGEND)
    await mouse.drag((0.75, 0.75), shift=True)
    seen["shift"] = await tab.evaluate(text)
    await tab.evaluate(COUNT)
    way = [(0.25 + 0.15 * i / 12, 0.75 - 0.25 * i / 12) for i in range(13)]
    await mouse.drag(*way)
    seen["drag"], seen["at once"] = await tab.evaluate(text), await tab.evaluate("window.most")
    await mouse.drag((0.6, 0.9))
    await mouse.drag((0.6, 0.9), button="right")
    seen["right"] = await tab.evaluate(text)
    await mouse.drag((0.6, 0.9))
    await tab.press("Delete", 46)
    await tab.press("Delete", 46)  # where no point is; the node stays
    await tab.settle()
    seen["delete"] = await tab.evaluate(text)
    return seen


async def _walk(driver, address, node, vue):
    async with driver.page(address) as tab:
        await _ready(tab, node, vue)
        text = TEXT.replace("NODE", node)
        start = await tab.evaluate(text)
        first = await _opened(tab, address)
        seen = await _clicked(tab, text)
        for name in ("Undo", "Redo"):
            await tab.command(name)
            seen[name.lower()] = await tab.evaluate(text)
        await tab.reload()
        await tab.wait_for("document.querySelector('canvas.vitrine-points')?.getBoundingClientRect().height > 150")
        seen["reload"] = await tab.evaluate(text)
        second = await tab.run(address)
        seen["executed"] = [n["inputs"]["points"] for n in second["prompt"][2].values() if n["class_type"] == node]
        seen["copied"] = await tab.evaluate(COPIED.replace("NODE", node))
        return {"start": start} | seen, [_text(first), _text(second)], tab.faults()


def _text(entry):
    """What Preview as Text showed."""
    return next(o["text"][0] for o in entry["outputs"].values() if "text" in o)


WALKS = [("VitrineFindCorrespondence", False), ("VitrineSegmentLikeThis", True)]


@pytest.mark.parametrize(("node", "vue"), nightly_but(WALKS, WALKS[:1]))
def test_points_are_clicked_dragged_undone_and_saved(driver, address, node, vue, record_property):
    """``--junitxml`` keeps the milliseconds from the click to the map that is drawn."""
    seen, shown, faults = asyncio.run(_walk(driver, address, node, vue))
    unwanted = node == "VitrineSegmentLikeThis"
    first = points_of(seen["start"])
    near(points_of(seen["click"]), *first, (True, 0.25, 0.75))
    near(points_of(seen["shift"]), *first, (True, 0.25, 0.75), (not unwanted, 0.75, 0.75))
    moved = (*first, (True, 0.4, 0.5), (not unwanted, 0.75, 0.75))
    near(points_of(seen["drag"]), *moved)
    assert seen["at once"] == 1, "a drag asks for the latest place once the last answer has come"
    kept = {seen[name] for name in ("right", "delete", "redo", "reload")}
    assert kept == {seen["drag"]}, seen
    near(points_of(seen["undo"]), *moved, (True, 0.6, 0.9))
    assert seen["executed"] == seen["copied"] == [seen["drag"]]
    lines = [len(text.splitlines()) for text in shown]
    assert unwanted or lines == [1, 3], "the edited points were looked for"
    changed = sum(abs(a - b) for a, b in zip(seen["bare"], seen["map"], strict=True)) / len(seen["bare"])
    assert changed > 10, "the map covers the picture"
    (red, _, blue, _), (hot, _, cold, _) = seen["legend"]
    assert red < 60 and blue > 190 and hot > 190 and cold < 60, "from blue, least alike, to yellow"
    record_property("milliseconds", seen["milliseconds"])
    assert seen["milliseconds"] >= 0 and not faults


async def _json(driver, address, node, vue, texts):
    """The field after a click into each of these texts."""
    found = []
    async with driver.page(address) as tab:
        await _ready(tab, node, vue)
        await _opened(tab, address)
        for text, shift in texts:
            value = f"(() => {{ const w = pick.widgets.find(w => w.name === 'points'); w.value = {json.dumps(text)};"
            await tab.evaluate(f"{value} w.callback?.(w.value) }})()")
            await Mouse(tab).drag((0.25, 0.75), shift=shift)
            found.append(json.loads(await tab.evaluate(TEXT.replace("NODE", node))))
        return found, tab.faults()


def test_json_of_other_packs_stays_json(driver, address):
    """In its own units, with what else stands in it; a list becomes two where a point is not wanted."""
    pixels, share = {"x": 32, "y": 16, "label": "eye"}, {"x": 0.5, "y": 0.25}
    texts = [
        ([pixels], False),
        ([share], False),
        ([pixels], True),
        ({"positive": [pixels], "negative": [], "v": 2}, True),
    ]
    told = [(json.dumps(tree), shift) for tree, shift in texts]
    found, faults = asyncio.run(_json(driver, address, "VitrineSegmentLikeThis", True, told))
    assert not faults and [type(tree) for tree in found] == [list, list, dict, dict]
    assert found[0][0] == pixels and found[1][0] == share and found[3]["v"] == 2
    assert found[2]["positive"] == found[3]["positive"] == [pixels]
    for point in (found[0][1], found[2]["negative"][0], found[3]["negative"][0]):
        assert abs(point["x"] - 16) < 1.3 and abs(point["y"] - 48) < 1.3, "pixels of 64"
    assert abs(found[1][1]["x"] - 0.25) < 0.02 and abs(found[1][1]["y"] - 0.75) < 0.02


def test_a_click_is_a_map_without_a_run(driver, address, record_property):
    """The point itself is most alike, on the picture of the node's last run. ``--junitxml`` keeps the seconds."""
    import aiohttp

    async def ask():
        async with driver.page(address) as tab:
            await _ready(tab, "VitrineFindCorrespondence", False)
            entry = await tab.run(address)
            found = "import('/scripts/api.js').then(({ api }) => [api.clientId, app.graph.id, String(pick.id)])"
            key = dict(zip(("client", "workflow", "node"), await tab.evaluate(found), strict=True))
            async with aiohttp.ClientSession() as session:
                asked = key | {"x": 0.5, "y": 0.4}
                seconds = []
                for _ in range(5):
                    began = time.perf_counter()
                    async with session.post(f"{address}/vitrine/similarity", json=asked) as answer:
                        shown = await answer.json()
                    seconds.append(time.perf_counter() - began)
                record_property("seconds", sorted(seconds)[2])
                wrong = [asked | {"node": "no such"}, key | {"x": 2, "y": 0}, {"x": 1}]
                codes = []
                for body in wrong:
                    async with session.post(f"{address}/vitrine/similarity", json=body) as answer:
                        codes.append(answer.status)
            return entry, shown, codes

    entry, shown, codes = asyncio.run(ask())
    assert entry["status"]["status_str"] == "success" and codes == [404, 400, 400]
    levels = list(base64.b64decode(shown["values"]))
    best = levels.index(max(levels))
    x, y = (best % shown["width"] + 0.5) / shown["width"], (best // shown["width"] + 0.5) / shown["height"]
    assert abs(x - 0.5) <= 1 / shown["width"] and abs(y - 0.4) <= 1 / shown["height"] and shown["high"] > 0.9
