"""Keys over our panels are the page's: undo, redo, copy, paste; Delete and Escape act on what is under the mouse.

Nothing moves under a mouse that rests on a slider: not by its first use, not by undo, not by a run.
"""

import asyncio

import pytest
from vitrine_tests.comfy import test_people_panel as people
from vitrine_tests.lanes import page_modes

MODES = page_modes("classic")
CTRL = 2
BUILD = """(async () => {
    const { api } = await import('/scripts/api.js')
    const canvas = document.createElement('canvas'); canvas.width = canvas.height = 64
    const form = new FormData()
    form.append('image', await new Promise(done => canvas.toBlob(done)), 'keys.png')
    await api.fetchApi('/upload/image', { method: 'POST', body: form })
    const add = (type, x, y) => { const n = LiteGraph.createNode(type); n.pos = [x, y]; app.graph.add(n); return n }
    const picture = add('LoadImage', 80, 560), curve = add('VitrineApplyGammaSchedule', 420, 60)
    const pick = add('VitrineFindCorrespondence', 900, 60)
    picture.widgets.find(w => w.name === 'image').value = 'keys.png'
    picture.connect(0, pick, pick.inputs.findIndex(i => i.name === 'source'))
    pick.widgets.find(w => w.name === 'points').value = ''
    for (const n of [curve, pick]) {
        const b = n.widgets.find(w => w.type === 'button' && w.name !== 'advanced')
        b.callback(b.value, app.canvas, n)
    }
})()"""
PANELS = {
    "curve": ("canvas.vitrine-curve", "VitrineApplyGammaSchedule"),
    "points": ("canvas.vitrine-points", "VitrineFindCorrespondence"),
}


class Hand:
    """A mouse and a keyboard over one panel, and what its text field says."""

    def __init__(self, tab, panel):
        self.tab, (self.selector, self.kind) = tab, PANELS[panel]

    async def place(self, x, y):
        left, top, width, height = await self.tab.box(self.selector)
        side = min(width, height)
        return left + width / 2 + (x - 0.5) * side, top + height / 2 + (y - 0.5) * side

    async def mouse(self, kind, x, y, **more):
        left, top = await self.place(x, y)
        told = {"button": "none" if kind == "mouseMoved" and not more else "left", "clickCount": 1, **more}
        await self.tab.send("Input.dispatchMouseEvent", type=kind, x=left, y=top, pointerType="mouse", **told)

    async def click(self, x, y):
        await self.tab.drag([await self.place(x, y)])

    async def press(self, key, code, modifiers=0):
        await self.tab.press(key, code, modifiers)
        await self.tab.settle()

    async def count(self):
        """Points in the field, nodes of this kind, and whether the first still is where it was."""
        nodes = f"app.graph._nodes.filter(n => n.comfyClass === '{self.kind}')"
        text = f"{nodes}[0].widgets.find(w => w.name === 'points').value"
        split = f"{text}.split(/[,\\n]/).filter(part => part.trim()).length"
        return await self.tab.evaluate(f"[{split}, {nodes}.length, ...{nodes}[0].pos.map(Math.round)]")


async def _keys(tab, panel):
    hand, seen = Hand(tab, panel), {}
    await hand.click(0.35, 0.4)
    await hand.click(0.65, 0.6)
    start = await hand.count()
    for name, key, code, modifiers in (
        ("undo", "z", 90, CTRL),
        ("redo", "y", 89, CTRL),
        ("undo again", "z", 90, CTRL),
        ("redo by Z", "Z", 90, CTRL + 8),
        ("Tab", "Tab", 9, 0),
        ("right", "ArrowRight", 39, 0),
        ("Escape", "Escape", 27, 0),
    ):
        await hand.press(key, code, modifiers)
        seen[name] = await hand.count()
    await hand.mouse("mousePressed", 0.65, 0.6)
    await hand.mouse("mouseMoved", 0.5, 0.5, button="left")
    await hand.press("Escape", 27)
    seen["let go"] = await hand.count()
    await hand.mouse("mouseReleased", 0.5, 0.5)
    await hand.mouse("mouseMoved", 0.65, 0.6)
    await hand.press("Delete", 46)
    seen["Delete"] = await hand.count()
    await hand.press("Delete", 46)
    seen["Delete in vain"] = await hand.count()
    await hand.press("z", 90, CTRL)
    seen["Delete undone"] = await hand.count()
    await tab.evaluate(f"app.canvas.selectNodes([app.graph._nodes.find(n => n.comfyClass === '{hand.kind}')])")
    await hand.press("c", 67, CTRL)
    await hand.press("v", 86, CTRL)
    seen["copied and pasted"] = await hand.count()
    return start, seen


async def _walk(driver, address, vue, panels):
    async with driver.page(address) as tab:
        await tab.build(BUILD, vue)
        found = {}
        for panel in panels:
            await tab.wait_for(f"document.querySelector('{PANELS[panel][0]}')?.getBoundingClientRect().height > 100")
            found[panel] = await _keys(tab, panel)
        return found, tab.faults()


@MODES
def test_keys_over_a_panel_are_the_pages(driver, address, vue):
    found, faults = asyncio.run(_walk(driver, address, vue, PANELS))
    for panel, (start, seen) in found.items():
        points, nodes, *place = start
        assert (points, nodes) == (2, 1), panel
        less = {"undo", "undo again", "Delete", "Delete in vain"}
        for name, (now, count, *where) in seen.items():
            assert now == points - (name in less), (panel, name)
            assert count == (2 if name == "copied and pasted" else 1) and where == place, (panel, name)
    assert not faults


# --- sliders ------------------------------------------------------------------------------------
STATE = f"JSON.stringify([{people.VALUES}, {people.EDITS}.properties.vitrine_prompt])"
PLACES = """[...document.querySelectorAll('.vitrine-slider')].map(
    e => [e.dataset.name, ...['x', 'y'].map(side => Math.round(e.getBoundingClientRect()[side]))])"""
ALIVE = """[app.graph._nodes.length, ...app.graph._nodes.filter(n => n.comfyClass === 'KIND').map(
    n => n.pos.map(Math.round).join())]"""
FOCUS = "document.activeElement?.dataset?.name ?? document.activeElement?.tagName"
LAST = "mole left"
"""A slider at the list's end, which is not in use."""


class Panel:
    """A mouse and a keyboard over one node's panel, and the node's state."""

    def __init__(self, tab, kind, state):
        self.tab, self.state, self.alive = tab, state, ALIVE.replace("KIND", kind)
        self.nodes, self.seen = None, {}

    async def at(self, selector, x=0.5, y=0.5):
        left, top, width, height = await self.tab.box(selector)
        return left + x * width, top + y * height

    async def rest(self, selector, x=0.5, y=0.5):
        """The mouse on an element."""
        left, top = await self.at(selector, x, y)
        await self.tab.send("Input.dispatchMouseEvent", type="mouseMoved", x=left, y=top, pointerType="mouse")
        await self.tab.settle()

    async def pull(self, selector, *shares):
        await self.tab.drag([await self.at(selector, *share) for share in shares])

    async def note(self, name):
        """The state now; the nodes are the same, where they were."""
        nodes = await self.tab.evaluate(self.alive)
        self.nodes = self.nodes or nodes
        assert nodes == self.nodes, name
        self.seen[name] = await self.tab.evaluate(self.state)

    async def press(self, name, key, code, modifiers=0):
        await self.tab.press(key, code, modifiers)
        await self.tab.settle()
        await self.note(name)


async def _slider(panel):
    """Pulled for the first time, stepped, put to zero, each undone; the places of all sliders meanwhile."""
    tab, slider = panel.tab, f'[data-name="{LAST}"]'
    await tab.evaluate(f"document.querySelector('{slider}').scrollIntoView({{block: 'nearest'}})")
    places = [await tab.evaluate(PLACES)]
    await panel.note("start")
    await panel.pull(slider, (0.5, 0.5), (0.7, 0.5))
    await panel.note("pulled")
    for name, key, code, modifiers in (
        ("undo", "z", 90, CTRL),
        ("redo", "y", 89, CTRL),
        ("undo again", "z", 90, CTRL),
        ("redo by Z", "Z", 90, CTRL + 8),
    ):
        await panel.press(name, key, code, modifiers)
        places.append(await tab.evaluate(PLACES))
    await panel.pull(slider, (0.7, 0.5), (0.75, 0.5))
    await panel.note("further")
    await panel.press("arrow", "ArrowRight", 39)
    await panel.press("arrow undone", "z", 90, CTRL)
    await panel.press("Delete", "Delete", 46)
    await panel.press("Backspace in vain", "Backspace", 8)
    await panel.press("Delete undone", "z", 90, CTRL)
    await panel.pull(slider, (0.75, 0.5), (0.8, 0.5))
    places.append(await tab.evaluate(PLACES))
    await panel.press("Tab", "Tab", 9)  # the browser scrolls to what it leads to
    panel.seen["next"] = await tab.evaluate(FOCUS)
    await panel.press("Escape", "Escape", 27)
    panel.seen["left"] = await tab.evaluate(FOCUS)
    return places


async def _copied(panel, kind):
    """With what was pressed last in focus: nodes of the kind after copy and paste, and after undo."""
    counts, nodes = [], f"app.graph._nodes.filter(n => n.comfyClass === '{kind}')"
    count = f"{nodes}.length"
    await panel.tab.evaluate(f"app.canvas.selectNodes([{nodes}[0]])")
    for keys in ((("c", 67), ("v", 86)), (("z", 90),)):
        for key, code in keys:
            await panel.tab.press(key, code, CTRL)
            await panel.tab.settle()
        counts.append(await panel.tab.evaluate(count))
    return counts


async def _people(driver, address, vue):
    async with driver.page(address) as tab:
        await tab.build(people.BUILD, vue)
        await tab.run(address)
        await tab.wait_for(f"document.querySelector('[data-name=\"{LAST}\"]')")
        panel = Panel(tab, "VitrineW2WEdit", STATE)
        rests = [await _slider(panel), [await tab.evaluate(PLACES)]]
        await tab.run(address)
        rests[1].append(await tab.evaluate(PLACES))
        await panel.pull(f'[data-name="{LAST}"]', (0.8, 0.5), (0.6, 0.5))
        return panel.seen, rests, await _copied(panel, "VitrineW2WEdit"), tab.faults()


@pytest.mark.nightly
@MODES
def test_keys_over_sliders_are_the_pages(driver, address, vue):
    seen, rests, copied, faults = asyncio.run(_people(driver, address, vue))
    assert seen["start"] == seen["undo"] == seen["undo again"] != seen["pulled"]
    assert seen["pulled"] == seen["redo"] == seen["redo by Z"]
    assert seen["further"] == seen["arrow undone"] != seen["arrow"] != seen["Delete"]
    assert seen["Delete"] == seen["Backspace in vain"] and seen["Delete undone"] == seen["arrow undone"]
    assert seen["next"] not in (LAST, "CANVAS") and seen["left"] == "CANVAS"
    for places in rests:
        assert len(places[0]) > 10 and all(now == places[0] for now in places), "nothing moves under a resting mouse"
    assert copied == [2, 1] and not faults


# --- reports -----
REPORT = """(() => {
    const space = LiteGraph.createNode('VitrineLoadW2WSpace'); space.pos = [300, 100]; app.graph.add(space)
    space.widgets.find(w => w.name === 'components').value = KEPT  // what the server has not answered before
    const any = LiteGraph.createNode('PreviewAny'); any.pos = [900, 100]; app.graph.add(any); space.connect(0, any, 0)
})()"""


async def _report(driver, address, vue):
    async with driver.page(address) as tab:
        await tab.build(REPORT.replace("KEPT", str(200 + vue)), vue)
        await tab.run(address)
        await tab.wait_for("document.querySelector('[data-vitrine-panel=report]')?.checkVisibility()")
        panel, counts = Panel(tab, "PreviewAny", "app.graph._nodes.length"), []
        await tab.drag([(400, 85)])  # its title
        await panel.rest("[data-vitrine-panel=report]")
        for key, code, modifiers in (("Delete", 46, 0), ("z", 90, CTRL)):
            await tab.press(key, code, modifiers)
            await tab.settle()
            counts.append(await tab.evaluate(panel.state))
        return counts, tab.faults()


@MODES
def test_a_node_is_deleted_with_the_mouse_on_its_report(driver, address, vue):
    """A text has nothing that Delete could remove."""
    assert asyncio.run(_report(driver, address, vue)) == ([1, 2], [])
