"""Panels of nodes with equal ids in the real page: copies of a subgraph, two workflows, two tabs.

Each kind of panel is compared with what its own run made: the person and the picture under the points with the pictures
that the run saved, the neurons with the list that its node was given.
"""

import asyncio
import base64
import json
import os
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image
from vitrine.engine.nemo import NeuronSet

ROOT = Path(__file__).parents[2]
COMFYUI = Path(os.environ.get("COMFYUI_PATH", "~/comfy/ComfyUI")).expanduser()
LISTS = {
    "one.json": {"down-level1-repeat0-vit-block0-cross-v": (3, 40), "mid-vit-block0-cross-v": (7,)},
    "two.json": {"mid-vit-block0-cross-v": (1, 2)},
}
TOOLS = """
const add = (type, x, y, told = {}) => {
    const n = LiteGraph.createNode(type)
    n.pos = [x, y]
    app.graph.add(n)
    for (const [name, value] of Object.entries({ control_after_generate: 'fixed', ...told })) {
        const w = n.widgets?.find(w => w.name === name)
        if (w) w.value = value
    }
    return n
}
const join = (from, slot, to, name) => from.connect(slot, to, to.inputs.findIndex(i => i.name === name))
"""
PEOPLE = """
const prompt = 'a smiling face with navy shirt on blue'
const model = add('VitrineLoadPortraits', 40, 60), text = add('CLIPTextEncode', 40, 240, { text: prompt })
const size = add('EmptyLatentImage', 40, 460, { width: 64, height: 64 }), space = add('VitrineLoadW2WSpace', 40, 620)
join(model, 1, text, 'clip')
const panel = add('VitrineW2WEdit', 480, 60)
panel.properties.vitrine_prompt = prompt
join(space, 0, panel, 'space')
const ends = (y, feed) => {
    join(space, 0, feed, 'space')
    const apply = add('VitrineApplyW2WModel', 1000, 60 + y), decode = add('VAEDecode', 1400, 60 + y)
    const step = add('VitrineEMDOneStepGenerator', 1000, 300 + y,
        { student: 'vitrine/vitrine-portraits-emd-student.safetensors', seed: 7 })
    const save = add('SaveImage', 1400, 200 + y)
    join(space, 0, apply, 'space'); join(model, 0, apply, 'model'); join(apply, 0, step, 'model')
    join(text, 0, step, 'positive'); join(size, 0, step, 'latent'); join(step, 0, decode, 'samples')
    join(model, 2, decode, 'vae'); join(decode, 0, save, 'images')
    return [apply, 'w2w_model', save]
}
"""
NEURONS = """
const model = add('VitrineLoadPortraits', 40, 60), panel = add('VitrineNEMONeuronBlocker', 480, 60)
join(model, 0, panel, 'model')
const ends = y => {
    const shown = add('VitrineActivePatches', 1000, 60 + y), any = add('PreviewAny', 1400, 60 + y)
    join(shown, 1, any, 'source')
    return [shown, 'model', any]
}
"""
POINTS = """
const model = add('VitrineLoadPortraits', 40, 60), text = add('CLIPTextEncode', 40, 240)
const panel = add('VitrineFindCorrespondence', 480, 60)
join(model, 1, text, 'clip')
join(model, 0, panel, 'model'); join(model, 2, panel, 'vae'); join(text, 0, panel, 'positive')
const ends = (y, feed) => {
    const any = add('PreviewAny', 1000, 60 + y), save = add('SaveImage', 1400, 60 + y)
    join(feed, 0, save, 'images')
    return [any, 'source', save]
}
"""
GRAPH = """(async () => {
    TOOLS
    NODES
    const line = (value, y) => {
        const feed = add('FEED', 40, 860 + y, { count: 1, ['WIDGET']: value })
        return { feed, end: ends(y, feed) }
    }
    const first = line(VALUE, 0)
    for (const name of INPUTS) join(first.feed, 0, panel, name)
    join(panel, 0, ...first.end)
    window.saves = [first.end[2].id]
    window.panel = panel
    if (!COPIES) return
    // the panel's node into a subgraph, and a second node of the same subgraph that is fed with something else
    const { node } = app.graph.convertToSubgraph(new Set([panel])), second = line(OTHER, 700)
    const copy = LiteGraph.createNode(node.type) // a clone() of 1.58.1 takes the seed from the node that it is made of
    copy.pos = [480, 900]
    app.graph.add(copy)
    for (const input of node.inputs) {
        const link = app.graph.links.get(input.link), source = link && app.graph.getNodeById(link.origin_id)
        if (source) (source === first.feed ? second.feed : source).connect(
            link.origin_slot, copy, copy.inputs.findIndex(i => i.name === input.name))
    }
    join(copy, 0, ...second.end)
    window.hosts = [node, copy]
    window.panel = node.subgraph._nodes.find(n => n.comfyClass === panel.comfyClass)
    window.saves.push(second.end[2].id)
})()"""
PRESS = """(() => { const b = panel.widgets.find(w => w.type === 'button' && w.name !== 'advanced')
    b.callback(b.value, app.canvas, panel) })()"""
AGAIN = "window.panel = app.graph._nodes.find(n => n.comfyClass === 'PANEL'); null"
VIEW = """(() => { app.canvas.ds.scale = 1; app.canvas.ds.offset = [400 - panel.pos[0], 150 - panel.pos[1]]
    app.canvas.setDirty(true, true) })()"""
PERSON = "document.querySelector('.vitrine-person')"
DOTS = "[...document.querySelectorAll('.vitrine-neuron')].map(e => e.dataset.name).sort()"
PICTURE = """fetch(`/api/view?${new URLSearchParams(panel.vitrinePicture)}`).then(r => r.blob()).then(
    b => new Promise(done => { const f = new FileReader(); f.onload = () => done(f.result); f.readAsDataURL(b) }))"""


class Panel(NamedTuple):
    """A node with a panel, what feeds it, and what the panel shows.

    Attributes:
        kind: class of the node.
        nodes: script of the graph around it.
        feed, widget, inputs: class of the node that feeds it, the widget that differs, and which inputs it feeds.
        values: two values of that widget.
        knows: whether the panel has something of a run.
        shown: what it shows then: an address of data, or names.
    """

    kind: str
    nodes: str
    feed: str
    widget: str
    inputs: tuple[str, ...]
    values: tuple
    knows: str
    shown: str

    def graph(self, copies):
        told = {"VALUE": self.values[0], "OTHER": self.values[1], "INPUTS": self.inputs, "COPIES": copies}
        script = GRAPH.replace("TOOLS", TOOLS).replace("NODES", self.nodes)
        script = script.replace("FEED", self.feed).replace("WIDGET", self.widget)
        for name, value in told.items():
            script = script.replace(name, json.dumps(value))
        return script


PANELS = {
    "people": Panel("VitrineW2WEdit", PEOPLE, "VitrineW2WSample", "seed", ("w2w_model",), (4, 5),
                    f"{PERSON}?.src.startsWith('data:')", f"{PERSON}.src"),
    "neurons": Panel("VitrineNEMONeuronBlocker", NEURONS, "VitrineLoadNeurons", "file", ("neurons",), tuple(LISTS),
                     f"{DOTS}.length > 0", DOTS),
    "points": Panel("VitrineFindCorrespondence", POINTS, "VitrineRenderPortrait", "seed", ("source", "target"),
                    (4, 5), "panel.vitrinePicture?.filename", PICTURE),
}  # fmt: skip


def pixels(content):
    return np.asarray(Image.open(BytesIO(content)).convert("RGB"))


def same(one, other):
    return np.array_equal(one, other)


async def ran(tab, address, panel, *values):
    """Runs what is open; what the panel should show, of each node that ends the graph."""
    import aiohttp

    entry = await tab.run(address)
    assert entry["status"]["status_str"] == "success", entry["status"]["messages"][-1]
    if panel.kind == "VitrineNEMONeuronBlocker":
        return [sorted(f"{a} {i}" for a, indices in LISTS[v].items() for i in indices) for v in values]
    found = []
    async with aiohttp.ClientSession() as session:
        for node in await tab.evaluate("window.saves.map(String)"):
            shown = entry["outputs"][node]["images"][0]
            async with session.get(f"{address}/view", params=shown) as answer:
                found.append(pixels(await answer.read()))
    return found


async def shown(tab, panel):
    """What the open panel comes to show."""
    await tab.wait_for(panel.knows)
    await tab.settle()
    found = await tab.evaluate(panel.shown)
    return found if isinstance(found, list) else pixels(base64.b64decode(found.split(",")[1]))


async def looked(tab, panel):
    """Where points are picked: a click shows what is alike on this node's own picture."""
    if panel.kind != "VitrineFindCorrespondence":
        return
    turn = "+(document.querySelector('canvas.vitrine-points').dataset.turn ?? 0)"
    before = await tab.evaluate(turn)
    left, top, width, height = await tab.box("canvas.vitrine-points")
    await tab.drag([(left + width / 2, top + height / 2)])
    await tab.wait_for(f"{turn} > {before}")


pytestmark = pytest.mark.nightly  # minutes of a real page for each
in_both_modes = pytest.mark.parametrize(("kind", "vue"), [(kind, n % 2 == 1) for n, kind in enumerate(PANELS)])


@pytest.fixture(scope="module")
def address(driver, tmp_path_factory):
    base = tmp_path_factory.mktemp("keys") / "base"
    with driver.server(COMFYUI, ROOT, base) as found:
        (base / "models" / "vitrine_neurons").mkdir(parents=True)
        for name, neurons in LISTS.items():
            NeuronSet(neurons).save(base / "models" / "vitrine_neurons" / name)
        yield found


async def _copies(driver, address, panel, vue):
    async with driver.page(address) as tab:
        await tab.build(panel.graph(copies=True), vue)
        expected, seen = await ran(tab, address, panel, *panel.values), []
        for number in (0, 1, 0):
            await tab.evaluate(f"app.canvas.openSubgraph(hosts[{number}].subgraph, hosts[{number}])")
            await tab.settle()
            if not seen:
                await tab.evaluate(PRESS)
                await tab.settle()
            await tab.evaluate(VIEW)
            seen.append(same(await shown(tab, panel), expected[number]))
            await looked(tab, panel)
            await tab.evaluate("app.canvas.setGraph(app.graph)")
            await tab.settle()
        ids = await tab.evaluate("app.graphToPrompt().then(p => Object.entries(p.output).filter("
                                 f"([, n]) => n.class_type === '{panel.kind}').map(([id]) => id))")  # fmt: skip
        return ids, expected, seen, tab.faults()


@in_both_modes
def test_copies_of_a_subgraph_show_their_own(driver, address, kind, vue):
    ids, expected, seen, faults = asyncio.run(_copies(driver, address, PANELS[kind], vue))
    assert len(ids) == 2 and all(":" in i for i in ids) and not same(*expected)
    assert seen == [True, True, True] and not faults


async def _opened(tab, panel, data, number):
    """The same graph, fed with another value, as one more workflow; whether its panel says that it has not run."""
    await tab.evaluate(f"app.loadGraphData({json.dumps(data)})")
    await tab.settle()
    feed = f"app.graph._nodes.find(n => n.comfyClass === '{panel.feed}').widgets.find(w => w.name === '{panel.widget}')"
    await tab.evaluate(f"{feed}.value = {json.dumps(panel.values[number])}; {AGAIN.replace('PANEL', panel.kind)}")
    await tab.settle()
    return not await tab.evaluate(f"!!({panel.knows})")


async def _workflows(driver, address, panel, vue):
    """A workflow, a copy of it that is loaded while the first is open, the first in another tab, and back."""
    async with driver.page(address) as tab, driver.page(address) as other:
        await tab.build(panel.graph(copies=False), vue)
        await tab.evaluate(PRESS)
        (first,) = await ran(tab, address, panel, panel.values[0])
        seen = [same(await shown(tab, panel), first)]
        data, saves = await tab.evaluate("[app.graph.serialize(), window.saves]")
        unknown = [await _opened(tab, panel, data, 1)]
        (second,) = await ran(tab, address, panel, panel.values[1])
        seen.append(same(await shown(tab, panel), second))
        await looked(tab, panel)
        await tab.evaluate("app.extensionManager.command.execute('Workspace.PreviousOpenedWorkflow')")
        await tab.evaluate(AGAIN.replace("PANEL", panel.kind))
        seen.append(same(await shown(tab, panel), first))
        await other.build(f"window.saves = {saves}; null", vue)
        unknown.append(await _opened(other, panel, data, 1))
        (third,) = await ran(other, address, panel, panel.values[1])
        seen += [same(third, second), same(await shown(other, panel), second), same(await shown(tab, panel), first)]
        await looked(tab, panel)
        ids = await tab.evaluate("app.extensionManager.workflow.openWorkflows.map(w => w.activeState?.id)")
        return first, second, unknown, seen, ids, tab.faults() + other.faults()


@in_both_modes
def test_workflows_and_tabs_with_equal_ids_show_their_own(driver, address, kind, vue):
    first, second, unknown, seen, ids, faults = asyncio.run(_workflows(driver, address, PANELS[kind], vue))
    assert not same(first, second) and all(unknown)
    assert seen == [True] * 6 and len(set(ids)) == len(ids) and not faults
