"""Panels of nodes with equal ids in the real page: copies of a subgraph, two workflows, a person each.

The picture on a panel is compared with the one that executing the graph saved.
"""

import asyncio
import base64
import json
import os
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
COMFYUI = Path(os.environ.get("COMFYUI_PATH", "~/comfy/ComfyUI")).expanduser()
STUDENT = "vitrine/vitrine-portraits-emd-student.safetensors"
PROMPT = "a smiling face with navy shirt on blue"

BUILD = """(async () => {
    const add = (type, x, y) => { const n = LiteGraph.createNode(type); n.pos = [x, y]; app.graph.add(n); return n }
    const set = (n, name, v) => { n.widgets.find(w => w.name === name).value = v }
    const join = (from, slot, to, name) => from.connect(slot, to, to.inputs.findIndex(i => i.name === name))
    const model = add('VitrineLoadPortraits', 40, 60), text = add('CLIPTextEncode', 40, 240)
    const size = add('EmptyLatentImage', 40, 460), space = add('VitrineLoadW2WSpace', 40, 620)
    set(text, 'text', 'PROMPT'); set(size, 'width', 64); set(size, 'height', 64)
    join(model, 1, text, 'clip')
    const line = (seed, y, edit) => {
        const person = add('VitrineW2WSample', 40, 860 + y)
        const apply = add('VitrineApplyW2WModel', 1000, 60 + y), step = add('VitrineEMDOneStepGenerator', 1000, 300 + y)
        const decode = add('VAEDecode', 1400, 60 + y), save = add('SaveImage', 1400, 200 + y)
        set(person, 'seed', seed); set(step, 'student', 'STUDENT'); set(step, 'seed', 7)
        for (const n of [person, step]) set(n, 'control_after_generate', 'fixed')
        join(space, 0, person, 'space'); join(space, 0, apply, 'space'); join(model, 0, apply, 'model')
        join(apply, 0, step, 'model'); join(text, 0, step, 'positive'); join(size, 0, step, 'latent')
        join(step, 0, decode, 'samples'); join(model, 2, decode, 'vae'); join(decode, 0, save, 'images')
        return { person, apply, save }
    }
    const wire = (edit, { person, apply }) => {
        join(space, 0, edit, 'space'); join(person, 0, edit, 'w2w_model'); join(edit, 0, apply, 'w2w_model')
    }
    const edit = add('VitrineW2WEdit', 480, 60), first = line(SEED, 0)
    wire(edit, first)
    edit.properties.vitrine_prompt = 'PROMPT'
    window.edit = edit
    window.saves = [first.save.id]
    if (!COPIES) return
    // the edit into a subgraph, and a second node of the same subgraph with another person
    const { node } = app.graph.convertToSubgraph(new Set([edit]))
    const second = line(SEED + 1, 700), copy = node.clone()
    copy.pos = [480, 900]
    app.graph.add(copy)
    for (const input of node.inputs) {
        const link = app.graph.links.get(input.link), source = link && app.graph.getNodeById(link.origin_id)
        if (source) (source === first.person ? second.person : source).connect(
            link.origin_slot, copy, copy.inputs.findIndex(i => i.name === input.name))
    }
    copy.connect(0, second.apply, second.apply.inputs.findIndex(i => i.name === 'w2w_model'))
    window.hosts = [node, copy]
    window.edit = node.subgraph._nodes.find(n => n.comfyClass === 'VitrineW2WEdit')
    window.saves.push(second.save.id)
})()""".replace("PROMPT", PROMPT).replace("STUDENT", STUDENT)
PRESS = "(() => { const b = edit.widgets.find(w => w.type === 'button'); b.callback(b.value, app.canvas, edit) })()"
PERSON = "document.querySelector('.vitrine-person')"


def script(seed, copies=False):
    return BUILD.replace("SEED", str(seed)).replace("COPIES", str(copies).lower())


def pixels(content):
    return np.asarray(Image.open(BytesIO(content)).convert("RGB"))


async def saved(tab, address):
    """Runs what is open; node -> pixels of each Save Image."""
    import aiohttp

    entry = await tab.run(address)
    assert entry["status"]["status_str"] == "success", entry["status"]["messages"][-1]
    found = {}
    async with aiohttp.ClientSession() as session:
        for node in await tab.evaluate("window.saves.map(String)"):
            shown = entry["outputs"][node]["images"][0]
            async with session.get(f"{address}/view", params=shown) as answer:
                found[node] = pixels(await answer.read())
    return list(found.values())


async def shown(tab, expected):
    """Whether the panel comes to show these pixels; what it showed last."""
    await tab.wait_for(f"{PERSON}?.src.startsWith('data:')")
    await tab.settle()
    source = await tab.evaluate(f"{PERSON}.src")
    return bool(np.array_equal(pixels(base64.b64decode(source.split(",")[1])), expected))


pytestmark = pytest.mark.nightly  # minutes of a real page for each


@pytest.fixture(scope="module")
def address(driver, tmp_path_factory):
    with driver.server(COMFYUI, ROOT, tmp_path_factory.mktemp("keys") / "base") as found:
        yield found


async def _copies(driver, address, vue):
    async with driver.page(address) as tab:
        await tab.build(script(4, copies=True), vue)
        expected, seen = await saved(tab, address), []
        opened = False
        for number in (0, 1, 0):
            await tab.evaluate(f"app.canvas.openSubgraph(hosts[{number}].subgraph, hosts[{number}])")
            await tab.settle()
            if not opened:
                await tab.evaluate(PRESS)
                opened = True
            await tab.settle()
            seen.append(await shown(tab, expected[number]))
            await tab.evaluate("app.canvas.setGraph(app.graph)")
            await tab.settle()
        ids = await tab.evaluate("app.graphToPrompt().then(p => Object.entries(p.output).filter("
                                 "([, n]) => n.class_type === 'VitrineW2WEdit').map(([id]) => id))")  # fmt: skip
        return ids, expected, seen, tab.faults()


@pytest.mark.parametrize("vue", [False, True], ids=["classic", "Nodes 2.0"])
def test_copies_of_a_subgraph_show_their_own_person(driver, address, vue):
    ids, expected, seen, faults = asyncio.run(_copies(driver, address, vue))
    assert len(ids) == 2 and all(":" in i for i in ids) and not np.array_equal(*expected)
    assert seen == [True, True, True] and not faults


async def _workflows(driver, address, vue):
    """A workflow, a copy of it that is loaded while the first is open, and back."""
    async with driver.page(address) as tab:
        await tab.build(script(4), vue)
        await tab.evaluate(PRESS)
        (first,) = await saved(tab, address)
        seen = [await shown(tab, first)]
        data = await tab.evaluate("app.graph.serialize()")
        person = next(n for n in data["nodes"] if n["type"] == "VitrineW2WSample")
        person["widgets_values"][0] = 5
        await tab.evaluate(f"app.loadGraphData({json.dumps(data)})")
        await tab.settle()
        unknown = await tab.evaluate("document.querySelector('.vitrine-people').textContent.includes('Run once')")
        (second,) = await saved(tab, address)
        seen.append(await shown(tab, second))
        await tab.evaluate("app.extensionManager.command.execute('Workspace.PreviousOpenedWorkflow')")
        await tab.settle()
        seen.append(await shown(tab, first))
        ids = await tab.evaluate("app.extensionManager.workflow.openWorkflows.map(w => w.activeState?.id)")
        return first, second, unknown, seen, ids, tab.faults()


def test_two_workflows_with_equal_ids(driver, address):
    first, second, unknown, seen, ids, faults = asyncio.run(_workflows(driver, address, False))
    assert not np.array_equal(first, second) and unknown
    assert seen == [True, True, True] and len(set(ids)) == len(ids) and not faults
