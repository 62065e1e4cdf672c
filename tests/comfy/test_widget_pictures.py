"""docs/pictures/widget_*.jpg, each node one can touch, as a user meets it.

``VITRINE_WRITE_DOCS=1 pytest -m nightly tests/comfy/test_widget_pictures.py`` photographs them; without it they are
compared with the page. ``docs/make_help.py`` cuts two of the help pages' pictures from them.
"""

import asyncio
import base64
import io
import json
import os
from pathlib import Path

import pytest
from PIL import Image, ImageChops, ImageStat
from vitrine.engine.nemo import NeuronSet
from vitrine_tests.comfy import test_compare, test_curve, test_live_tap, test_neuron_browser, test_slider_rows

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
PLACES = PICTURES / "sheets.json"
SCALE = 2
"""Pixels of the picture for one of the page."""
MOST = 20
"""Mean difference of two pictures, 0 to 255: fonts differ from machine to machine, another panel by more."""
NO_BADGE = "app.extensionManager.setting.set('Comfy.NodeBadge.NodeSourceBadgeMode', 'None')"
BOX = {
    False: """(() => { const n = NODE, c = app.canvas, [x, y, w, h] = (n.updateArea(), n.boundingRect)
        const page = c.canvas.getBoundingClientRect(), at = c.ds.offset, s = c.ds.scale
        return [page.x + (x + at[0]) * s, page.y + (y + at[1]) * s, w * s, h * s] })()""",
    True: """(() => { const r = document.querySelector(`[data-node-id="${NODE.id}"]`).getBoundingClientRect()
        return [r.x, r.y, r.width, r.height] })()""",
}
ALONE = """(() => { const n = NODE; app.canvas.ds.scale = 1; app.canvas.deselectAll()
    app.canvas.ds.offset = [300 - n.pos[0], Math.min(120 - n.pos[1], 1150 - n.pos[1] - n.size[1])]
    app.canvas.setDirty(true, true) })()"""
"""Below the page's bars, or as much of its lower part as the window shows."""
SEEDS = """app.graph._nodes.filter(n => n.comfyClass === 'VitrineRenderPortrait').forEach(
    (n, i) => { n.widgets.find(w => w.name === 'seed').value = 6_000_001 + i })"""
CANVAS = "w.element?.closest?.('canvas') ?? w.element?.querySelector?.('canvas.vitrine-points')"
OF = "app.graph._nodes.find(n => n.comfyClass === 'TYPE')"


async def _template(tab, address, title, kind):
    """Opens a template, runs it and shows one of its nodes unscaled; returns an expression of the node."""
    graph = (ROOT / "workflows" / f"{title}.json").read_text(encoding="utf-8")
    await tab.evaluate(f"app.loadGraphData({graph}, true, true, {json.dumps(title)}, {{openSource: 'template'}})")
    await tab.wait_for(f"app.graph._nodes.length === {len(json.loads(graph)['nodes'])}")
    await tab.settle()
    node = OF.replace("TYPE", kind)
    await tab.evaluate(ALONE.replace("NODE", node))
    entry = await tab.run(address)
    assert entry["status"]["status_str"] == "success", entry["status"]["messages"][-1]
    return node


async def people(tab, address, vue):
    await _template(tab, address, "Pull sliders, four nodes (demo)", "VitrineW2WEdit")
    await tab.wait_for("document.querySelector('.vitrine-person')?.naturalWidth")
    return ".vitrine-people"


async def points(tab, address, vue):
    node = await _template(tab, address, "Find the same part (demo)", "VitrineFindCorrespondence")
    await tab.evaluate(ALONE.replace("NODE", node))  # its picker is open, and so is Segment Like This's
    await tab.settle()
    await tab.evaluate(f"{node}.widgets.map(w => {CANVAS}).find(Boolean).classList.add('vitrine-shown')")
    left, top, width, height = await tab.box(".vitrine-shown")
    side = min(width, height)
    mouth = left + width / 2, top + height / 2 + 0.13 * side
    await tab.drag([mouth])
    await tab.wait_for("document.querySelector('.vitrine-shown').dataset.turn")
    return ".vitrine-shown"


async def tap(tab, address, vue):
    await tab.build(
        test_live_tap.BUILD.replace("ADDRESS", "up-level1-repeat0-vit-block0-cross-q").replace("SEED", "2"), vue
    )
    await tab.run(address)
    return "tap"


async def neurons(tab, address, vue):
    await tab.build(test_neuron_browser.BUILD, vue)
    await tab.run(address)
    await tab.evaluate("press(block)")
    left, top, width, height = await tab.box(f'.vitrine-neuron[data-name="{test_neuron_browser.FIRST} 40"]')
    await tab.drag([(left + width / 2, top + height / 2)])
    return "block"


async def curve(tab, address, vue):
    await tab.build(test_curve.BUILD, vue)
    await tab.evaluate(ALONE.replace("NODE", "curve"))
    await tab.wait_for(test_curve.OPEN)
    for point in ((0.2, 0.1), (0.6, 0.7)):
        await test_curve._drag(tab, point)
    return "curve"


async def rows(tab, address, vue):
    await tab.build(test_slider_rows.BUILD, vue)
    await tab.evaluate(test_slider_rows.CHOOSE.replace("NAME", "label_2").replace("VALUE", "glasses"))
    return "edit"


async def compare(tab, address, vue):
    await tab.build(test_compare.BUILD, vue)
    await tab.evaluate(SEEDS)
    await tab.run(address)
    await tab.wait_for(test_compare.LOADED)
    left, top, width, height = await tab.box(".vitrine-compare")
    await tab.send("Input.dispatchMouseEvent", type="mouseMoved", x=left + 0.5 * width, y=top + height / 2)
    await tab.wait_for(f"Math.abs({test_compare.SHARE} - 0.5) < 0.01")
    return "compare"


WIDGETS = {people: False, points: False, tap: True, neurons: True, curve: True, rows: True, compare: False}
"""What brings a widget about -> in Nodes 2.0, or in the classic page. It returns a selector, or the node's variable."""
PARTS = {"people": ".vitrine-map", "points": ".vitrine-shown"}
"""What docs/sheets.py finds on a picture."""


async def _photograph(driver, address, show, vue):
    async with driver.page(address) as tab:
        await tab.evaluate(NO_BADGE)
        await tab.evaluate(f"app.extensionManager.setting.set('Comfy.VueNodes.Enabled', {str(vue).lower()})")
        shown = await show(tab, address, vue)
        await tab.settle()
        script = BOX[vue].replace("NODE", f"window.{shown}")
        x, y, width, height = await (tab.box(shown) if "vitrine-" in shown else tab.evaluate(script))
        height = min(height, 0.7 * width) if show is people else height  # map, picture and the sliders in use
        clip = {"x": x, "y": y, "width": width, "height": height, "scale": SCALE}
        answer = await tab.send("Page.captureScreenshot", format="png", clip=clip)
        if (part := PARTS.get(show.__name__)) and os.environ.get("VITRINE_WRITE_DOCS"):
            left, top, *size = await tab.box(part)
            box = [round(SCALE * length) for length in (left - x, top - y, *size)]
            places = json.loads(PLACES.read_text(encoding="utf-8")) | {f"widget_{show.__name__}": [[part, [box]]]}
            PLACES.write_text(json.dumps(places, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return Image.open(io.BytesIO(base64.b64decode(answer["data"]))).convert("RGB"), tab.faults()


@pytest.mark.nightly
@pytest.mark.parametrize("show", WIDGETS, ids=lambda show: show.__name__)
def test_the_docs_show_todays_widget(driver, address, page_base, show):
    folder = page_base / "models" / "vitrine_neurons"
    folder.mkdir(parents=True, exist_ok=True)
    NeuronSet(test_neuron_browser.FOUND, info=test_neuron_browser.INFO).save(folder / "found.json")
    picture, faults = asyncio.run(_photograph(driver, address, show, WIDGETS[show]))
    assert not faults and ImageStat.Stat(picture.convert("L")).stddev[0] > 10
    if os.environ.get("VITRINE_PAGE"):
        return  # the docs show the pinned page
    file = PICTURES / f"widget_{show.__name__}.jpg"
    if os.environ.get("VITRINE_WRITE_DOCS"):
        picture.save(file, quality=85)
    known = Image.open(file).convert("RGB")
    sizes = zip(picture.size, known.size, strict=True)
    assert all(abs(now - before) <= 0.05 * now for now, before in sizes), (picture.size, known.size)
    difference = ImageStat.Stat(ImageChops.difference(picture, known.resize(picture.size))).mean
    assert sum(difference) / 3 < MOST
