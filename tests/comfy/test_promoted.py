"""Panels in a subgraph whose fields are promoted to its box, in the real page: the box's values count.

The page gives the inner node's field its own value, which a run no longer reads.
"""

import asyncio
import json

from PIL import Image
from vitrine_tests.lanes import page_modes

PICTURE = "promoted.png"
TOOLS = """
    window.promote = name => { // as the page's own "Promote Widget" does
        const slot = panel.getSlotFromWidget(panel.widgets.find(w => w.name === name))
        host.subgraph.addInput(name, String(slot.type)).connect(slot, panel)
    }
    const boxed = async (...nodes) => {
        await new Promise(requestAnimationFrame) // a fresh panel opens by itself
        return app.graph.convertToSubgraph(new Set(nodes)).node
    }
    const inside = (host, type) => host.subgraph._nodes.find(n => n.comfyClass === type)
"""
PEOPLE = """(async () => {
    TOOLS
    const space = add('VitrineLoadW2WSpace', 40, 60), person = add('VitrineW2WSample', 40, 400, { seed: 4 })
    const edit = add('VitrineW2WEdit', 480, 60, { label_1: 'beard', strength_1: 2 })
    join(space, 0, person, 'space'); join(space, 0, edit, 'space'); join(person, 0, edit, 'w2w_model')
    window.host = await boxed(edit)
    host.pos = [480, 60]
    window.panel = inside(host, 'VitrineW2WEdit')
})()""".replace("TOOLS", TOOLS)
POINTS = """(async () => {
    TOOLS
    const picture = add('LoadImage', 40, 60, { image: 'PICTURE' }), pick = add('VitrineFindCorrespondence', 480, 60)
    join(picture, 0, pick, 'source')
    window.host = await boxed(picture, pick)
    host.pos = [480, 60]
    window.panel = inside(host, 'VitrineFindCorrespondence')
})()""".replace("TOOLS", TOOLS).replace("PICTURE", PICTURE)
FIT = """(async () => {
    TOOLS
    window.host = await boxed(add('VitrineResolutionTransferLoader', 40, 60))
    window.panel = inside(host, 'VitrineResolutionTransferLoader')
})()""".replace("TOOLS", TOOLS)
ON_THE_BOX = "host.widgets.filter(w => host.isWidgetVisible(w)).map(w => w.name)"
IN_NODES_2 = 'document.querySelector(`[data-node-id="${host.id}"]`).textContent'
VIEW = """(() => { app.canvas.ds.scale = 1; app.canvas.ds.offset = [400 - panel.pos[0], 100 - panel.pos[1]]
    app.canvas.setDirty(true, true) })()"""
PERSON = "document.querySelector('.vitrine-person').dataset"


def put(name, value):
    """Sets a field of the box, as a hand does."""
    value = json.dumps(value)
    field = f"host.widgets.find(w => w.name === '{name}')"
    return f"(() => {{ const w = {field}; w.value = {value}; w.callback?.({value}, app.canvas, host) }})()"


async def promoted(tab, *names):
    """Promotes fields of the node in the box."""
    await tab.evaluate(f"{json.dumps(names)}.forEach(promote)")
    await tab.settle()


async def sent(tab, node):
    """The inputs of a class's node in what a run would get."""
    found = f"Object.values(p.output).find(n => n.class_type === '{node}').inputs"
    return await tab.evaluate(f"app.graphToPrompt().then(p => {found})")


async def enter(tab):
    """Opens the box; the page moves the view once it is open."""
    await tab.evaluate("app.canvas.openSubgraph(host.subgraph, host)")
    await tab.settle()
    await tab.evaluate(VIEW)
    await tab.settle()


async def shown(tab, vue):
    """Names of the promoted fields that one sees on the box."""
    names = await tab.evaluate(ON_THE_BOX)
    seen = await tab.evaluate(IN_NODES_2) if vue else ""
    return [name for name in names if name in seen or not vue]


async def pulled(tab, selector, *shares):
    left, top, width, height = await tab.box(selector)
    await tab.drag([(left + x * width, top + y * height) for x, y in shares])


async def _people(driver, address, vue):
    async with driver.page(address) as tab:
        await tab.build(PEOPLE, vue)
        await promoted(tab, "strength_1", "map_position")
        fields = await shown(tab, vue)
        await tab.evaluate(put("strength_1", -3))
        assert (await tab.run(address))["status"]["status_str"] == "success"
        await enter(tab)
        await tab.wait_for(f"{PERSON}.released === 'true'")
        values = [json.loads(await tab.evaluate(f"{PERSON}.inputs"))["strength_1"]]
        await pulled(tab, '[data-name="beard"]', (0.5, 0.5), (0.8, 0.5))
        await pulled(tab, ".vitrine-map", (0.5, 0.5), (0.3, 0.4))
        await tab.wait_for(f"JSON.parse({PERSON}.inputs).map_position !== '' && {PERSON}.released === 'true'")
        drawn, run = json.loads(await tab.evaluate(f"{PERSON}.inputs")), await sent(tab, "VitrineW2WEdit")
        return fields, [*values, drawn["strength_1"]], drawn, run, tab.faults()


@page_modes("classic")
def test_a_panel_shows_and_changes_what_its_box_says(driver, address, vue):
    fields, values, drawn, run, faults = asyncio.run(_people(driver, address, vue))
    assert "strength_1" in fields, "hidden in the node, seen on its box"
    assert values[0] == -3 and values[1] > 1
    assert drawn["map_position"] and drawn == {name: run[name] for name in drawn}
    assert not faults


async def _points(driver, address, vue):
    async with driver.page(address) as tab:
        await tab.build(POINTS, vue)
        await promoted(tab, "points")
        fields = await shown(tab, vue)
        await tab.evaluate(put("points", "0.25 0.25"))
        await enter(tab)
        await tab.evaluate("press(panel)")
        await tab.wait_for("document.querySelector('canvas.vitrine-points')?.getBoundingClientRect().height > 150")
        await tab.settle()
        await pulled(tab, "canvas.vitrine-points", (0.6, 0.6), (0.6, 0.6))
        return fields, (await sent(tab, "VitrineFindCorrespondence"))["points"], tab.faults()


@page_modes("classic")
def test_points_are_added_to_those_of_the_box(driver, address, page_base, vue):
    (page_base / "input").mkdir(exist_ok=True)
    Image.new("RGB", (64, 64), "olive").save(page_base / "input" / PICTURE)
    fields, points, faults = asyncio.run(_points(driver, address, vue))
    lines = points.splitlines()
    assert "points" in fields and lines[0] == "0.2500 0.2500" and len(lines) == 2 and not faults


async def _folded(driver, address, vue):
    async with driver.page(address) as tab:
        await tab.build(FIT, vue)
        await promoted(tab, "receptive_field")
        fields = [await shown(tab, vue)]
        await tab.evaluate(put("receptive_field", "dilate"))
        run = await sent(tab, "VitrineResolutionTransferLoader")
        await tab.evaluate("window.name = String(host.id); null")
        await tab.reload()
        await tab.evaluate("window.host = app.graph._nodes.find(n => String(n.id) === window.name); null")
        fields.append(await shown(tab, vue))
        again = await sent(tab, "VitrineResolutionTransferLoader")
        return fields, [run["receptive_field"], again["receptive_field"]], tab.faults()


@page_modes("classic")
def test_a_promoted_receptive_field_reaches_the_node(driver, address, vue):
    fields, values, faults = asyncio.run(_folded(driver, address, vue))
    assert fields == [["receptive_field"]] * 2 and values == ["dilate"] * 2 and not faults
