"""Keys over our panels are the page's: undo, redo, copy, paste; Delete and Escape act on what is under the mouse."""

import asyncio
import os
from pathlib import Path

import pytest
from vitrine_tests.lanes import page_modes

ROOT = Path(__file__).parents[2]
COMFYUI = Path(os.environ.get("COMFYUI_PATH", "~/comfy/ComfyUI")).expanduser()
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


@pytest.fixture(scope="module")
def address(driver, tmp_path_factory):
    with driver.server(COMFYUI, ROOT, tmp_path_factory.mktemp("page keys") / "base") as found:
        yield found


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
        ("undo", "z", 90, CTRL), ("redo", "y", 89, CTRL), ("undo again", "z", 90, CTRL),
        ("redo by Z", "Z", 90, CTRL + 8), ("Tab", "Tab", 9, 0), ("right", "ArrowRight", 39, 0),
        ("Escape", "Escape", 27, 0),
    ):  # fmt: skip
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
