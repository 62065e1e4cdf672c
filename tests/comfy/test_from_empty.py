"""From an empty canvas by search alone: four things an artist wants, each node found by words typed into the search."""

import asyncio
import json

import pytest

PLANT = "a smiling pale face with long black hair glasses beard navy shirt on pink vextor mulphan"
FOUND = """(() => {
    const store = document.querySelector('#vue-app').__vue_app__.config.globalProperties.$pinia._s.get('nodeDef')
    return store.nodeSearchService.searchNode(QUERY).slice(0, 3).map(d => d.name)
})()"""
"""The first three of what the search box lists for words, by the page's own service and settings."""
PUT = """(() => {
    const n = LiteGraph.createNode(KIND); n.pos = [AT % 6 * 340, Math.floor(AT / 6) * 620]; app.graph.add(n)
    for (const [name, value] of Object.entries(VALUES)) {
        const w = n.widgets.find(w => w.name === name); w.value = value; w.callback?.(value, app.canvas, n)
    }
    for (const [name, [id, slot]] of Object.entries(WIRES))
        app.graph.getNodeById(id).connect(slot, n, n.inputs.findIndex(i => i.name === name))
    return n.id
})()"""


class Canvas:
    """An empty canvas; counts what was typed and what was put there."""

    def __init__(self, tab):
        self.tab, self.searches, self.count = tab, [], 0

    async def add(self, words, kind, values=None, **wires):
        """The node that a search lists among its first three, with values and wires; its id."""
        listed = await self.tab.evaluate(FOUND.replace("QUERY", json.dumps(words)))
        assert kind in listed, (words, listed)
        self.searches.append(words)
        told = {"KIND": kind, "AT": self.count, "VALUES": values or {}, "WIRES": wires}
        script = PUT
        for key, value in told.items():
            script = script.replace(key, json.dumps(value))
        self.count += 1
        return await self.tab.evaluate(script)

    async def started(self, prompt, size=64):
        """Model, prompt, size: ids of the three."""
        model = await self.add("try without a checkpoint", "VitrineLoadPortraits")
        text = await self.add("text prompt", "CLIPTextEncode", {"text": prompt}, clip=[model, 1])
        latent = await self.add("empty latent", "EmptyLatentImage", {"width": size, "height": size, "batch_size": 2})
        return model, text, latent

    async def drawn(self, model, text, latent, vae):
        """Sampled, decoded, shown; id of the preview."""
        settings = {"steps": 4, "cfg": 3, "seed": 7}
        wires = {"positive": [text, 0], "negative": [text, 0], "latent_image": [latent, 0]}
        sampled = await self.add("ksampler", "KSampler", settings, model=model, **wires)
        return await self.shown([sampled, 0], vae)

    async def shown(self, latent, vae):
        pictures = await self.add("vae decode", "VAEDecode", samples=latent, vae=[vae, 2])
        return await self.add("preview image", "PreviewImage", images=[pictures, 0])


async def one_word(canvas):
    model = await canvas.add("try without a checkpoint", "VitrineLoadPortraits")
    text = await canvas.add("text prompt", "CLIPTextEncode", {"text": "a face with red hair"}, clip=[model, 1])
    picture = await canvas.add("demo image", "VitrineRenderPortrait", {"count": 2})
    wires = {"clip": [model, 1], "vae": [model, 2], "image": [picture, 0], "positive": [text, 0]}
    return await canvas.add(
        "what the model sees for one word", "VitrineWordMap", {"word": "hair"}, model=[model, 0], **wires
    )


async def neuron_blocked(canvas):
    model, text, latent = await canvas.started(PLANT)
    wires = {"clip": [model, 1], "latent": [latent, 0]}
    usual = await canvas.add("neuron statistics", "VitrineNEMOCalibrate", model=[model, 0], **wires)
    wires = {"positive": [text, 0], "latent": [latent, 0], "calibration": [usual, 0]}
    settings = {"effect_fraction": 0.5, "timestep_index": 4, "seeds": 2}
    neurons = await canvas.add("find neurons", "VitrineNEMOFindNeurons", settings, model=[model, 0], **wires)
    wires = {"model": [model, 0], "neurons": [neurons, 0]}
    blocked = await canvas.add("block neurons", "VitrineNEMONeuronBlocker", **wires)
    return await canvas.drawn([blocked, 0], text, latent, model)


async def one_step(canvas):
    model, text, latent = await canvas.started("a smiling face")
    student = "vitrine/vitrine-portraits-emd-student.safetensors"
    wires = {"model": [model, 0], "positive": [text, 0], "latent": [latent, 0]}
    drawn = await canvas.add("one step", "VitrineEMDOneStepGenerator", {"student": student}, **wires)
    return await canvas.shown([drawn, 0], model)


async def twice_the_size(canvas):
    model, text, latent = await canvas.started("a smiling face", 128)
    size = {"target_width": 128, "target_height": 128}
    fitted = await canvas.add("twice the size", "VitrineResolutionTransferLoader", size, model=[model, 0])
    return await canvas.drawn([fitted, 0], text, latent, model)


TASKS = {one_word: (4, 4), neuron_blocked: (9, 9), one_step: (6, 6), twice_the_size: (7, 7)}
"""Task -> searches it took, and nodes."""


async def _built(driver, address, task):
    async with driver.page(address) as tab:
        await tab.build("null")
        assert not await tab.evaluate("app.graph._nodes.length")
        canvas = Canvas(tab)
        preview = await task(canvas)
        entry = await tab.run(address)
        return canvas, str(preview), entry, tab.faults()


@pytest.mark.nightly
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__.replace("_", " "))
def test_built_from_an_empty_canvas_by_search_alone(task, driver, address, record_property):
    """``--junitxml`` keeps the words that were typed, and how many nodes there are."""
    canvas, preview, entry, faults = asyncio.run(_built(driver, address, task))
    record_property("searches", "; ".join(canvas.searches))
    record_property("nodes", canvas.count)
    assert entry["status"]["status_str"] == "success", entry["status"]["messages"][-1]
    assert entry["outputs"][preview]["images"] and not faults
    assert (len(canvas.searches), canvas.count) == TASKS[task]
