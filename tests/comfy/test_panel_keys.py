"""Panels of nodes with equal ids in the real page: copies of a subgraph, two workflows, two tabs.

*Person Sliders (W2W)*'s panel stands for all: they share what asks for a node's session (``web/requests.js``).
What it shows is compared with the picture that its own run saved.
"""

import asyncio
import base64
import json
from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from vitrine_tests.lanes import page_modes

SEEDS = (4, 5)
RELEASED = {"steps": 6, "cfg": 2.0, "sampler_name": "dpmpp_2m", "scheduler": "sgm_uniform", "denoise": 1.0}
"""How the panel draws once a hand has let go."""
GRAPH = """(async () => {
    const prompt = 'a smiling face with navy shirt on blue'
    const model = add('VitrineLoadPortraits', 40, 60), text = add('CLIPTextEncode', 40, 240, { text: prompt })
    const empty = add('CLIPTextEncode', 40, 1900)
    const size = add('EmptyLatentImage', 40, 460, { width: 64, height: 64 })
    const space = add('VitrineLoadW2WSpace', 40, 620)
    const panel = add('VitrineW2WEdit', 480, 60)
    panel.properties.vitrine_prompt = prompt
    join(model, 1, text, 'clip'); join(model, 1, empty, 'clip'); join(space, 0, panel, 'space')
    const line = (seed, y) => {
        const feed = add('VitrineW2WSample', 40, 860 + y, { seed })
        const apply = add('VitrineApplyW2WModel', 1000, 60 + y), decode = add('VAEDecode', 1400, 60 + y)
        const sampler = add('KSampler', 1000, 300 + y, { seed: 7, ...RELEASED })
        const save = add('SaveImage', 1400, 200 + y)
        join(space, 0, feed, 'space'); join(space, 0, apply, 'space'); join(model, 0, apply, 'model')
        join(apply, 0, sampler, 'model'); join(text, 0, sampler, 'positive'); join(empty, 0, sampler, 'negative')
        join(size, 0, sampler, 'latent_image')
        join(sampler, 0, decode, 'samples'); join(model, 2, decode, 'vae'); join(decode, 0, save, 'images')
        return { feed, apply, save }
    }
    const first = line(FIRST, 0)
    join(first.feed, 0, panel, 'w2w_model'); join(panel, 0, first.apply, 'w2w_model')
    window.saves = [first.save.id]
    window.panel = panel
    await new Promise(requestAnimationFrame) // a fresh panel opens by itself
    if (!COPIES) return
    // the panel's node into a subgraph, and a second node of the same subgraph that is fed with something else
    const { node } = app.graph.convertToSubgraph(new Set([panel])), second = line(SECOND, 700)
    const copy = LiteGraph.createNode(node.type) // a clone() of 1.58.1 takes the seed from the node that it is made of
    copy.pos = [480, 900]
    app.graph.add(copy)
    for (const input of node.inputs) {
        const link = app.graph.links.get(input.link), source = link && app.graph.getNodeById(link.origin_id)
        if (source) join(source === first.feed ? second.feed : source, link.origin_slot, copy, input.name)
    }
    join(copy, 0, second.apply, 'w2w_model')
    window.hosts = [node, copy]
    window.panel = node.subgraph._nodes.find(n => n.comfyClass === 'VitrineW2WEdit')
    window.saves.push(second.save.id)
})()"""
AGAIN = "window.panel = kind('VitrineW2WEdit'); null"
VIEW = """(() => { app.canvas.ds.scale = 1; app.canvas.ds.offset = [400 - panel.pos[0], 150 - panel.pos[1]]
    app.canvas.setDirty(true, true) })()"""
PERSON = "document.querySelector('.vitrine-person')"
KNOWS = f"{PERSON}?.src.startsWith('data:')"

pytestmark = pytest.mark.nightly  # minutes of a real page for each


def graph(copies):
    script = GRAPH.replace("FIRST", str(SEEDS[0])).replace("SECOND", str(SEEDS[1]))
    return script.replace("COPIES", json.dumps(copies)).replace("RELEASED", json.dumps(RELEASED))


def pixels(content):
    return np.asarray(Image.open(BytesIO(content)).convert("RGB"))


async def ran(tab, address):
    """Runs what is open; the picture of each node that ends the graph."""
    import aiohttp

    entry = await tab.run(address)
    assert entry["status"]["status_str"] == "success", entry["status"]["messages"][-1]
    found = []
    async with aiohttp.ClientSession() as session:
        for node in await tab.evaluate("window.saves.map(String)"):
            async with session.get(f"{address}/view", params=entry["outputs"][node]["images"][0]) as answer:
                found.append(pixels(await answer.read()))
    return found


async def shows(tab, picture):
    """Whether the open panel comes to show a picture."""
    await tab.wait_for(KNOWS)
    await tab.settle()
    source = await tab.evaluate(f"{PERSON}.src")
    return np.array_equal(pixels(base64.b64decode(source.split(",")[1])), picture)


async def _copies(driver, address, vue):
    async with driver.page(address) as tab:
        await tab.build(graph(copies=True), vue)
        expected, seen = await ran(tab, address), []
        for number in (0, 1, 0):
            await tab.evaluate(f"app.canvas.openSubgraph(hosts[{number}].subgraph, hosts[{number}])")
            await tab.settle()
            await tab.evaluate(VIEW)
            seen.append(await shows(tab, expected[number]))
            await tab.evaluate("app.canvas.setGraph(app.graph)")
            await tab.settle()
        ids = await tab.evaluate(
            "app.graphToPrompt().then(p => Object.entries(p.output).filter("
            "([, n]) => n.class_type === 'VitrineW2WEdit').map(([id]) => id))"
        )
        return ids, expected, seen, tab.faults()


@page_modes("classic")
def test_copies_of_a_subgraph_show_their_own(driver, address, vue):
    ids, expected, seen, faults = asyncio.run(_copies(driver, address, vue))
    assert len(ids) == 2 and all(":" in i for i in ids) and not np.array_equal(*expected)
    assert seen == [True, True, True] and not faults


async def _opened(tab, data, seed):
    """The same graph, fed with another seed, as one more workflow; whether its panel says that it has not run."""
    await tab.evaluate(f"app.loadGraphData({json.dumps(data)})")
    await tab.settle()
    feed = "kind('VitrineW2WSample').widgets.find(w => w.name === 'seed')"
    await tab.evaluate(f"{feed}.value = {seed}; {AGAIN}")
    await tab.settle()
    return not await tab.evaluate(f"!!({KNOWS})")


async def _workflows(driver, address, vue):
    """A workflow, a copy of it that is loaded while the first is open, the first in another tab, and back."""
    async with driver.page(address, alone=True) as tab, driver.page(address, alone=True) as other:
        await tab.build(graph(copies=False), vue)
        (first,) = await ran(tab, address)
        seen = [await shows(tab, first)]
        data, saves = await tab.evaluate("[app.graph.serialize(), window.saves]")
        unknown = [await _opened(tab, data, SEEDS[1])]
        (second,) = await ran(tab, address)
        seen.append(await shows(tab, second))
        await tab.evaluate("app.extensionManager.command.execute('Workspace.PreviousOpenedWorkflow')")
        await tab.evaluate(AGAIN)
        seen.append(await shows(tab, first))
        await other.build(f"window.saves = {saves}; null", vue)
        unknown.append(await _opened(other, data, SEEDS[1]))
        (third,) = await ran(other, address)
        seen += [np.array_equal(third, second), await shows(other, second), await shows(tab, first)]
        ids = await tab.evaluate("app.extensionManager.workflow.openWorkflows.map(w => w.activeState?.id)")
        return first, second, unknown, seen, ids, tab.faults() + other.faults()


@page_modes("classic")
def test_workflows_and_tabs_with_equal_ids_show_their_own(driver, address, vue):
    first, second, unknown, seen, ids, faults = asyncio.run(_workflows(driver, address, vue))
    assert not np.array_equal(first, second) and all(unknown)
    assert seen == [True] * 6 and len(set(ids)) == len(ids) and not faults
