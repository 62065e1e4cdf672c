"""The shipped workflows, opened, converted and run in ComfyUI's real page."""

import asyncio
import base64
import io
import itertools
import json
import os
import re
import urllib.request
from pathlib import Path

import pytest
from PIL import Image, ImageDraw
from vitrine_tests.comfy.boxes import BOXES, overlaps
from vitrine_tests.templates import ALL, ON_YOUR_MODEL, SHIPPED, every_node, plain_id, plain_title, read

ROOT = Path(__file__).parents[2]


LAPTOP = {"width": 1700, "height": 907, "deviceScaleFactor": 1, "mobile": False}
UNSEEN = """(() => {
    const notes = [...document.querySelectorAll('.comfy-markdown .tiptap')]
    const linked = (n, w) => n.inputs?.some(i => i.widget?.name === w.name && i.link != null)  // the page hides these
    const texts = app.graph._nodes.flatMap(n => (n.widgets ?? []).filter(w => w.element && !w.hidden && !linked(n, w)))
    return {blank: app.canvas.low_quality, hidden: texts.filter(w => !w.element.checkVisibility()).length,
            cut: notes.filter(e => e.scrollHeight > e.clientHeight).map(e => e.textContent.slice(0, 40)),
            notes: notes.length}
})()"""

SMALL = """(app.canvas.draw(true, true), app.graph._nodes
    .filter(n => n.properties.vitrine_enlarged)
    .flatMap(n => (n.imgs ?? [])
        .map(i => Math.max(i.naturalWidth, i.naturalHeight) / (n.imageIndex == null ? 1000 : n.size[0])))
    .filter(share => share < 1).length)"""
"""How many pictures that a template enlarges (``enlarge.js``) the classic page still shows smaller than their room: a
batch at its own size, or one picture that is narrower than its node."""


def test_what_counts_as_an_overlap():
    square = ("a", 0, 0, 10, 10)
    assert overlaps([square, ("beside", 10, 0, 10, 10), ("below", 0, 10, 10, 10)]) == []
    assert overlaps([square, ("corner", 9, 9, 10, 10)]) == [("corner", "a")]
    assert overlaps([square, ("within", 2, 2, 1, 1)]) == [("within", "a")]


TITLE = 30
"""Pixels that a node's title stands above its position."""
NARROW, TEXTS = (1600, 900), 8 / 14
"""Pixels of a small screen's window, and the zoom below which the classic page blanks texts and panels."""


@pytest.mark.parametrize("workflow", ALL, ids=lambda p: p.stem)
def test_a_template_opens_legible_on_a_small_screen(workflow):
    """The page fits the nodes with their titles, ten pixels wider on each side, into three quarters of its window."""
    nodes = read(workflow)["nodes"]
    sides = [max(n["pos"][i] + n["size"][i] for n in nodes) - min(n["pos"][i] for n in nodes) + 20 for i in range(2)]
    sides[1] += TITLE
    assert min(0.75 * window / side for window, side in zip(NARROW, sides, strict=True)) >= TEXTS


@pytest.mark.parametrize("workflow", ALL, ids=lambda p: p.stem)
def test_nodes_of_a_template_lie_apart_as_they_are_saved(workflow):
    nodes = [n for n in read(workflow)["nodes"] if not n["flags"].get("collapsed")]
    boxes = [
        (f"{n['type']} ({n['id']})", n["pos"][0], n["pos"][1] - TITLE, n["size"][0], n["size"][1] + TITLE)
        for n in nodes
    ]
    assert not overlaps(boxes)


async def _open(tab, workflow):
    """As the template browser does; returns its API graph, and what is drawn at opening."""
    graph = json.loads(workflow.read_text(encoding="utf-8"))
    await tab.send("Emulation.setDeviceMetricsOverride", **LAPTOP)
    as_template = f"true, true, {json.dumps(workflow.stem)}, {{openSource: 'template'}}"
    await tab.evaluate(f"app.loadGraphData({json.dumps(graph)}, {as_template})")
    await tab.wait_for(f"app.graph._nodes.length === {len(graph['nodes'])}")
    api = await tab.evaluate("app.graphToPrompt().then(p => p.output)")
    await tab.settle()
    return api, {"before": await tab.evaluate(BOXES), "unseen": await tab.evaluate(UNSEEN)}


async def _run(driver, workflow, address, vue):
    """Open as a template, convert and queue a workflow; returns what was found. VITRINE_SHOT keeps pictures there."""
    import time

    import aiohttp

    graph = json.loads(workflow.read_text())
    async with driver.page(address) as tab:
        await tab.evaluate(f"app.extensionManager.setting.set('Comfy.VueNodes.Enabled', {json.dumps(vue)})")
        opened = time.perf_counter()
        api, drawn = await _open(tab, workflow)
        entry = await tab.run(address)
        seconds = time.perf_counter() - opened
        async with aiohttp.ClientSession() as session:
            if os.environ.get("VITRINE_SHOT") and not vue:
                shown = sorted((n for n in every_node(graph) if n["type"] in SHOWING), key=lambda n: n["id"])
                rows = [(n.get("title", ""), await _pictures(session, address, entry, n["id"])) for n in shown]
                rows = rows or [(IN_THE_PANEL, await _before_and_after(tab))]
                _keep(workflow.stem, rows)
                if workflow.stem == OF_THE_PANEL:
                    await _keep_panel(tab)
            async with session.get(f"{address}/extensions/vitrine-pack/docs/VitrineActivationTap.md") as answer:
                help_page = await answer.text() if answer.status == 200 else ""
        drawn["after"] = await tab.evaluate(BOXES)
        drawn["small"] = 0 if vue else await tab.evaluate(SMALL)
        drawn["in the panel"] = await tab.evaluate(f"{PERSON}?.naturalWidth ?? 0")
        if os.environ.get("VITRINE_SHOT"):
            await tab.send("Emulation.clearDeviceMetricsOverride")
            boxes = [g["bounding"] for g in graph["groups"]] + [[*n["pos"], *n["size"]] for n in graph["nodes"]]
            scale = min(0.95, 1980 / max(x + w for x, _, w, _ in boxes), 980 / max(y + h for _, y, _, h in boxes))
            offset = f"[60, {64 / scale}]"  # below the page's own bars
            view = f"app.canvas.ds.scale = {scale}; app.canvas.ds.offset = {offset}; app.canvas.setDirty(true, true)"
            await tab.evaluate(view)
            await tab.settle()
            name = f"{workflow.stem}{', Nodes 2.0' if vue else ''}.png"
            await tab.screenshot(Path(os.environ["VITRINE_SHOT"]) / name)
        unknown = await tab.evaluate("app.graph._nodes.filter(n => n.has_errors).map(n => n.type)")
        return api, entry, help_page, unknown, tab.faults(), seconds, drawn


def _sheet(rows, path, side=112, wide=1000):
    """Write (title, PNG bytes of a batch) rows as one picture: what a workflow shows, large enough to see.

    Returns [title, boxes of its pictures on the sheet] of each row, as docs/sheets.py reads them.
    """
    sheet, x, y, low = Image.new("RGB", (wide, 8000), "white"), 8, 8, 0
    draw, places = ImageDraw.Draw(sheet), []
    for title, pictures in rows:
        opened = [Image.open(io.BytesIO(p)).convert("RGB") for p in pictures]
        high = 2 * side if len(opened) == 1 and opened[0].width >= 2.9 * opened[0].height else side  # one of several
        scale = min(high / opened[0].height, 3 * high / opened[0].width)
        opened = [i.resize((round(i.width * scale), round(i.height * scale)), Image.Resampling.LANCZOS) for i in opened]
        width = sum(i.width + 3 for i in opened)
        if x > 8 and x + width > wide:
            x, y = 8, low + 12
        draw.text((x, y), title, "black", font_size=13)
        places.append([title, []])
        for image in opened:
            if x + image.width > wide:
                x, y, width = 8, low - 12, wide  # what follows a batch of several lines begins a line
            sheet.paste(image, (x, y + 18))
            places[-1][1].append([x, y + 18, *image.size])
            x, low = x + image.width + 3, max(low, y + 18 + image.height)
        x = wide if width == wide else x + 16
    sheet.crop((0, 0, wide, low + 8)).save(path, quality=88)
    return places


def _keep(title, rows):
    """What a workflow shows, for docs/make_gallery.py: one sheet, and what stands where on it."""
    folder = Path(os.environ["VITRINE_SHOT"])
    places = _sheet(rows, folder / f"{title}.pictures.jpg")
    (folder / f"{title}.pictures.json").write_text(json.dumps(places))


OF_THE_PANEL, PANEL_SIZE = "Pull sliders, four nodes (demo)", (448, 313.5)
"""The template whose panel docs/pictures/widget_people.jpg shows, and how much of it, in pixels of the page."""


async def _keep_panel(tab):
    """The panel with its map and the first sliders, at twice the page's pixels."""
    node = "app.graph._nodes.find(n => n.comfyClass === 'VitrineW2WEdit')"
    view = (
        f"(({{ pos }}) => {{ app.canvas.ds.scale = 1; app.canvas.ds.offset = [300 - pos[0], 100 - pos[1]] }})({node})"
    )
    await tab.evaluate(
        f"{node}.setSize([{PANEL_SIZE[0] + 12}, {node}.size[1]]); {view}; app.canvas.setDirty(true, true)"
    )
    await tab.evaluate("document.querySelector('.vitrine-hover').style.display = 'none'")
    left, top, *_ = await tab.box(".vitrine-people")
    clip = {"x": left, "y": top, "width": PANEL_SIZE[0], "height": PANEL_SIZE[1], "scale": 2}
    answer = await tab.send("Page.captureScreenshot", format="png", clip=clip)
    (Path(os.environ["VITRINE_SHOT"]) / "widget_people.png").write_bytes(base64.b64decode(answer["data"]))


SHOWING = ("PreviewImage", "VitrineNEMOCompareCopies", "VitrineWordMap")
"""Nodes whose pictures the gallery shows."""
IN_THE_PANEL = "In the panel"
PERSON = "document.querySelector('.vitrine-person')"


async def _before_and_after(tab):
    """PNG bytes of the panel's picture with all sliders at 0, and as the template has them."""
    after = await tab.evaluate(f"{PERSON}.src")
    await tab.evaluate("document.querySelector('.vitrine-reset').click()")
    await tab.wait_for(f"{PERSON}.src !== {json.dumps(after)}")
    before = await tab.evaluate(f"{PERSON}.src")
    await tab.command("Undo")
    return [base64.b64decode(source.partition(",")[2]) for source in (before, after)]


async def _pictures(session, address, entry, node_id):
    """PNG bytes of what a node showed."""
    found = []
    outputs = {plain_id(i): output for i, output in entry["outputs"].items()}
    for image in outputs[str(node_id)]["images"]:
        async with session.get(f"{address}/view", params=image) as answer:
            found.append(await answer.read())
    return found


def _check_drawn(workflow, drawn):
    notes = sum(node["type"] == "MarkdownNote" for node in json.loads(workflow.read_text())["nodes"])
    assert drawn["unseen"] == {"blank": False, "hidden": 0, "cut": [], "notes": notes}
    assert not overlaps(drawn["before"])


def _check_twin(workflow, api):
    twin = ROOT / "workflows" / "api" / workflow.name
    if os.environ.get("VITRINE_WRITE_API"):
        twin.parent.mkdir(exist_ok=True)
        twin.write_text(json.dumps(api, indent=1) + "\n")
    assert _of_any_page(json.loads(twin.read_text())) == _of_any_page(api), "stale: run with VITRINE_WRITE_API=1"


def _of_any_page(api):
    """An API graph without what newer pages note of each node's pack in its ``_meta``."""
    return {
        i: node | {"_meta": {k: v for k, v in node["_meta"].items() if k not in ("cnr_id", "ver")}}
        for i, node in api.items()
    }


async def _opened(driver, workflow, address):
    async with driver.page(address) as tab:
        return *await _open(tab, workflow), tab.faults()


@pytest.mark.nightly
@pytest.mark.parametrize("workflow", ON_YOUR_MODEL, ids=lambda p: p.stem)
def test_a_template_on_your_model_opens_in_the_page(workflow, driver, address):
    """Its API graph runs on full-size checkpoints in tests/full_size/test_own_models.py."""
    api, drawn, errors = asyncio.run(_opened(driver, workflow, address))
    assert not errors
    _check_drawn(workflow, drawn)
    _check_twin(workflow, api)


DAILY = {
    "Pull sliders, four nodes (demo)",
    "See what the model sees (demo)",
}
"""Templates that run with every change; the others at night, since they take longer."""


def _cases():
    """Each template in the classic page, and in Nodes 2.0 at night."""
    for path in SHIPPED:
        yield pytest.param(path, False, id=path.stem, marks=[] if path.stem in DAILY else [pytest.mark.nightly])
        yield pytest.param(path, True, id=f"{path.stem}, Nodes 2.0", marks=[pytest.mark.nightly])


@pytest.mark.parametrize(("workflow", "vue"), list(_cases()))
def test_workflow_opens_and_runs_in_the_page(workflow, vue, driver, address, record_property):
    """``--junitxml=page.xml`` keeps the seconds from opening to the last picture (docs/gallery.md)."""
    api, entry, help_page, unknown, errors, seconds, drawn = asyncio.run(_run(driver, workflow, address, vue))
    record_property("seconds", round(seconds, 1))
    error = dict(entry["status"]["messages"]).get("execution_error", {})
    assert entry["status"]["status_str"] == "success", [error.get("node_type"), error.get("exception_message")]
    assert not unknown and not errors
    assert help_page.startswith("#")
    shown = {i for i, node in api.items() if node["class_type"] == "PreviewImage"}
    assert (shown or drawn["in the panel"]) and all(entry["outputs"][i]["images"] for i in shown)
    if not vue:
        _check_drawn(workflow, drawn)
    assert not overlaps(drawn["before"]) and not overlaps(drawn["after"]) and not drawn["small"]
    _check_twin(workflow, api)


async def _listed(driver, address):
    """Titles of our templates in the order in which the page is given them, which its browser keeps."""
    async with driver.page(address) as tab:
        asked = "import('/scripts/api.js').then(({ api }) => api.getWorkflowTemplates())"
        return (await tab.evaluate(asked))["vitrine-pack"], tab.faults()


@pytest.mark.nightly
def test_the_page_lists_templates_in_an_order_of_learning(driver, address):
    found, faults = asyncio.run(_listed(driver, address))
    assert set(found) == {p.stem for p in (ROOT / "workflows").glob("*.json")} and not faults
    first = ["Pull sliders, four nodes", "Pull sliders on a person", "Find the same part", "See what the model sees"]
    assert list(dict.fromkeys(map(plain_title, found)))[:4] == first
    twins = [(a, b) for a, b in itertools.pairwise(found) if plain_title(a) == plain_title(b)]
    assert len(twins) == 7 and all(a.endswith("(demo)") and b.endswith("(your checkpoint)") for a, b in twins)


async def _help_links(driver, address):
    """Where the links of a node's help lead, as the page's own panel shows them, once its picture stands there."""
    async with driver.page(address, alone=True) as tab:
        await tab.evaluate("""(() => {
            const node = LiteGraph.createNode('VitrineW2WEdit')
            app.graph.add(node); app.canvas.selectNodes([node]) })()""")
        await tab.wait_for("!!document.querySelector('[data-testid=info-button]')")
        await tab.evaluate("document.querySelector('[data-testid=info-button]').click()")
        await tab.wait_for("!!document.querySelector('a[href*=glossary]')")
        await tab.wait_for("document.querySelector('img[src*=\"docs/pictures/edited\"]').naturalWidth > 200")
        return await tab.evaluate("[...document.querySelectorAll('a[href*=glossary]')].map(a => a.href)")


def test_the_help_panels_links_lead_to_the_glossary(driver, address):
    links = asyncio.run(_help_links(driver, address))
    page = (ROOT / "nodes/web/docs/VitrineW2WEdit.md").read_text(encoding="utf-8")
    written = set(re.findall(r"\]\((/vitrine/glossary[^)]+)\)", page))
    assert len(written) >= 3 and {f"{address}{link}" for link in written} == set(links)


def test_the_help_pages_links_open_the_glossary(address):
    """As the page resolves them: from the root, in a new tab, at the word."""
    helps = [p.read_text(encoding="utf-8") for p in (ROOT / "nodes/web/docs").glob("Vitrine*.md")]
    links = {link for text in helps for link in re.findall(r"(?<!!)\[[^\]]*\]\(([^):]+)\)", text)}
    assert len(links) >= 8
    for link in links:
        assert link.startswith("/"), "newer pages resolve others against the page's own address"
        with urllib.request.urlopen(address + link.partition("#")[0]) as answer:
            assert answer.headers.get_content_type() == "text/html"
            page = answer.read().decode()
        word = link.partition("#")[2]
        assert f'<h2 id="{word}">' in page and "**" not in page and "`" not in page
