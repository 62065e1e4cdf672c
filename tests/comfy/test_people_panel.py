"""*Person Sliders (W2W)*'s panel: the map, the sliders and the pictures give what executing the graph gives."""

import asyncio
import base64
import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from vitrine.engine.errors import VitrineError
from vitrine.engine.w2w import at_place, listed, map_of, place_of
from vitrine_tests.lanes import page_modes

PROMPT, SEED, SPACE = "a smiling face with cap left navy shirt on blue", 7, "portraits people (shipped)"
STUDENT = "vitrine/vitrine-portraits-emd-student.safetensors"
INPUTS = {f"label_{i}": "" for i in range(1, 5)} | {f"strength_{i}": 0.0 for i in range(1, 5)}
INPUTS |= {"label_1": "beard", "strength_1": 2.0, "protect": "", "more": "glasses: 1.5"}
EDIT = INPUTS | {"map_position": "0.31 -0.42"}


RELEASED = {"steps": 6, "cfg": 2.0, "sampler_name": "dpmpp_2m", "scheduler": "sgm_uniform", "denoise": 1.0}


def graph(edit, released=False):
    """Load, sample, edit, apply, one step or a few ordinary ones, decode, as an API graph."""
    nodes = {
        "1": ("VitrineLoadPortraits", {"model": "portraits, 64 px"}),
        "2": ("CLIPTextEncode", {"text": PROMPT, "clip": ["1", 1]}),
        "3": ("EmptyLatentImage", {"width": 64, "height": 64, "batch_size": 1}),
        "4": ("VitrineLoadW2WSpace", {"space_file": SPACE, "components": 0}),
        "5": ("VitrineW2WSample", {"space": ["4", 0], "seed": 4, "spread": 1.0, "components": 0, "truncation": 0.0,
                                   "wanted": "", "attributes": "auto"}),
        "6": ("VitrineW2WEdit", {"space": ["4", 0], "w2w_model": ["5", 0], **edit}),
        "7": ("VitrineApplyW2WModel", {"model": ["1", 0], "space": ["4", 0], "w2w_model": ["6", 0], "strength": 1.0,
                                       "start_timestep": 1000.0}),
        "8": ("VitrineEMDOneStepGenerator", {"model": ["7", 0], "positive": ["2", 0], "latent": ["3", 0], "seed": SEED,
                                             "student": STUDENT, "preset": "auto"}),
        "9": ("VAEDecode", {"samples": ["8", 0], "vae": ["1", 2]}),
        "10": ("SaveImage", {"images": ["9", 0], "filename_prefix": "people"}),
    }  # fmt: skip
    if released:
        sockets = {"model": ["7", 0], "positive": ["2", 0], "negative": ["11", 0], "latent_image": ["3", 0]}
        nodes |= {
            "8": ("KSampler", sockets | RELEASED | {"seed": SEED}),
            "11": ("CLIPTextEncode", {"text": "", "clip": ["1", 1]}),
        }
    return {number: {"class_type": kind, "inputs": inputs} for number, (kind, inputs) in nodes.items()}


def session_of(people):
    """Of the graph's *Person Sliders (W2W)*, which ran without a page."""
    from vitrine.nodes.comfy.panel_state import NodeKey

    return people.SESSIONS.find(NodeKey("", "", "6"))


@pytest.fixture(scope="module")
def people(comfy):
    from vitrine.nodes.comfy import people

    return people


@pytest.fixture(scope="module")
def space(comfy):
    return comfy.call("VitrineLoadW2WSpace", space_file=SPACE, components=0)[0]


@pytest.fixture(scope="module")
def person(comfy, space):
    return comfy.call("VitrineW2WSample", space=space, seed=4, spread=1.0, components=0, truncation=0.0, wanted="")[0]


def by_nodes(comfy, space, edited, released=False):
    """IMAGE of Apply Person (W2W), One-Step Sampler (EMD) or KSampler, and VAE Decode on a model loaded for itself."""
    model, clip, vae = comfy.call("VitrineLoadPortraits")
    blank = {"samples": torch.zeros(1, 4, 8, 8), "downscale_ratio_spacial": 8}
    with torch.inference_mode():
        positive, negative = (clip.encode_from_tokens_scheduled(clip.tokenize(text)) for text in (PROMPT, ""))
    applied = comfy.call(
        "VitrineApplyW2WModel", model=model, space=space, w2w_model=edited, strength=1.0, start_timestep=1000.0
    )
    if released:
        sampling = {"cfg": RELEASED["cfg"], "sampler_name": "dpmpp_2m", "scheduler": "sgm_uniform", "denoise": 1.0}
        with torch.inference_mode():
            (latent,) = comfy.nodes.NODE_CLASS_MAPPINGS["KSampler"]().sample(
                applied[0], SEED, 6, positive=positive, negative=negative, latent_image=blank, **sampling
            )
    else:
        latent = comfy.call(
            "VitrineEMDOneStepGenerator",
            model=applied[0],
            positive=positive,
            latent=blank,
            seed=SEED,
            student=STUDENT,
            preset="auto",
        )[0]
    with torch.inference_mode():
        return vae.decode(latent["samples"]), (model, positive, negative, vae)


@pytest.mark.parametrize("released", [False, True], ids=["dragged", "released"])
@pytest.mark.parametrize(
    "connected", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["shipped", "own model"]
)
def test_the_panel_draws_what_executing_gives(comfy, people, space, person, connected, released):
    edited = comfy.call("VitrineW2WEdit", space=space, w2w_model=person, **EDIT)[0]
    expected, connections = by_nodes(comfy, space, edited, released)
    unedited = by_nodes(comfy, space, person, released)[0]
    own = (*connections, STUDENT) if connected else (None, None, None, None, "")
    renderer = people.renderer_of(space, *own)[0]()
    draw = people.sampled if released else people.rendered
    with torch.inference_mode():
        image = draw(replace(renderer, cfg=RELEASED["cfg"]), space, edited, PROMPT, SEED)
    assert image.shape == expected.shape == (1, 64, 64, 3)
    assert (image - expected).abs().max() <= 1e-5 < 0.1 < (image - unedited).abs().max()


@pytest.mark.parametrize("released", [False, True], ids=["dragged", "released"])
def test_the_route_gives_the_graphs_picture(comfy, people, released):
    """All of it: the executor's file and the panel's PNG have the same pixels, and the panel's text fields rule."""
    result, error = comfy.run(graph(EDIT, released))
    assert error is None, error
    saved = result["outputs"]["10"]["images"][0]
    import folder_paths

    path = Path(folder_paths.get_output_directory()) / saved["subfolder"] / saved["filename"]
    shown = people.portrait(session_of(people), EDIT, PROMPT, SEED, released)["picture"]
    pixels = np.asarray(Image.open(BytesIO(base64.b64decode(shown))))
    assert np.array_equal(pixels, np.asarray(Image.open(path).convert("RGB")))
    other = people.portrait(session_of(people), INPUTS, PROMPT, SEED, released)["picture"]
    assert other != shown


def test_the_panel_runs_alone(comfy, people):
    alone = {number: node for number, node in graph(EDIT).items() if number in ("4", "5", "6")}
    result, error = comfy.run(alone)
    assert error is None and "nearest" in result["outputs"]["6"]["text"][0]


def test_what_the_page_is_told(comfy, people, space, person):
    comfy.run(graph(EDIT))
    shown = people.laid_out(session_of(people))
    chart = map_of(space, method="components")
    assert len(shown["points"]) == len(shown["names"]) == 520 and shown["draws"]
    assert np.allclose(shown["points"], chart.coordinates, atol=1e-4)
    assert [entry["name"] for entry in shown["labels"]] == list(listed(space))
    assert shown["person"] == pytest.approx(place_of(space, chart, person.coefficients[0]).tolist())
    assert all(entry["reach"] > 0 and len(entry["scores"]) == 520 for entry in shown["labels"])


def test_what_a_picture_lacks_is_named(comfy, people, space, person):
    foreign = replace(space, info={k: v for k, v in space.info.items() if k != "base"})
    model, clip, vae = comfy.call("VitrineLoadPortraits")
    assert people.renderer_of(foreign, model, [], None, vae, STUDENT) == (None, ("positive",))
    assert people.renderer_of(foreign, None, None, None, None, "") == (None, ("model", "positive", "vae"))
    session = people.PanelSession(foreign, map_of, person, lambda inputs: person, None, ("vae",))
    shown = people.laid_out(session)
    assert people.portrait(session, EDIT, "", 0) == {"picture": None} and not shown["draws"]
    assert shown["missing"] == ["vae"]


def test_without_a_student_the_picture_comes_on_release(comfy, people, space, person):
    model, clip, vae = comfy.call("VitrineLoadPortraits")
    with torch.inference_mode():
        positive = clip.encode_from_tokens_scheduled(clip.tokenize(PROMPT))
    renderer, missing = people.renderer_of(space, model, positive, None, vae, people.ORDINARY_STEPS)
    session = people.PanelSession(space, map_of, person, lambda inputs: person, renderer, missing)
    assert people.portrait(session, EDIT, "", 0, released=False) == {"picture": None} and missing == ()
    assert people.portrait(session, EDIT, "", 0)["picture"]


def test_a_dot_of_the_map_has_its_training_models_face(comfy, people, space, person):
    session = people.PanelSession(space, map_of, person, lambda inputs: person, people.shipped)
    shown = people.laid_out(session)
    dot = shown["names"].index("person-0041")
    with torch.inference_mode():
        model = comfy.call("VitrineLoadW2WModel", file="", space=space, member="person-0041")[0]
        image = people.sampled(people.shipped(), space, model, PROMPT, SEED)[0]
    pixels = (255 * image.cpu()).clamp(0, 255).byte().numpy()
    face = people.training_portrait(session, dot, PROMPT, SEED)["picture"]
    drawn = np.asarray(Image.open(BytesIO(base64.b64decode(face)))).astype(int)
    assert np.abs(drawn - pixels).max() <= 1
    other = people.training_portrait(session, dot + 1, PROMPT, SEED)["picture"]
    assert np.abs(np.asarray(Image.open(BytesIO(base64.b64decode(other)))).astype(int) - pixels).max() > 50
    with pytest.raises(VitrineError, match="dot"):
        people.training_portrait(session, len(shown["points"]), PROMPT, SEED)


def test_a_newer_request_ends_a_released_picture_between_two_steps(comfy, people, space, person):
    from vitrine.nodes.comfy.render_thread import Superseded

    calls = []

    def superseded():
        calls.append(len(calls))
        if len(calls) == 3:
            raise Superseded

    with torch.inference_mode(), pytest.raises(Superseded):
        people.sampled(people.shipped(), space, person, PROMPT, SEED, superseded)
    assert len(calls) == 3 < people.RELEASED_STEPS


def test_a_place_moves_and_none_does_not(comfy, space, person):
    def call(**changes):
        return comfy.call("VitrineW2WEdit", space=space, w2w_model=person, **INPUTS | {"more": ""} | changes)[0]

    plain = {k: v for k, v in INPUTS.items() if k not in ("more", "map_position")}
    before = comfy.call("VitrineW2WEdit", space=space, w2w_model=person, **plain)[0]
    assert torch.equal(before.coefficients, call(map_position="").coefficients)
    chart = map_of(space, method="components")
    home = place_of(space, chart, person.coefficients[0]).tolist()
    assert torch.equal(call(map_position=" ".join(map(repr, home)), strength_1=0.0).coefficients, person.coefficients)
    dragged = call(map_position="-0.5 0.25", strength_1=0.0)
    row = at_place(space, chart, person.coefficients[0], (-0.5, 0.25))
    assert torch.equal(dragged.coefficients[0], row) and dragged.history[-2] == {"place": [-0.5, 0.25]}
    for wrong in ("0.5", "a b", "2 0", "nan 0"):
        with pytest.raises(VitrineError, match="map_position"):
            call(map_position=wrong)


def test_a_fresh_node_changes_nothing(comfy, space, person):
    """In any space: no label that it may not have."""
    schema = comfy.nodes.NODE_CLASS_MAPPINGS["VitrineW2WEdit"].define_schema()
    fresh = {i.id: i.default for i in schema.inputs if getattr(i, "default", None) is not None}
    other = replace(space, directions={"glasses": space.directions["glasses"]})
    edited = comfy.call("VitrineW2WEdit", space=other, w2w_model=person, **fresh)[0]
    assert torch.equal(edited.coefficients, person.coefficients)
    with pytest.raises(VitrineError, match="glasses"):
        comfy.call("VitrineW2WEdit", space=other, w2w_model=person, **fresh | {"label_1": "beard", "strength_1": 1.0})


def test_sliders_beyond_four(comfy, space, person):
    pairs = INPUTS | {"label_2": "glasses", "strength_2": 1.5, "more": ""}
    by_pairs = comfy.call("VitrineW2WEdit", space=space, w2w_model=person, **pairs)[0]
    by_text = comfy.call("VitrineW2WEdit", space=space, w2w_model=person, **INPUTS)[0]
    assert torch.equal(by_pairs.coefficients, by_text.coefficients)


# --- in the page --------------------------------------------------------------------------------------------------
BUILD = """(async () => {
    const add = (type, x, y) => { const n = LiteGraph.createNode(type); n.pos = [x, y]; app.graph.add(n); return n }
    const model = add('VitrineLoadPortraits', 40, 60), text = add('CLIPTextEncode', 40, 240)
    const size = add('EmptyLatentImage', 40, 460), space = add('VitrineLoadW2WSpace', 40, 620)
    const person = add('VitrineW2WSample', 40, 860), edit = add('VitrineW2WEdit', 480, 60)
    const apply = add('VitrineApplyW2WModel', 980, 60), step = add('KSampler', 980, 300)
    const decode = add('VAEDecode', 1400, 60), save = add('SaveImage', 1400, 200)
    const set = (n, name, v) => { n.widgets.find(w => w.name === name).value = v }
    const join = (from, slot, to, name) => from.connect(slot, to, to.inputs.findIndex(i => i.name === name))
    set(text, 'text', 'PROMPT'); set(size, 'width', 64); set(size, 'height', 64)
    set(edit, 'label_1', 'beard'); set(edit, 'strength_1', 2)
    const empty = add('CLIPTextEncode', 40, 1100)
    for (const [name, v] of Object.entries(RELEASED)) set(step, name, v)
    set(step, 'seed', 7); set(person, 'seed', 4)
    join(model, 1, text, 'clip'); join(space, 0, person, 'space'); join(space, 0, edit, 'space')
    join(person, 0, edit, 'w2w_model'); join(model, 0, apply, 'model'); join(space, 0, apply, 'space')
    join(edit, 0, apply, 'w2w_model'); join(apply, 0, step, 'model'); join(text, 0, step, 'positive')
    join(model, 1, empty, 'clip'); join(empty, 0, step, 'negative')
    join(size, 0, step, 'latent_image'); join(step, 0, decode, 'samples'); join(model, 2, decode, 'vae')
    join(decode, 0, save, 'images')
    for (const n of [person, step]) n.widgets.find(w => w.name === 'control_after_generate').value = 'fixed'
    edit.properties.vitrine_prompt = 'PROMPT'
    window.edit = edit
})()""".replace("PROMPT", PROMPT).replace("RELEASED", json.dumps(RELEASED))
EDITS = "app.graph._nodes.find(n => n.comfyClass === 'VitrineW2WEdit')"
VALUES = f"Object.fromEntries({EDITS}.widgets.filter(w => w.serialize !== false).map(w => [w.name, w.value]))"
LATEST = "document.querySelector('.vitrine-person').dataset"


MENU = f"app.extensions.find(e => e.name === 'vitrine.people_menu').getNodeMenuItems({EDITS})"
"""What a right click on the node offers."""


async def _drag(tab, selector, *shares):
    """Real mouse events at shares of an element's box."""
    left, top, width, height = await tab.box(selector)
    await tab.drag([(left + x * width, top + y * height) for x, y in shares])


async def _run(tab, address):
    """Queue and wait; the pixels that Save Image wrote."""
    import aiohttp

    entry = await tab.run(address)
    assert entry["status"]["status_str"] == "success", entry["status"]["messages"][-1]
    shown = next(o["images"][0] for o in entry["outputs"].values() if "images" in o)
    async with aiohttp.ClientSession() as session, session.get(f"{address}/view", params=shown) as answer:
        return np.asarray(Image.open(BytesIO(await answer.read())).convert("RGB"))


async def _settled(tab, values):
    """The panel's pixels, once they are of these values."""
    drawn = f"Object.entries(JSON.parse({LATEST}.inputs))"
    await tab.wait_for(f"{LATEST}.released === 'true'")
    await tab.wait_for(f"{drawn}.every(([name, value]) => value === ({json.dumps(values)})[name])")
    source = await tab.evaluate("document.querySelector('.vitrine-person').src")
    return np.asarray(Image.open(BytesIO(base64.b64decode(source.split(",")[1]))))


async def _face_under_the_mouse(tab):
    """Name and pixels of the face that shows beside the first dot found on a walk over the map."""
    left, top, width, height = await tab.box(".vitrine-map")
    named = "document.querySelector('.vitrine-hover')?.dataset.name"
    for step in range(60):
        move = {"x": left + width * (0.2 + 0.01 * step), "y": top + height * 0.42, "pointerType": "mouse"}
        await tab.send("Input.dispatchMouseEvent", type="mouseMoved", **move)
        await tab.settle()
        if await tab.evaluate(f"{named} && document.querySelector('.vitrine-hover').style.display !== 'none'"):
            break
    face = await tab.evaluate(f"[{named}, document.querySelector('.vitrine-hover').src.length]")
    await tab.send("Input.dispatchMouseEvent", type="mouseMoved", x=left - 20, y=top - 20, pointerType="mouse")
    return face


PATIENCE = """import('/scripts/api.js').then(({ api }) => {
    const { fetchApi } = api
    window.patience = []
    api.fetchApi = function (route, options) {
        if (route.includes('/vitrine/person')) window.patience.push(options.timeoutMs)
        return fetchApi.apply(this, arguments)
    }
})"""
"""Notes for how long the page waits for each picture; unless told, newer pages give up after a minute."""


async def _walk(driver, address, vue):
    async with driver.page(address) as tab:
        await tab.evaluate(PATIENCE)
        await tab.build(BUILD, vue)
        await tab.wait_for("document.querySelector('.vitrine-people').textContent.includes('Run once')")
        first = await _run(tab, address)
        await tab.wait_for(f"{LATEST}.turn")
        seen = {"first": (first, await _settled(tab, await tab.evaluate(VALUES)))}
        await _drag(tab, ".vitrine-map", (0.5, 0.5), (0.4, 0.4), (0.3, 0.6))
        seen["face"] = await _face_under_the_mouse(tab)
        seen["dragged"], seen["place before"] = await tab.evaluate(VALUES), await tab.box(".vitrine-people")
        for name in ("glasses", "long hair", "bald", "curly hair", "mole left"):  # a field for three of them
            await tab.evaluate(f"document.querySelector('[data-name=\"{name}\"]').scrollIntoView({{block: 'nearest'}})")
            await _drag(tab, f'[data-name="{name}"]', (0.5, 0.5), (0.6, 0.5), (0.8, 0.5))
        seen["pulled"] = await tab.evaluate(VALUES)
        seen["place after"] = await tab.box(".vitrine-people")
        panel = await _settled(tab, seen["pulled"])
        seen["patience"] = await tab.evaluate("window.patience")
        seen["milliseconds"] = int(await tab.evaluate(f"{LATEST}.milliseconds"))
        await tab.press("z", 90, modifiers=2)  # the slider has the focus
        await tab.settle()
        seen["undone"] = await tab.evaluate(VALUES)
        await tab.command("Redo")
        await tab.reload()
        await tab.wait_for("document.querySelector('.vitrine-people').textContent.includes('Run once')")
        seen["reloaded"] = await tab.evaluate(VALUES)
        copied = "app.canvas.copyToClipboard([e]); app.canvas.pasteFromClipboard(); return app.graph._nodes"
        copied += ".filter(n => n.comfyClass === 'VitrineW2WEdit' && n !== e)"
        copied += ".map(n => n.widgets.find(w => w.name === 'map_position').value)"
        seen["copied"] = await tab.evaluate(f"(() => {{ const e = {EDITS}; {copied} }})()")
        copies = "app.graph._nodes.filter(n => n.comfyClass === 'VitrineW2WEdit').slice(1)"
        await tab.evaluate(f"{copies}.forEach(n => app.graph.remove(n))")  # it is connected to nothing
        seen["saved"] = await tab.run(address, MENU + "[0].callback()")
        seen["last"] = (await _run(tab, address), panel)
        return seen, tab.faults()


@page_modes("Nodes 2.0")
def test_people_are_dragged_and_sliders_pulled(driver, address, vue, record_property):
    """``--junitxml`` keeps the milliseconds from the last pull to its picture."""
    seen, errors = asyncio.run(_walk(driver, address, vue))
    record_property("milliseconds", seen["milliseconds"])
    values = seen["pulled"]
    assert seen["patience"] and set(seen["patience"]) == {None}, "a large model takes minutes on a CPU"
    name, letters = seen["face"]
    assert name.startswith("person-") and letters > 1000
    assert seen["place before"] == seen["place after"], "nothing moves under the mouse while sliders come into use"
    x, y = map(float, seen["dragged"]["map_position"].split())
    assert -1 < x < -0.2 and -1 < y < -0.05 and values["map_position"] == seen["dragged"]["map_position"]
    labels = [values[f"label_{i}"] for i in range(1, 5)]
    assert labels == ["beard", "glasses", "long hair", "bald"] and values["strength_1"] == 2
    assert all(values[f"strength_{i}"] > 1 for i in range(2, 5))
    assert [part.split(":")[0] for part in values["more"].splitlines()] == ["curly hair", "mole left"]
    outputs = seen["saved"]["outputs"].values()
    written = [text for shown in outputs for text in shown.get("text", ()) if ".safetensors" in text]
    assert "models/loras/vitrine/person.safetensors" in written[0] and not any("images" in o for o in outputs)
    assert seen["undone"]["more"].startswith("curly hair") and "mole" not in seen["undone"]["more"]
    assert seen["reloaded"] == values and seen["copied"] == [values["map_position"]]
    for executed, panel in (seen["first"], seen["last"]):
        assert np.array_equal(executed, panel)
    assert not np.array_equal(seen["first"][0], seen["last"][0])
    assert not errors


WITHOUT_SLIDERS = """import('/scripts/api.js').then(({ api }) => {
    const { fetchApi } = api
    api.fetchApi = async function (route) {
        const answer = await fetchApi.apply(this, arguments)
        if (!answer.ok || !route.includes('/vitrine/space')) return answer
        return Response.json({ ...await answer.json(), labels: [] })
    }
})"""
"""What the page is told of a space that no slider was made for."""


async def _open_without_sliders(driver, address, vue):
    async with driver.page(address) as tab:
        await tab.evaluate(WITHOUT_SLIDERS)
        await tab.build(BUILD, vue)
        await _run(tab, address)
        await tab.wait_for(f"{LATEST}.turn")
        return await tab.evaluate("document.querySelector('.vitrine-people').innerText"), tab.faults()


@page_modes("Nodes 2.0")
def test_a_space_without_sliders_says_what_makes_one(driver, address, vue):
    text, errors = asyncio.run(_open_without_sliders(driver, address, vue))
    assert "No sliders in this space yet: Slider from Labels (W2W) makes one" in text
    assert not errors
